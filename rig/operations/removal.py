"""Uninstall: take away what the host's record says we brought, and nothing else. Each step can be repeated."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from pyinfra import host
from pyinfra.api import operation

from rig.facts.created import CreatedThings, PackagesRemovedWith
from rig.facts.report import carried
from rig.facts.state import Lines
from rig.host.system_files import OUR_ARGUMENTS
from rig.operations import apt
from rig.operations.common import Commands, changes, notice, reached, refuse, script
from rig.plan import removal
from rigctl import guarded
from rigctl import reached as paths
from rigctl.contract import layout

REMOVE_TREES = Path(__file__).with_name("remove_trees.py")

TRANSIENT = "'kimi-job-*' 'kimi-restart-*'"
"""Units that deploys start and no file lists: long jobs, and restarts that wait for an idle engine."""


@operation()
def units_removed() -> Commands:
    """Our services, timers and jobs are stopped, disabled and gone."""
    units = removal.units(host.get_fact(CreatedThings))
    instances = [name.replace("@.", "@*.") for name in units]
    active = host.get_fact(Lines, script=f"systemctl list-units --plain --no-legend {TRANSIENT} {_words(instances)}")
    jobs = sorted(name for line in active if (name := line.split()[0]).startswith(("kimi-job-", "kimi-restart-")))
    serving = {line.split()[0] for line in active if line.split()[2] in ("active", "activating", "deactivating")}
    details = [f"{name}{' is stopped and' if name in serving else ' is'} removed" for name in [*units, *jobs]]
    if not changes(details, "no unit of ours is there"):
        return
    lines = [f"systemctl stop {_words(instances + jobs)} 2>/dev/null || true"]
    if units:
        lines += [f"systemctl disable -q {_words(units)} 2>/dev/null || true"]
        lines += [f"rm -f {_words(f'{layout.UNITS}/{name}' for name in units)}"]
    lines += ["systemctl daemon-reload", f"systemctl reset-failed {_words(units + jobs)} 2>/dev/null || true"]
    lines += [f"! systemctl is-active -q {shlex.quote(name)}" for name in units + jobs]
    yield script(*lines)


@operation()
def paths_removed() -> Commands:
    """Files, links and directories of ours are gone; a directory that holds something foreign stays."""
    created = host.get_fact(CreatedThings)
    if created.unreadable:
        yield from refuse(
            f"{', '.join(created.unreadable)}: not readable, so it is not known whether this checkpoint was staged or "
            "found on the host. Move the checkpoint away if it is yours, remove that file, and uninstall again"
        )
        return
    trees = _existing(removal.trees(created))
    files = removal.files(created)
    directories, kept = removal.directories(created)
    for path, foreign in kept.items():
        notice(f"{path} stays: {', '.join(foreign[:3])}{' ...' if len(foreign) > 3 else ''} is not ours")
    for path in created.adopted:
        notice(f"{path} stays: its checkpoint was found there, not staged")
    arguments = bool(_existing([OUR_ARGUMENTS]))
    details = [f"{path} is removed with all in it" for path in trees]
    details += [f"{path} is removed" for path in [*files, *directories]]
    details += ["kernel arguments of ours are removed"] if arguments and not details else []
    if not changes(details, "nothing of ours is there"):
        return
    if arguments or removal.boot_refreshes(files):
        notice("kernel arguments and module options of ours stay in force until the next boot")
    # First: it reads the list of our arguments, which is among the files.
    lines = removal.kernel_command_line() if arguments else []
    if trees:
        program = carried(REMOVE_TREES, guarded, paths).encode()
        yield script(*lines, f"base64 -d | python3 - {_words(trees)}", content=program)
        lines = []
    for path in files:
        lines.append(
            f"rm -f -- {shlex.quote(path)} {shlex.quote(f'{path}.kimi-rig')} {shlex.quote(removal.temporaries(path))}*"
        )
    # Our state lies in none of them but is removed last, so that an interrupted uninstall can go on.
    lines += [f"rmdir -- {shlex.quote(path)}" for path in directories if path != layout.STATE]
    lines += removal.boot_refreshes(files)
    yield script(*lines)


@operation()
def packages_removed() -> Commands:
    """Packages that a deploy installed are gone, unless something else needs them by now."""
    created = host.get_fact(CreatedThings)
    ours = created.names("package", "package-keep-config")
    removed_with = host.get_fact(PackagesRemovedWith, packages=ours) if ours else {}
    gone, kept = removal.packages(ours, removed_with)
    for name, by in kept.items():
        notice(f"package {name} stays: {', '.join(by)} needs it")
    details = [f"packages are removed: {', '.join(gone)}"] if gone else []
    if not changes(details, "no package of ours is left that nothing else needs"):
        return
    keep_config = [name for name in gone if name in created.names("package-keep-config")]
    purge = [name for name in gone if name not in keep_config]
    remove = f"{apt.APT} -o APT::Get::AutomaticRemove=false --allow-change-held-packages"
    yield from apt.work(
        *(
            f"{remove} {verb} {_words(names)} >/dev/null"
            for verb, names in (("purge", purge), ("remove", keep_config))
            if names
        ),
    )


@operation()
def users_removed() -> Commands:
    """The service user is gone."""
    created = host.get_fact(CreatedThings)
    users, groups = created.names("user"), created.names("group")
    details = [f"user {name} is removed" for name in users] or [f"group {name} is removed" for name in groups]
    if not changes(details, "no user of ours is there"):
        return
    yield script(
        *(f"userdel {shlex.quote(name)}" for name in users),
        *(f"! getent group {shlex.quote(name)} >/dev/null || groupdel {shlex.quote(name)}" for name in groups),
    )


@operation()
def state_removed() -> Commands:
    """The record, the receipt and what we keep in /run are gone: the last step."""
    reached()
    left = _existing([layout.STATE, layout.RUNTIME])
    if not changes((f"{path} is removed with all in it" for path in left), "no state of ours is there"):
        return
    yield script(f"rm -rf --one-file-system -- {_words(left)}")


def _existing(paths: list[str]) -> list[str]:
    tests = "; ".join(f"[ ! -e {shlex.quote(path)} ] || echo {shlex.quote(path)}" for path in paths)
    return host.get_fact(Lines, script=tests) if paths else []


def _words(names: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, names))
