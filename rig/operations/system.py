"""Packages, the service user, systemd's view of unit files, and servers that are not ours."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from pyinfra import host, logger
from pyinfra.api import operation

from rig.facts.servers import Servers
from rig.facts.state import InstalledPackages, Lines, PathStates, Services, UnitProperties
from rig.operations import apt
from rig.operations.common import Commands, changes, note, notice, pending, refuse, remember, remember_packages, script
from rig.operations.files import File, difference
from rig.plan.host_plan import HostPlan
from rig.plan.neighbours import interruptions
from rigctl.contract import layout
from rigctl.contract.confinement import confined


@operation()
def packages(names: Sequence[str], masked: str | None = None) -> Commands:
    """Install missing Debian packages. The index is refreshed only then, so a later deploy reports no change.

    masked: one of them whose own service stays off, unless the package was there before.
    """
    installed = host.get_fact(InstalledPackages, packages=list(names))
    missing = sorted(set(names).difference(installed))
    details = [f"packages to install: {', '.join(missing)}"] if missing else []
    if not changes(details, f"{len(names)} packages are installed"):
        return
    service = f"{layout.UNITS}/{masked}.service"
    mask = f"{remember('link', service)}; ln -s /dev/null {service}; systemctl daemon-reload"
    yield from apt.work(
        *(
            [f"[ -e {service} ] || [ -L {service} ] || {{ {mask}; }}"]
            if masked and masked.removesuffix(".service") in missing
            else []
        ),
        f"{apt.APT} update >/dev/null",
        remember_packages(missing),
        f"{apt.INSTALL} {shlex.join(missing)} >/dev/null 8>&-",
    )


@operation()
def system_users(users: Sequence[str], declaration: str) -> Commands:
    """System users as declared in a sysusers.d file that is already on the host."""
    names = " ".join(map(shlex.quote, users))
    there = {line.partition(":")[0] for line in host.get_fact(Lines, script=f"getent passwd {names}")}
    missing = [user for user in users if user not in there]
    if not changes([f"user {user} is missing" for user in missing], f"{', '.join(users)} exist"):
        return
    groups = [
        f"getent group {user} >/dev/null || {{ {remember('group', user)}; }}" for user in map(shlex.quote, missing)
    ]
    yield script(*(remember("user", user) for user in missing), *groups, f"systemd-sysusers {shlex.quote(declaration)}")


@operation()
def units_loaded(units: Sequence[str], files: Sequence[File]) -> Commands:
    """systemd knows the unit files as they are on disk. files: the units' own, which a deploy has written by then."""
    known = host.get_fact(UnitProperties, units=list(units)) if units else {}
    # A plan comes before the writing, when systemd does not see yet that it must read anew.
    states = host.get_fact(PathStates, paths=[file.path for file in files]) if files else {}
    unwritten = {PurePosixPath(file.path).name for file in files if difference(file, states.get(file.path))}
    stale = [
        unit
        for unit in units
        if unit in unwritten
        or (state := known.get(unit, {})).get("NeedDaemonReload") == "yes"
        or state.get("LoadState") != "loaded"
    ]
    details = [f"systemd reads its unit files again for {', '.join(stale)}"] if stale else []
    if not changes(details, f"systemd knows all {len(units)} units"):
        return
    yield script("systemctl daemon-reload", f"systemd-analyze verify {' '.join(layout.UNITS + '/' + u for u in stale)}")


@operation()
def enabled_at_boot(wanted: Sequence[str], units: Sequence[str]) -> Commands:
    """Of all serving units these are started at boot. Starts and stops nothing."""
    known = host.get_fact(UnitProperties, units=list(units)) if units else {}
    enabled = {unit for unit, state in known.items() if state.get("UnitFileState") == "enabled"}
    surplus = sorted(enabled - {*wanted})
    missing = [unit for unit in wanted if unit not in enabled]
    for unit in wanted:
        if unit in enabled and known[unit].get("ActiveState") in ("inactive", "failed"):
            notice(f"{unit} starts at boot and is stopped: a deploy starts nothing, `systemctl start {unit}` does")
    details = [f"{unit} is no longer started at boot" for unit in surplus]
    details += [f"{unit} is started at boot" for unit in missing]
    if not changes(details, f"started at boot: {', '.join(wanted) or 'no serving unit'}"):
        return
    yield script(
        *(f"systemctl disable -q {unit}" for unit in surplus),
        *(f"systemctl enable -q {unit}" for unit in missing),
    )


EDGE_UNITS = "kimi-edge"
"""How the names of units of the edge begin; no configuration's does (rig/catalog/entries.py)."""


