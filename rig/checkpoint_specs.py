"""What `rigctl checkpoints` is told of each checkpoint: catalogue entry in, specification out. Pure but for reads.

The specification's format is rigctl's (docs/checkpoints.md).
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from rig import layout
from rig.catalog import INVENTORY, ROOT, Checkpoint, DirectorySource, GeneratorSource, HubSource
from rig.hostplan import HostPlan

HOSTKIT = ROOT / "files" / "hostkit" / "rigctl"


def specification_path(name: str) -> str:
    """Where the host keeps a checkpoint's specification."""
    return f"{layout.ETC}/checkpoints/{name}.json"


def manifest_path(name: str) -> str:
    """Where the host keeps a pinned revision's manifest."""
    return f"{layout.ETC}/manifests/{name}.json"


def adopted_as_it_is(entry: Checkpoint) -> bool:
    """True when there is nothing to compare with: no source, or a repository without a pinned revision."""
    return not isinstance(entry.source, GeneratorSource) and revision(entry) is None


def revision(entry: Checkpoint) -> str | None:
    """The revision that must lie on the host; None when whatever lies there is taken."""
    if isinstance(entry.source, GeneratorSource):
        return generator_digest()[:12]
    return entry.source.revision if isinstance(entry.source, HubSource) else None


def specification(plan: HostPlan, name: str) -> dict[str, Any]:
    """The specification of one checkpoint of a host."""
    entry, path = plan.checkpoints[name], plan.checkpoint_paths[name]
    common = {"name": name, "kind": entry.role, "destination": path}
    source = entry.source
    if isinstance(source, GeneratorSource):
        made = {"type": "generator", "arguments": ["tiny-kimi", source.generator, "{directory}"]}
        # A new version of the generator takes the place of what an older one made.
        return {**common, "source": {**made, "revision": revision(entry)}, "replace": True, "reserve_bytes": 1 << 20}
    if isinstance(source, HubSource) and source.revision is not None:
        hub = {"type": "hub", "repository": source.repository, "revision": source.revision, "endpoint": source.endpoint}
        token = {"token": {"credential": "hub-token"}} if plan.data.hub_token_file else {}
        manifest = {"manifest": manifest_path(name)} if local_manifest(name).is_file() else {}
        include = {"include": [] if source.include == ["*"] else source.include, "exclude": source.exclude}
        return {**common, "source": {**hub, **token}, **include, **manifest}
    # A directory that is its own source is proved and recorded, never changed.
    return {**common, "source": {"type": "local", "path": path}}


def local_manifest(name: str) -> Path:
    """Where the repository keeps a pinned revision's manifest."""
    return INVENTORY / "manifests" / f"{name}.json"


def expected_bytes(name: str, entry: Checkpoint) -> int | None:
    """Bytes of all its files: the manifest's sum, else what the catalogue says; None where nothing is fetched."""
    if isinstance(entry.source, DirectorySource | GeneratorSource):
        return None
    if local_manifest(name).is_file():
        return sum(int(file["size"]) for file in json.loads(local_manifest(name).read_text())["files"])
    return entry.bytes


def checkpoint_files(plan: HostPlan) -> dict[str, bytes]:
    """Absolute path -> content of every specification and manifest of a host."""
    files: dict[str, bytes] = {}
    for name in plan.checkpoints:
        files[specification_path(name)] = json.dumps(specification(plan, name), indent=2).encode() + b"\n"
        if local_manifest(name).is_file():
            files[manifest_path(name)] = local_manifest(name).read_bytes()
    return files


@cache
def generator_digest() -> str:
    """sha256 over the generator's source: another generator makes other checkpoints."""
    digest = hashlib.sha256()
    for path in sorted((HOSTKIT / "tiny_kimi").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
