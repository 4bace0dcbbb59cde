"""Small synthetic environments: packages with a RECORD, hard-linked from a cache as uv does it."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
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


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """A wheel file that any installer takes. Returns its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    contents = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(record_line(path, text.encode()) for path, text in contents.items())
    contents[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n"
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in contents.items():
            archive.writestr(inside, text)
    return path


def lock_text(*wheels: Path) -> str:
    """A requirements file with hashes for these wheels."""
    lines = []
    for path in wheels:
        name, version = path.name.split("-")[:2]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{digest}\n")
    return "".join(lines)