@operation()
def retired_units(keep: Sequence[str]) -> Commands:
    """Remove serving units we wrote whose configuration is gone. One that is running is left alone and named."""
    mine = f"grep -lF {shlex.quote(layout.UNIT_MARK)} {layout.UNITS}/kimi-*.service {layout.UNITS}/kimi-*.timer"
    found = host.get_fact(
        Lines, script=f'for f in $({mine}); do u=${{f##*/}}; echo "$u $(systemctl is-active $u)"; done'
    )
    strays = dict(line.split(" ", 1) for line in found if line.split(" ", 1)[0] not in keep)
    # Without its edge a host's engines serve on, on loopback or, once restarted, where the edge listened.
    edge = sorted(unit for unit in strays if unit.startswith(EDGE_UNITS))
    running = sorted(unit for unit in strays.keys() - {*edge} if strays[unit] not in ("inactive", "failed"))
    if running:
        yield from refuse(
            f"{', '.join(running)} still runs but is no longer in the catalogue: `systemctl stop` it and deploy again"
        )
        return
    details = (f"{unit}: its configuration is gone" for unit in sorted(strays))
    if not changes(details, "no unit of a removed configuration"):
        return
    names = [unit.removeprefix("kimi-").removesuffix(".service") for unit in sorted(strays)]
    yield script(
        *([f"systemctl stop {' '.join(edge)}"] if edge else []),
        f"systemctl disable -q {' '.join(sorted(strays))} || true",
        f"rm -f {' '.join(f'{layout.UNITS}/{unit}' for unit in sorted(strays))}",
        *(f"rm -f {layout.CONFIGURATIONS}/{name}.json" for name in names),
        "systemctl daemon-reload",
    )


@operation()
def running_current(digests: Mapping[str, Collection[str]], restart: str) -> Commands:
    """A running service runs what is on disk, or is reported as stale.

    digests: configuration -> every digest of its run specification. The running service wrote down those that it was
    started with, which `rigctl status` shows, so a restart that an earlier deploy owed is never lost, whatever failed
    since. restart "never" leaves a stale service running (`rigctl status` and verification show it); "now"
    restarts it without waiting for the load; "when-idle" leaves a unit behind that does so once no request runs.
    """
    services = host.get_fact(Services)
    if services is None:
        unknown = f"what runs is not known: `{layout.RIGCTL} status` does not answer on this host"
        if host.state.is_executing:
            yield from refuse(f"{unknown}; it says why when it is run there")
        else:
            notice(f"{unknown} yet")  # the deploy brings another rigctl first
        return
    # A checkpoint that was replaced where it lies changes no digest of the plan.
    stale = sorted(
        one.name
        for one in services
        if one.name in digests and (one.stale or (one.started_as and not one.started_as & {*digests[one.name]}))
    )
    if restart == "when-idle":
        waiting = host.get_fact(
            Lines, script="systemctl list-units --plain --no-legend 'kimi-restart-*' | cut -d' ' -f1"
        )
        stale = [name for name in stale if f"kimi-restart-{name}.service" not in waiting]
    if not stale or restart == "never":
        for name in stale:
            unit = layout.unit_name(name)
            notice(f"{unit} still runs as it was before: `systemctl restart {unit}` takes the deploy over")
        host.noop(f"stale, left running: {', '.join(stale)}" if stale else "no running service is stale")
        return
    for name in stale:
        when = "once it is idle" if restart == "when-idle" else "now"
        note(f"{layout.unit_name(name)} is restarted {when}: what it was started with has changed")
    if restart == "when-idle":
        yield script(*(shlex.join(restarted_when_idle(name)) for name in stale))
        return
    yield script(f"systemctl restart --no-block {' '.join(layout.unit_name(name) for name in stale)}")


def restarted_when_idle(name: str) -> list[str]:
    """The command that leaves a unit behind which restarts a configuration once no request runs."""
    options = confined(f"kimi-restart-{name}", [], "loopback", watches=True)
    return ["systemd-run", "--collect", *options, "--", layout.RIGCTL, "restart", name, "--when-idle"]


@operation()
def reboot_pending() -> Commands:
    """Report a reboot that a stage asked for on this boot; the file names why. A reboot clears it: it is in /run."""
    why = host.get_fact(Lines, script=f"cat {layout.REBOOT_PENDING}")
    if why:
        pending("; ".join(why))
        logger.warning(f"{host.print_prefix}reboot pending: {'; '.join(why)}")
    host.noop("a reboot is pending" if why else "no reboot is pending")
    return
    yield


@operation()
def neighbours_told(plan: HostPlan) -> Commands:
    """Servers on our ports or GPUs that are not ours are named, with what taking their place means. Changes nothing."""
    ports = {entry.listen.port for entry in plan.serving.values()}
    ports |= {one.port for one in plan.edge.listeners} if plan.edge else set()
    servers = host.get_fact(Servers, ports=sorted(ports))
    lines = interruptions(plan, servers)
    for line in lines:
        notice(line)
    host.noop(f"{len(lines)} things to know" if lines else "nobody else serves here")
    return
    yield
