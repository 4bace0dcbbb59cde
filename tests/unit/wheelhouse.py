"""Small synthetic environments: packages with a RECORD, hard-linked from a cache as uv does it."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path


def record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def install(site: Path, cache: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """Install a package into `site`; its files are hard links of those in `cache`. Returns the dist-info."""
    dist_info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    contents = {**files, f"{dist_info}/METADATA": metadata}
    record = "".join(record_line(path, text.encode()) for path, text in contents.items())
    for path, text in (contents | {f"{dist_info}/RECORD": f"{record}{dist_info}/RECORD,,\n"}).items():
        cached = cache / f"{name}-{version}" / path
        cached.parent.mkdir(parents=True, exist_ok=True)
        if not cached.exists():
            cached.write_text(text)
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("RECORD"):
            (site / path).write_text(text)
        else:
            os.link(cached, site / path)
    return site / dist_info
