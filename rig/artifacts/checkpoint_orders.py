"""The order for each checkpoint of a host: catalogue entry in, contract/checkpoint_job.py out. Pure but for reads."""

from pathlib import Path

from rig.catalog.entries import Checkpoint, inventory_directory
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.checkpoint_job import CheckpointJob, Secret
from rigctl.contract.manifest import Manifest
from rigctl.contract.sources import DirectorySource, GeneratorSource, HubSource

GENERATOR_REVISIONS = {"kimi": "ba1984e96a2f", "qwen3": "4c1e0d5a7b92", "glm": "9f3b62c8e014", "topics": "5d20c9e7416b"}
"""Revisions of what `rigctl tiny-model` makes, by family. Another one replaces generated checkpoints on hosts, so it
changes with their bytes and with nothing else (tests/unit/test_tiny_models.py)."""


def specification_path(name: str) -> str:
    return f"{layout.ETC}/checkpoints/{name}.json"


def manifest_path(name: str) -> str:
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
        return GENERATOR_REVISIONS.get(entry.source.generator.partition("-")[0], GENERATOR_REVISIONS["kimi"])
    return entry.source.revision if isinstance(entry.source, HubSource) else None


def order(plan: HostPlan, name: str) -> CheckpointJob:
    entry = plan.checkpoints[name]
    generated = isinstance(entry.source, GeneratorSource)
    fetched_from_hub = isinstance(entry.source, HubSource) and not unpinned(entry)
    return CheckpointJob(
        name=name,
        role=entry.role,
        destination=plan.checkpoint_paths[name],
        source=DirectorySource(kind="directory") if unpinned(entry) else entry.source,
        token=Secret(credential="hub-token") if fetched_from_hub and plan.data.hub_token_file else None,
        generator_revision=revision(entry) if generated else None,
        manifest=manifest_path(name) if manifest(name, entry) else None,
        digests=entry.digests,
        # A new version of the generator takes the place of what an older one made.
        replace=generated,
        bandwidth_limit=entry.bandwidth_limit,
        reserve_bytes=1 << (20 if generated else 30),
    )


def local_manifest(name: str) -> Path:
    return inventory_directory() / "manifests" / f"{name}.json"


def manifest(name: str, entry: Checkpoint) -> Manifest | None:
    """The repository's manifest, where this entry is proved by it (an overlay may put another source here).

    Raises ContractError for a broken manifest.
    """
    place = local_manifest(name)
    if isinstance(entry.source, GeneratorSource) or adopted_as_it_is(entry) or not place.is_file():
        return None
    kept = Manifest.read(place)
    return kept if revision(entry) in (None, kept.revision) else None


def wanted_identity(name: str, entry: Checkpoint) -> str | None:
    """The identity of the content that the repository's manifest describes; None without one, and for a hub's, whose
    revision says it. Raises ContractError for a broken manifest, or one that the entry's digests contradict.
    """
    kept = None if isinstance(entry.source, HubSource) else manifest(name, entry)
    return kept.wanted(entry.source, entry.digests).identity() if kept else None


def expected_bytes(name: str, entry: Checkpoint) -> int | None:
    """Bytes of all its files: the manifest's sum, else what the catalogue says; None where nothing is fetched."""
    if isinstance(entry.source, DirectorySource | GeneratorSource):
        return None
    kept = manifest(name, entry)
    return kept.total if kept else entry.bytes


def checkpoint_files(plan: HostPlan) -> dict[str, bytes]:
    """Absolute path -> content of every order and manifest of a host."""
    files: dict[str, bytes] = {}
    for name, entry in plan.checkpoints.items():
        files[specification_path(name)] = order(plan, name).text().encode()
        if manifest(name, entry):
            files[manifest_path(name)] = local_manifest(name).read_bytes()
    return files
