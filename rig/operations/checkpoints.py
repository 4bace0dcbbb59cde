"""Model and drafters on the host: complete and proved, or not there."""

from __future__ import annotations

import json
import shlex
from typing import Any

from pyinfra import host
from pyinfra.api import operation

from rig import layout
from rig.catalog import Checkpoint, GeneratorSource, HubSource
from rig.checkpoint_specs import adopted_as_it_is, revision, specification_path
from rig.facts.state import Lines
from rig.operations import jobs
from rig.operations.common import Commands, made, note, refuse, remember, script

# 595 GB at 100 Mbit/s take 13 hours; a job that outlasts this has hung.
LIMIT_SECONDS = 48 * 3600


@operation()
def checkpoint(checkpoint_name: str, entry: Checkpoint, path: str, hub_token: bool) -> Commands:
    """The checkpoint lies complete at `path` and is recorded. What the operator put there is never changed.

    Its state is rigctl's quick verification: size, modification time and inode of every file against the record of the
    last full proof.
    """
    name, there = checkpoint_name, f"[ -e {shlex.quote(path)}/config.json ]"
    status = f"{layout.RIGCTL} checkpoints status {name} --json"
    found = host.get_fact(Lines, script=f"{status}; {there} && echo there")
    state = _state(found)
    # Without a revision in its record it was taken as it lay, on a host that could not ask the hub.
    as_it_lay = state.get("origin") == "adopted" and state.get("revision") is None
    if state.get("state") == "complete" and (as_it_lay or revision(entry) in (None, state.get("revision"))):
        host.noop(f"{path} is complete")
        return
    if adopted_as_it_is(entry) and "there" not in found:
        yield from refuse(_absent(name, entry, path))
        return
    note(f"{path}: {_what_happens(entry, state, 'there' in found)}")
    # What staging brings is ours to take away; what is adopted is not.
    parent, _, folder = path.rpartition("/")
    brought = [
        f"[ -e {shlex.quote(one)} ] || {{ {remember('tree', one)}; }}" for one in (path, f"{parent}/.{folder}.partial")
    ]
    yield script(*brought, made(parent))
    token = [f"LoadCredential=hub-token:{layout.CREDENTIALS}/hub-token"] if hub_token else []
    yield from jobs.run(
        jobs.LongJob(
            unit=f"kimi-job-checkpoint-{name}",
            argv=[layout.RIGCTL, "checkpoints", "stage", name, "--spec", specification_path(name)],
            proof=f"{layout.RIGCTL} checkpoints verify {name} >/dev/null",
            limit_seconds=LIMIT_SECONDS,
            properties=["EnvironmentFile=-/etc/environment", *token],
        )
    )


def _state(lines: list[str]) -> dict[str, Any]:
    for line in lines:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


def _what_happens(entry: Checkpoint, state: dict[str, Any], there: bool) -> str:
    if state.get("state") == "running":
        return "the staging that is at work is followed"
    if state.get("state") == "damaged":
        return "damaged, is proved and repaired"
    if isinstance(entry.source, GeneratorSource):
        return f"is generated ({entry.source.generator})"
    if there:
        return "is proved and recorded as it lies there"
    return f"is staged from {entry.source.repository}" if isinstance(entry.source, HubSource) else "is recorded"


def _absent(name: str, entry: Checkpoint, path: str) -> str:
    if isinstance(entry.source, HubSource):
        return (
            f"checkpoint {name} is not at {path} and {entry.source.repository} has no pinned revision: "
            f"put one into checkpoints.yaml, or put the files there, and deploy again"
        )
    return f"checkpoint {name} is not at {path}: put it there and deploy again"
