"""`kimi-rig pin`: pin a checkpoint's revision, and write its manifest into inventory/manifests/."""

import re
import threading
from pathlib import Path

import click

from rig.artifacts.checkpoint_orders import local_manifest
from rig.catalog.entries import Checkpoint, forget_catalogs, inventory_directory, load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.cli.arguments import verb
from rigctl.checkpoints.progress import Progress, human_bytes
from rigctl.checkpoints.sources import open_source
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import Manifest
from rigctl.contract.sources import DirectorySource, GeneratorSource, HubSource
from rigctl.errors import RigctlError
from rigctl.whole_files import write_json, write_whole


class PinFailed(RigctlError):
    """The checkpoint stays as it is; the text says why."""


def pin(name: str, revision: str | None, token_file: Path | None) -> tuple[Manifest, bool]:
    """Write the manifest (and a hub entry's revision); (the manifest, whether anything changed).

    Raises PinFailed, CatalogError.
    """
    entry = load_catalog().checkpoints.get(name)
    if entry is None:
        raise PinFailed(f"checkpoints.yaml has no entry {name}")
    if isinstance(entry.source, DirectorySource | GeneratorSource):
        raise PinFailed(f"checkpoint {name} is of kind {entry.source.kind}: it has no source with a revision")
    if revision is not None and not isinstance(entry.source, HubSource):
        raise PinFailed(f"checkpoint {name} is of kind {entry.source.kind}: only a hub repository has revisions")
    manifest = listed(name, entry, revision, token_file)
    changed = False
    if isinstance(entry.source, HubSource):
        changed = revise(inventory_directory() / "checkpoints.yaml", name, entry.source, str(manifest.revision))
    return manifest, written(local_manifest(name), manifest) or changed


def listed(name: str, entry: Checkpoint, revision: str | None, token_file: Path | None) -> Manifest:
    """What the source has, of the files that the entry wants. Raises PinFailed."""
    source, token = entry.source.model_dump(), None
    if isinstance(entry.source, HubSource):
        source |= {"revision": revision or entry.source.revision, "allow_unpinned": True}
        token = {"file": str(token_file.resolve())} if token_file else None
    order = {"format": CheckpointJob.FORMAT, "name": name, "destination": f"/{name}", "source": source, "token": token}
    try:
        job = CheckpointJob.parse({**order, "retries": 2}, f"checkpoints.{name}")
        found = open_source(job, Progress(name), threading.Event()).listing()
        if found is not None:
            return found.wanted(job.source, entry.digests)
    except RigctlError as error:
        raise PinFailed(f"checkpoint {name} stays as it is: {error}") from error
    raise PinFailed(f"checkpoint {name}: its source lists nothing")


def written(place: Path, manifest: Manifest) -> bool:
    """Write a manifest; False if it was there already."""
    before = place.read_bytes() if place.is_file() else b""
    write_json(place, manifest.document())
    return place.read_bytes() != before


def revise(catalogue: Path, name: str, source: HubSource, revision: str) -> bool:
    """Put the revision into the entry, by its text: comments and order stay. Raises PinFailed, CatalogError."""
    if source.revision == revision:
        return False
    text = catalogue.read_text(encoding="utf-8")
    entry = re.search(rf"^{re.escape(name)}:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    if entry is None:
        raise PinFailed(
            f"{catalogue.name}: the entry {name} is not written as a block; put revision: {revision} into it"
        )
    block = entry[0]
    if source.revision is not None:
        fresh = block.replace(source.revision, revision)
    else:
        # `repository: a/b` in a block gets a line of its own, in braces a key beside it.
        fresh = re.sub(
            r"(?m)^(?P<indent>[ ]+)(?P<key>repository:[ ]*[\w./-]+)(?P<rest>[ ]*(?:#.*)?)$",
            rf"\g<indent>\g<key>\g<rest>\n\g<indent>revision: {revision}",
            block,
        )
        if fresh == block:
            fresh = re.sub(r"(repository:[ ]*[\w./-]+)(?=[ ]*[,}])", rf"\1, revision: {revision}", block)
    write_whole(catalogue, text.replace(block, fresh))
    forget_catalogs()
    try:
        pinned = load_catalog(None, catalogue.parent).checkpoints[name].source
        if source.model_copy(update={"revision": revision}) != pinned:
            raise PinFailed(
                f"{catalogue.name}: put revision: {revision} into {name} by hand: its text was not understood"
            )
    except (CatalogError, PinFailed):
        write_whole(catalogue, text)
        raise
    return True


@verb("pin")
@click.argument("checkpoint")
@click.option("--revision", metavar="COMMIT", help="40 hex digits; default: the entry's, or what is main now.")
@click.option("--token-file", type=Path, help="File with a hub token that only its owner reads.")
def pin_command(checkpoint: str, revision: str | None, token_file: Path | None) -> None:
    """Pin the revision of CHECKPOINT, an entry of inventory/checkpoints.yaml, and write its manifest.

    Where the source cannot be asked nothing is changed. Exit codes: 0 pinned, 1 not.
    """
    manifest, changed = pin(checkpoint, revision, token_file)
    word = "pinned" if changed else "unchanged"
    at = f" at {manifest.revision}" if manifest.revision else ""
    print(f"{checkpoint}: {word}{at}, {len(manifest.files)} files, {human_bytes(manifest.total)}")
