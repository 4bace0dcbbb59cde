"""What `rigctl checkpoints` is told of each checkpoint: catalogue entry in, specification out. Pure but for reads.

The specification's format is rigctl's (docs/checkpoints.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rig.catalog.entries import (
    INVENTORY,
    Checkpoint,
    DirectorySource,
    Files,
    GeneratorSource,
    HttpSource,
    HubSource,
    LocalSource,
    RsyncSource,
)
from rig.plan.host_plan import HostPlan
from rigctl.checkpoints import manifest as manifests
from rigctl.contract import layout

GENERATOR_REVISION = "ba1984e96a2f"
"""Revision of what `rigctl tiny-kimi` makes. Another one replaces generated checkpoints on hosts, so it changes with
their bytes and with nothing else (tests/unit/test_tiny_kimi.py)."""


def specification_path(name: str) -> str:
    """Where the host keeps a checkpoint's specification."""
    return f"{layout.ETC}/checkpoints/{name}.json"


def manifest_path(name: str) -> str:
    """Where the host keeps a pinned revision's manifest."""
    return f"{layout.ETC}/manifests/{name}.json"


def unpinned(entry: Checkpoint) -> bool:
    """True for a repository without a revision, of which nothing may be fetched."""
    return isinstance(entry.source, HubSource) and entry.source.revision is None and not entry.source.allow_unpinned


def adopted_as_it_is(entry: Checkpoint) -> bool:
    """True when there is nothing to compare with: no source, or a repository without a pinned revision."""
    return isinstance(entry.source, DirectorySource) or unpinned(entry)


def revision(entry: Checkpoint) -> str | None:
    """The revision that must lie on the host; None when whatever lies there is taken."""
    if isinstance(entry.source, GeneratorSource):
        return GENERATOR_REVISION
    return entry.source.revision if isinstance(entry.source, HubSource) else None


def specification(plan: HostPlan, name: str) -> dict[str, Any]:
    """The specification of one checkpoint of a host."""
    entry, path = plan.checkpoints[name], plan.checkpoint_paths[name]
    common: dict[str, Any] = {"name": name, "kind": entry.role, "destination": path}
    if isinstance(entry.source, GeneratorSource):
        made = {"type": "generator", "arguments": ["tiny-kimi", entry.source.generator, "{directory}"]}
        # A new version of the generator takes the place of what an older one made.
        return {**common, "source": {**made, "revision": revision(entry)}, "replace": True, "reserve_bytes": 1 << 20}
    if adopted_as_it_is(entry):
        # A directory that is its own source is proved and recorded, never changed.
        return {**common, "source": {"type": "local", "path": path}}
    source = {**source_of(entry), **({"token": {"credential": "hub-token"}} if _gets_token(plan, entry) else {})}
    limit = {"bandwidth_limit": entry.bandwidth_limit} if entry.bandwidth_limit else {}
    digests = {"digests": entry.digests} if entry.digests else {}
    manifest = {"manifest": manifest_path(name)} if has_manifest(name, entry) else {}
    return {**common, "source": source, **patterns(entry), **digests, **manifest, **limit}


def source_of(entry: Checkpoint) -> dict[str, Any]:
    """The source in rigctl's words, without secrets. Only for kinds that are fetched."""
    source = entry.source
    if isinstance(source, HubSource):
        return _keys(source, "hub", "repository", "revision", "endpoint", "mirror", "transfer", "allow_unpinned")
    if isinstance(source, HttpSource):
        return _keys(source, "http", "url", "manifest_url", "mirror")
    if isinstance(source, RsyncSource):
        identity = {"identity": {"file": source.identity_file}} if source.identity_file else {}
        return {**_keys(source, "rsync", "host", "path", "user", "port", "known_hosts"), **identity}
    assert isinstance(source, LocalSource), source.kind
    return {"type": "local", "path": source.path}


def _keys(source: Files, kind: str, *keys: str) -> dict[str, Any]:
    return {"type": kind, **{key: getattr(source, key) for key in keys}}


def patterns(entry: Checkpoint) -> dict[str, Any]:
    """include and exclude in rigctl's words."""
    source = entry.source
    if not isinstance(source, Files):
        return {}
    return {"include": [] if source.include == ["*"] else source.include, "exclude": source.exclude}


def described(entry: Checkpoint) -> str:
    """Where a checkpoint comes from, in a few words."""
    source = entry.source
    match source:
        case HubSource():
            return source.repository
        case HttpSource():
            return source.url
        case RsyncSource():
            return f"{source.host}:{source.path}"
        case LocalSource():
            return source.path
    return source.kind


def _gets_token(plan: HostPlan, entry: Checkpoint) -> bool:
    return isinstance(entry.source, HubSource) and plan.data.hub_token_file is not None


def local_manifest(name: str) -> Path:
    """Where the repository keeps a pinned revision's manifest."""
    return INVENTORY / "manifests" / f"{name}.json"


def has_manifest(name: str, entry: Checkpoint) -> bool:
    """Whether the repository has a manifest that this entry is proved by (an overlay may put another source here)."""
    place = local_manifest(name)
    if isinstance(entry.source, GeneratorSource) or adopted_as_it_is(entry) or not place.is_file():
        return False
    listed = json.loads(place.read_text(encoding="utf-8"))
    return revision(entry) in (None, listed.get("revision"))


def wanted_identity(name: str, entry: Checkpoint) -> str | None:
    """The identity of the content that the repository's manifest describes; None without one, and for a hub's, whose
    revision says it. Raises RigctlError for a broken manifest, or one that the entry's digests contradict.
    """
    if isinstance(entry.source, HubSource) or not has_manifest(name, entry):
        return None
    rules = patterns(entry)
    kept = manifests.load(local_manifest(name)).select(rules["include"], rules["exclude"])
    known = {p: d for p, d in entry.digests.items() if manifests.is_selected(p, rules["include"], rules["exclude"])}
    return kept.agreeing(known).identity()


def expected_bytes(name: str, entry: Checkpoint) -> int | None:
    """Bytes of all its files: the manifest's sum, else what the catalogue says; None where nothing is fetched."""
    if isinstance(entry.source, DirectorySource | GeneratorSource):
        return None
    if has_manifest(name, entry):
        return sum(int(file["size"]) for file in json.loads(local_manifest(name).read_text())["files"])
    return entry.bytes


def checkpoint_files(plan: HostPlan) -> dict[str, bytes]:
    """Absolute path -> content of every specification and manifest of a host."""
    files: dict[str, bytes] = {}
    for name, entry in plan.checkpoints.items():
        files[specification_path(name)] = json.dumps(specification(plan, name), indent=2).encode() + b"\n"
        if has_manifest(name, entry):
            files[manifest_path(name)] = local_manifest(name).read_bytes()
    return files
