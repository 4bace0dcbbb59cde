"""A training on the host: run as a long job there, then published."""

import shlex
from collections.abc import Callable, Sequence

from pyinfra import host, logger
from pyinfra.api import operation

from rig.facts.state import Lines, PathStates
from rig.operations import jobs
from rig.operations.common import Commands, changes, note, refuse, remember, script
from rigctl.contract import layout


@operation()
def owned(paths: Sequence[str]) -> Commands:
    """Directories that trainings fill are on the host's list, whole, before they are made: an uninstall takes them."""
    there = host.get_fact(PathStates, paths=list(paths))
    if not changes([f"{path} is made" for path in paths if path not in there], f"{len(paths)} directories are there"):
        return
    yield script(*(f"[ -e {shlex.quote(path)} ] || {{ {remember('tree', path)}; }}" for path in paths))


@operation()
def retired(keep: Sequence[str]) -> Commands:
    """Orders and prompts of trainings that the host's data does not name are gone; what they made stays."""
    found = host.get_fact(Lines, script=f"cd {layout.TRAINING} && ls")
    names = {each for name in keep for each in (f"{name}.json", f"{name}.prompts")}
    gone = [f"{layout.TRAINING}/{name}" for name in found if name not in names]
    if not changes([f"{path}: its training is not in the host's data" for path in gone], "no other training is there"):
        return
    yield script(shlex.join(["rm", "-rf", *gone]))


@operation()
def trained(training: str) -> Commands:
    """Every step of a training is done. Its job survives a lost connection, and one that was cut goes on."""
    name = shlex.quote(training)
    train = f"{layout.RIGCTL} train"
    done = f'{train} status {name} --json | grep -q \'"state": "done"\''
    if host.get_fact(Lines, script=f"{done} && echo done") == ["done"]:
        host.noop(f"every step of {training} is done")
        return
    told = host.get_fact(Lines, script=f"{train} plan {name}")
    refused = [line.removeprefix("REFUSED: ") for line in told if line.startswith("REFUSED: ")]
    if refused:
        yield from refuse("; ".join(refused))
        return
    for line in told:
        note(line)
        logger.info(f"{host.print_prefix}{line}")
    yield script(f"{train} start {name}")
    yield from jobs.followed(layout.training_unit(training).removesuffix(".service"), done)


@operation()
def published(training: str, path: str, keep: Callable[[str], None]) -> Commands:
    """The drafter lies where engines read it, and its receipt has been handed to `keep`."""
    note(f"{path} becomes the drafter of {training}, where it is better than its start")
    yield script(f"{layout.RIGCTL} train publish {shlex.quote(training)}")
    lines = host.get_fact(Lines, script=f"{layout.RIGCTL} train receipt {shlex.quote(training)}")
    keep("\n".join(lines))
