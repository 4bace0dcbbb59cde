"""`rigctl prune`: remove engine environments that no state of this host needs any more.

Kept: the current environment of each release and the two that were current before it, what one of the last three states
names, and always what a process, a job or a unit uses. With them go the wheels in uv's cache, of which environments are
copies. Of the states themselves the last eight, if their environments are there.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rigctl import builder
from rigctl.contract import layout
from rigctl.engines.environment import BUILD_LOCK, BUILDERS_CACHE, STAMP
from rigctl.errors import RigctlError
from rigctl.own_process import own_process
from rigctl.whole_files import read_object, write_whole

PREVIOUS = 2
"""Environments of a release that stay beside the current one."""
STATES_THAT_HOLD = 3
CACHE = ".cache"
UNITS = Path(layout.UNITS)


@dataclass(frozen=True)
class Found:
    """What is not needed: environments to remove, those that stay because something uses them, states to forget."""

    unneeded: tuple[Path, ...]
    used: tuple[Path, ...]
    states: tuple[Path, ...]


def look(base: Path, states: Path, current: Iterable[Path]) -> Found:
    """Decide; changes nothing. Environments are <base>/<release>/<digest>; current: those of the deploy's plan."""
    now = set(current)
    everything = [path for path in base.glob("*/*") if path.is_dir() and not path.is_symlink() and _is_ours(path)]
    complete = sorted(
        (path for path in everything if (path / STAMP).exists()),
        key=lambda path: (path / STAMP).stat().st_mtime_ns,
        reverse=True,
    )
    present = read_object(states / Path(layout.PRESENT_STATE).name) or {}
    way = [present.get("id"), *present.get("before", ())]  # what the next rollbacks return to comes first
    records = sorted((path for path in states.glob("*.json") if _digest(path.stem)), key=os.path.getmtime, reverse=True)
    records.sort(key=lambda path: way.index(path.stem) if path.stem in way else len(way))
    named = {path: _environments(path) for path in records}
    keep = now.union(*(named[path] for path in records[:STATES_THAT_HOLD]))
    for release in {path.parent for path in now}:
        others = [path for path in complete if path.parent == release and path not in now]
        keep |= set(others[:PREVIOUS])
    candidates = [path for path in everything if path not in keep]
    used = in_use(candidates)
    unneeded = [path for path in candidates if path not in used]
    stay = set(everything) - set(unneeded)
    whole = [path for path in records if path.stem == present.get("id") or named[path] <= stay]
    return Found(
        tuple(sorted(unneeded)), tuple(sorted(used)), tuple(sorted(set(records) - set(whole[: layout.STATES_KEPT])))
    )


