"""States a host can return to: recorded by a deploy, put back by a rollback, and what no state needs is removed."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from pyinfra import host
from pyinfra.api import operation

from rig.artifacts.receipt import merged
from rig.artifacts.rollback_states import of_state, present_after, state_file, taken_back, way_to
from rig.facts.state import JsonFile, Lines
from rig.operations.common import Commands, changes, note, notice, now, operator, reached, refuse, script
from rig.operations.engine_environments import STAMP, switch
from rig.operations.files import File, write
from rig.operations.receipt import product_version
from rigctl.contract import layout

LISTED = f"cd {layout.STATES} && ls -1t ????????????.json"
"""Shell that prints the files of a host's states, newest first."""


@operation()
def wanted(record: Mapping[str, Any], roll_forward: bool) -> Commands:
    """The state to deploy is not the one that this host was rolled back from, unless it is asked for."""
    present = host.get_fact(JsonFile, path=layout.PRESENT_STATE)
    if not taken_back(present, record["id"]):
        host.noop("no rollback stands against it")
        return
    if not roll_forward:
        yield from refuse(
            f"this host was rolled back from this very state ({record['id']}) on {present['at']} by {present['by']}: "
            'change the catalogue, or set roll_forward = "yes" in the host\'s data to have it again'
        )
        return
    host.noop("a rollback is taken back")


@operation()
def recorded(record: Mapping[str, Any]) -> Commands:
    """The host has a record of the state that is about to be put in place.

    It comes before the units, so that a deploy that is killed among them can be taken back too.
    """
    path, present = state_file(record["id"]), host.get_fact(JsonFile, path=layout.PRESENT_STATE)
    found = host.get_fact(Lines, script=f"{LISTED}; [ -s {path} ] && echo there")
    if (
        "there" in found
        and isinstance(present, dict)
        and (present.get("id"), present.get("rolled_back_from")) == (record["id"], [])
    ):
        host.noop(f"state {record['id']} is recorded")
        return
    note(f"state {record['id']} is recorded")
    yield write(_json_file(path, record), existed=True)  # below our state directory, which goes as a whole
    way = way_to(present, states_of(found), record["id"])
    entry = present_after(record["id"], [], way, at=now(), by=operator())
    yield write(_json_file(layout.PRESENT_STATE, entry), existed=True)


@operation()
def restorable(record: Mapping[str, Any]) -> Commands:
    """Every environment of the state is complete on the host."""
    tests = [f"[ -e {shlex.quote(f'{path}/{STAMP}')} ] || echo {shlex.quote(path)}" for path in environments(record)]
    gone = host.get_fact(Lines, script="; ".join(tests)) if tests else []
    if gone:
        yield from refuse(f"state {record['id']} cannot come back: {', '.join(gone)} is not there any more")
        return
    host.noop(f"all {len(tests)} environments of state {record['id']} are there")


@operation()
def linked(record: Mapping[str, Any]) -> Commands:
    """`<ml_env>/<release>/current` points to each environment of the state."""
    wanted_links = {str(PurePosixPath(path).parent / "current"): path for path in environments(record)}
    reading = "; ".join(f"readlink {shlex.quote(link)} || echo" for link in wanted_links)
    found = host.get_fact(Lines, script=reading) if wanted_links else []
    if sorted(found) == sorted(wanted_links.values()):
        host.noop(f"{len(found)} links are as they should be")
        return
    lines = []
    for link, path in wanted_links.items():
        if path not in found:
            note(f"{link} points to {path}")
            lines += switch(path)
    yield script(*lines)


@operation()
def returned(record: Mapping[str, Any], left: Sequence[str], way: Sequence[str]) -> Commands:
    """Receipt and record say that this state is in place, and which were left for it. The last step.

    way: the states that were in force before it.
    """
    reached()
    present, receipt = (host.get_fact(JsonFile, path=path) for path in (layout.PRESENT_STATE, layout.RECEIPT))
    old = receipt["items"] if isinstance(receipt, dict) and isinstance(receipt.get("items"), dict) else {}
    kept = {key: {k: v for k, v in item.items() if k != "since"} for key, item in old.items() if not of_state(key)}
    new = merged(receipt, {**kept, **record["items"]}, now=now(), by=operator(), version=product_version())
    if new is None and (present["id"], present.get("rolled_back_from")) == (record["id"], list(left)):
        host.noop(f"state {record['id']} is in place")
        return
    note(f"state {record['id']} is in place of {present['id']}")
    if new is not None:
        yield write(File(layout.RECEIPT, json.dumps(new, indent=2).encode() + b"\n"), existed=True)
    entry = present_after(record["id"], left, way, at=now(), by=operator())
    yield write(_json_file(layout.PRESENT_STATE, entry), existed=True)


@operation()
def pruned(ml_env: str, current: Sequence[str]) -> Commands:
    """Environments that no state needs are gone; never one that a process or a unit uses.

    current: paths of the environments in the plan.
    """
    command = [layout.RIGCTL, "prune", "--base", ml_env, "--states", layout.STATES, "--created", layout.CREATED]
    command += [f"--current={path}" for path in current]
    found = host.get_fact(Lines, script=shlex.join([*command, "--list"]))
    unneeded = [line.partition(" ")[2] for line in found if line.startswith("unneeded ")]
    for line in found:
        if line.startswith("used "):
            notice(f"{line.partition(' ')[2]} stays: a process or a unit still uses it")
    details = (f"{path} is no longer needed" for path in unneeded)
    if not changes(details, "no environment is left that no state needs"):
        return
    yield script(shlex.join(command))


def states_of(listed: list[str]) -> list[str]:
    """The states among the lines that `LISTED` prints, newest first."""
    return [name.removesuffix(".json") for name in listed if name.endswith(".json")]


def environments(record: Mapping[str, Any]) -> list[str]:
    """Paths of a state's environments."""
    return sorted(record["environments"].values())


def _json_file(path: str, content: Mapping[str, Any]) -> File:
    return File(path, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")
