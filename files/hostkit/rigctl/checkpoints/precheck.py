"""Pre-checks of a serving unit that concern its checkpoints: published, fitting, their code as proved.

From records, config files and safetensors headers: seconds, no weights are read. Each returns what it found in a few
words and raises RigctlError when it does not hold.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rigctl.checkpoints import overlay, record
from rigctl.checkpoints.fit import Verdict, check, check_head, read_model
from rigctl.checkpoints.paths import walk
from rigctl.checkpoints.record import Record
from rigctl.checkpoints.verify import FileHasher, hash_file
from rigctl.contract.eagle3_conventions import Engine
from rigctl.contract.run_specification import RunSpecification
from rigctl.contract.served_checkpoints import DrafterPair, Training
from rigctl.engine_registry import architectures
from rigctl.errors import RigctlError

Using = RunSpecification | DrafterPair
"""What names checkpoints: the run specification, or one of the order of pairs."""


def published(specification: Using) -> str:
    """Target and drafter are recorded, and still as they were proved (size, mtime and inode of every file)."""
    said = []
    for name, path in _used(specification):
        known = _record(name, path)
        report = record.quick_report(known)
        if not report.complete:
            cure = "" if report.extra else "; deploy again"
            raise RigctlError(f"{name} in {known.path} is not as it was proved: {report.lines()[0]}{cure}")
        said.append(f"{name}: {report.checked} files as proved, {known.manifest.revision or known.manifest.source}")
    return "; ".join(said)


def trusted_code(specification: Using) -> str:
    """`trust_remote_code` runs no Python file but those that the proved manifests list, byte for byte."""
    if not specification.checkpoints.trust_remote_code:
        return "none is trusted"
    count = 0
    for name, path in _used(specification):
        known = _record(name, path)
        root = Path(known.path)
        for relative, place in walk(root):
            if place.suffix != ".py":
                continue
            entry = known.manifest.by_path.get(relative)
            if entry is None:
                raise RigctlError(f"{place} is not in the manifest of {name}: move it away, or leave trust_remote_code")
            digest, _ = hash_file(place, FileHasher(entry.digest().partition(":")[0], place.stat().st_size))
            if digest != entry.digest():
                raise RigctlError(f"{place} has {digest}, the manifest of {name} says {entry.digest()}; deploy again")
            count += 1
    return f"{count} Python files have the digests of their manifests"


def fits(specification: Using) -> str:
    """What drafts fits its target on this engine release, and the unit has the variables that it needs."""
    found = verdict(specification, specification.drafter_path)
    if found is None:
        return "no drafter"
    hold(specification, found, os.environ)
    return "; ".join(found.lines())


def identities(specification: Using) -> dict[str, str]:
    """Name -> digest over all proved files of each checkpoint in use: another one, and what lies there is another."""
    return {name: _record(name, path).manifest.identity() for name, path in _used(specification)}


def hold(specification: Using, found: Verdict, environment: Mapping[str, str]) -> None:
    """Raise RigctlError unless the verdict lets a unit with these variables use the pair."""
    what = specification.drafter_path or specification.method
    pair = f"{what} for {specification.target_path} on {specification.release}"
    if found.refuse:
        raise RigctlError(
            f"{pair}: {'; '.join(found.refuse)}; name another drafter or method in inventory/serving.yaml, or mend the "
            "entry in inventory/checkpoints.yaml, and deploy"
        )
    lacking = [f"{name}={value}" for name, value in found.environment.items() if environment.get(name) != value]
    if lacking:
        raise RigctlError(
            f"{pair} needs {', '.join(lacking)}: put it into the environment of serving.{specification.name} and deploy"
        )


def verdict(
    specification: Using, drafter: str | Path | None, written: Mapping[str, Any] | None = None
) -> Verdict | None:
    """The verdict on what a configuration drafts with; None where nothing does, or the text itself (n-gram).

    written: as for fit.check.
    """
    used, target = specification.checkpoints, Path(specification.target_path)
    if specification.method == "mtp":
        return check_head(target, Engine(specification.engine, used.version), specification.steps)
    if drafter is None:
        return None
    known, unread = None, []
    try:
        if specification.environment_path is not None:
            known = architectures(Path(specification.environment_path), specification.engine)
    except RigctlError as error:  # a release that keeps it elsewhere: its own start will say
        unread.append(f"the drafter's architecture is not validated: {error}")
    context = used.context or read_model(target, with_tensors=False).number("max_position_embeddings")
    if context is None:
        raise RigctlError(
            f"{target}/config.json names no max_position_embeddings: set context_length in serving.yaml and deploy"
        )
    found = check(
        target,
        Path(drafter),
        Engine(specification.engine, used.version),
        context,
        used.training or Training(),
        method=specification.method or "eagle3",
        steps=specification.steps,
        known=known,
        name=used.target,
        written=written,
    )
    found.note += unread
    return found


def judge(pair: DrafterPair, *, write: bool) -> dict[str, Any]:
    """One pair before its unit is written, as JSON: name, verdict, error (null: a unit may use it), and overlay (null:
    it needs none; "absent", "current", "written").

    write: make or renew the overlay; else a missing one is validated by what it will hold.
    """
    found: dict[str, Any] = {"name": pair.name, "overlay": None, "error": None, "verdict": None}
    try:
        judged = verdict(pair, pair.checkpoint_path) or Verdict()
        if pair.checkpoint_path and pair.drafter_path and pair.checkpoint_path != pair.drafter_path:
            source, place, keys = Path(pair.checkpoint_path), Path(pair.drafter_path), judged.keys
            judged = verdict(pair, source, keys) or judged
            current = overlay.is_current(source, place, keys)
            found["overlay"] = "current" if current else "absent"
            if write and not current and not judged.refuse:
                overlay.write(source, place, keys)
                found["overlay"] = "written"
        found["verdict"] = judged.to_json()
        hold(pair, judged, pair.environment)
    except (RigctlError, OSError) as error:
        found["error"] = str(error)
    return found


def _used(specification: Using) -> Iterator[tuple[str, Path]]:
    """Names and places of the checkpoints; of a drafter's overlay the checkpoint behind it."""
    yield specification.checkpoints.target, Path(specification.target_path)
    if specification.drafter_path is not None:
        place = Path(specification.drafter_path)
        if specification.checkpoints.drafter is None:
            raise RigctlError(f"{place} is the drafter of no checkpoint: deploy again")
        yield specification.checkpoints.drafter, overlay.source(place) or place


def _record(name: str, place: Path) -> Record:
    known = record.from_environment().load(name)
    if known is None:
        raise RigctlError(f"{name} has never been proved: deploy again, which stages or adopts {place}")
    if not place.is_dir():
        raise RigctlError(f"{name} is not at {place}; deploy again to stage it")
    if Path(known.path).resolve() != place.resolve():
        raise RigctlError(f"{name} was proved at {known.path}, the configuration names {place}; deploy again")
    return known