def in_use(candidates: Sequence[Path]) -> set[Path]:
    """Those that a running process, a job that builds them or a unit file names."""
    if not candidates:
        return set()
    texts = [path.read_text(errors="replace") for path in UNITS.glob("kimi-*.service")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            # A word that only names an environment belongs to us or to a builder, and ends without a slash.
            texts += ["\n".join(word.decode(errors="replace") for word in words if word.startswith(b"/"))]
            texts.append((process / "maps").read_text(errors="replace"))
        except OSError:
            continue
    used = {path for path in candidates if any(f"{path}/" in text for text in texts)}
    for path in set(candidates) - used:
        job = f"kimi-job-env-{path.parent.name}-{path.name}.service"
        if subprocess.run(["systemctl", "is-active", "-q", job], check=False, capture_output=True).returncode == 0:
            used.add(path)
    return used


def prune(base: Path, states: Path, current: Iterable[Path], created: Path | None) -> Found:
    """Remove what `look` finds, and its lines in the list of what we created. Killed anywhere, the next run goes on."""
    found = look(base, states, current)
    _remove(base, found.unneeded, created)
    for path in found.states:
        path.unlink(missing_ok=True)
    return found


def drop(path: Path, created: Path | None) -> None:
    """Remove one environment to make room; the states that name it cannot come back. Raises RigctlError with a reason.

    Never one that a release uses at present, or a process, a job or a unit.
    """
    if not (path.is_absolute() and path.is_dir() and not path.is_symlink() and _is_ours(path)):
        raise RigctlError(f"{path} is no engine environment of this host")
    if (path.parent / "current").resolve() == path or in_use([path]):
        raise RigctlError(f"{path} is in use: deploy and stop what runs from there first (`rigctl status`)")
    _remove(path.parent.parent, [path], created)


def _remove(base: Path, unneeded: Sequence[Path], created: Path | None) -> None:
    for path in unneeded:
        (path / STAMP).unlink(missing_ok=True)  # from here on it does not count as an environment
        shutil.rmtree(path)
    if unneeded:
        _sweep_cache(base / CACHE)
    if created is not None and created.exists():
        gone = {f"tree {path}" for path in unneeded}
        lines = created.read_text().splitlines(keepends=True)
        if any(line.rstrip("\n") in gone for line in lines):
            write_whole(created, "".join(line for line in lines if line.rstrip("\n") not in gone))


def _sweep_cache(cache: Path) -> None:
    """Remove unpacked wheels; uv fetches one again when it is asked for it.

    Its own `uv cache prune` keeps every wheel that it could use again, 10 GB an engine.
    """
    building = ["systemctl", "list-units", "--no-legend", "--plain", "--state=active", "kimi-job-env-*"]
    if subprocess.run(building, check=False, capture_output=True, errors="replace").stdout.strip():
        return  # it reads them now
    sweep(cache)
    if (theirs := cache / BUILDERS_CACHE).is_dir():
        again = own_process("rigctl.engines.prune", str(theirs))
        with builder.sandboxed(again, unit=f"prune-{os.getpid()}", writes=[theirs]) as command:
            subprocess.run(command, check=False)


def sweep(cache: Path) -> None:
    """Remove the wheels of a cache: root in its own, the builder in its own.

    And what uv noted of them: it does not miss a wheel of a directory that it has unpacked once (seen with 0.13.9).
    """
    for bucket in (*cache.glob("wheels-v*"), *cache.glob("archive-v*")):
        shutil.rmtree(bucket)


def _is_ours(path: Path) -> bool:
    """An environment, also a half-made one, and no directory of the operator's that is named by a date: builds lock."""
    return _digest(path.name) and ((path / STAMP).exists() or (path.parent / BUILD_LOCK).exists())


def _digest(name: str) -> bool:
    return len(name) == 12 and set(name) <= set("0123456789abcdef")


def _environments(state: Path) -> set[Path]:
    environments = (read_object(state) or {}).get("environments")
    return {Path(path) for path in environments.values()} if isinstance(environments, dict) else set()


def run(arguments: argparse.Namespace) -> int:
    """Print one line an environment: "unneeded PATH", "used PATH"; remove the first kind unless only asked to list."""
    if arguments.drop is not None:
        drop(arguments.drop, Path(layout.CREATED))
        print(f"removed {arguments.drop}")
        return 0
    if arguments.base is None or arguments.states is None:
        raise RigctlError("name --drop, or --base and --states")
    current = [Path(path) for path in arguments.current]
    if arguments.list:
        found = look(arguments.base, arguments.states, current)
    else:
        found = prune(arguments.base, arguments.states, current, arguments.created)
    for path in [*found.unneeded, *found.states]:
        print(f"unneeded {path}")
    for path in found.used:
        print(f"used {path}")
    return 0


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `prune` to the command line."""
    parser = subparsers.add_parser("prune", help="remove engine environments that no state needs")
    parser.add_argument("--drop", type=Path, metavar="PATH", help="remove this one, which a rollback would return to")
    parser.add_argument("--base", type=Path, help="directory of all environments (ml_env)")
    parser.add_argument("--states", type=Path, help="directory of the recorded states")
    parser.add_argument("--current", action="append", default=[], help="an environment in use by the plan; repeatable")
    parser.add_argument("--created", type=Path, help="list of what we created, to be kept true")
    parser.add_argument("--list", action="store_true", help="change nothing")
    parser.set_defaults(run=run)


if __name__ == "__main__":
    sweep(Path(sys.argv[1]))
