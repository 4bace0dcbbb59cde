"""The edge on a host: HAProxy without its own service, the keys, the certificate, and the unit that has read them."""

import shlex
from collections.abc import Iterable, Sequence

from pyinfra import host
from pyinfra.api import operation

from rig.artifacts.edge import ACME, CERTIFICATE, CONFIGURATION, ENGINE, KEYS, RENEWAL, RENEWAL_TIMER, places
from rig.facts.servers import Server, Servers
from rig.facts.state import Lines, PathStates, UnitProperties
from rig.operations.common import Commands, changes, notice, refuse, remember, script
from rig.operations.files import File, difference
from rig.plan.edge import meet
from rigctl.contract import layout

CHANGED = """
import os, subprocess, sys, time
shown = ["systemctl", "show", "-P", "StateChangeTimestampMonotonic", sys.argv[1]]
monotonic = int(subprocess.run(shown, capture_output=True, text=True).stdout or 0) / 1e6
read_at = monotonic + time.time() - time.monotonic()
for path in sys.argv[2:]:
    if os.path.exists(path) and os.stat(path).st_ctime > read_at:
        print(path)
"""
"""Python that prints which of some files have changed since a unit was started or has reloaded."""


@operation()
def engine_key() -> Commands:
    """Engines behind the edge have a key of the host's own: random, made here, root's alone."""
    found = host.get_fact(Lines, script=f"[ -s {layout.ENGINE_KEY} ] && stat -c '%a %U %G' {layout.ENGINE_KEY}")
    if not changes([] if found == ["600 root root"] else ["a key for the engines is made"], "the engines have a key"):
        return
    make = "import secrets; print(secrets.token_urlsafe(32))"
    yield script(
        f"t=$(mktemp {layout.CREDENTIALS}/.engine-key.kimi-rig.XXXXXX)",
        f'python3 -c {shlex.quote(make)} > "$t"',
        f'sync "$t"; mv -fT "$t" {layout.ENGINE_KEY}',
    )


@operation()
def engine_key_known() -> Commands:
    """The edge has the engines' key. It never leaves the host."""
    line = f"printf 'engine %s\\n' \"$(cat {layout.ENGINE_KEY})\""
    found = host.get_fact(Lines, script=f"{line} | cmp -s - {ENGINE} && stat -c '%a %U %G' {ENGINE}")
    right = found == [f"640 root {layout.EDGE_USER}"]
    if not changes([] if right else ["the edge gets the engines' key"], "the edge has the engines' key"):
        return
    yield script(
        f"t=$(mktemp {layout.EDGE}/.engine.map.kimi-rig.XXXXXX)",
        f'{line} > "$t"; chown root:{layout.EDGE_USER} "$t"; chmod 0640 "$t"',
        f'sync "$t"; mv -fT "$t" {ENGINE}',
    )


@operation()
def certified(command: Sequence[str], path: str) -> Commands:
    """The edge has a certificate, and a timer that renews it.

    command: what says on the host why a new one is needed, in a line; nothing when none is.
    """
    why = host.get_fact(Lines, script=f"{shlex.join(command)}; [ -e {path} ] || echo there is no certificate")
    timer = host.get_fact(UnitProperties, units=[RENEWAL_TIMER]).get(RENEWAL_TIMER, {})
    details = why[:1]
    if (timer.get("UnitFileState"), timer.get("ActiveState")) != ("enabled", "active"):
        details.append(f"{RENEWAL_TIMER} is started, also at boot")
    if not changes(details, "the certificate is good and renewed in time"):
        return
    keeps = [] if path.startswith(f"{layout.EDGE}/") else [remember("tree", ACME)]
    failed = f"{{ journalctl -q -n 5 --no-pager -o cat -u {RENEWAL} >&2; exit 1; }}"
    yield script(
        *keeps,
        *([f"systemctl start {RENEWAL} || {failed}"] if why else []),
        f"systemctl enable -q --now {RENEWAL_TIMER}",
    )


@operation()
def running(files: Sequence[File], takeovers: Iterable[str] = ()) -> Commands:
    """The edge serves what is on disk: started, at every boot too, and reloaded without a dropped stream.

    Where an engine still holds its address, it starts with that engine's next start.
    files: what it reads, which a deploy has written by then. takeovers: lines for the operator, reported until it runs.
    """
    unit = layout.EDGE_UNIT
    state = host.get_fact(UnitProperties, units=[unit]).get(unit, {})
    active = state.get("ActiveState") in ("active", "reloading")
    details = [] if state.get("UnitFileState") == "enabled" else [f"{unit} is started at boot"]
    lines = [f"systemctl enable -q {unit}"] if details else []
    if not active:
        for line in takeovers:
            notice(line)
        holders = _holders(files)
        if foreign := [one for one in holders if not one.ours]:
            yield from refuse(
                f"{unit} cannot listen on {foreign[0].address}: process {foreign[0].pid} of {foreign[0].user} "
                f"({foreign[0].command!a}) does; end it, or give the edge another port, and deploy again"
            )
            return
        if holders:
            units = " ".join(sorted({one.unit for one in holders}))
            notice(f"{unit} waits for {units}, started before this deploy: `systemctl restart {units}` lets it start")
        else:
            details.append(f"{unit} is started")
            why = f"{{ journalctl -q -n 5 --no-pager -o cat -u {unit} >&2; exit 1; }}"
            lines.append(f"systemctl start {unit} 8>&- || {why}")
    elif changed := _changed(files):
        details.append(f"{unit} reads {', '.join(changed)} again")
        lines.append(f"systemctl reload {unit}")
    if not changes(details, f"{unit} {'is up to date' if active else 'waits for its address'}"):
        return
    yield script(*lines)


def _holders(files: Sequence[File]) -> list[Server]:
    """Who listens at an address of the edge."""
    mine = [place for file in files if file.path == CONFIGURATION for place in places(file.content.decode())]
    listening = host.get_fact(Servers, ports=sorted({port for _, port in mine}))
    others = [one for one in listening if one.address and one.unit != layout.EDGE_UNIT]
    return [one for one in others if any(meet(place, (one.host, one.port)) for place in mine)]


def _changed(files: Sequence[File]) -> list[str]:
    """Names of files that the edge reads and that are, or will be, newer than what it has read."""
    states = host.get_fact(PathStates, paths=[file.path for file in files])
    unwritten = [file.path for file in files if difference(file, states.get(file.path))]
    paths = [*(file.path for file in files), KEYS, ENGINE, CERTIFICATE]
    newer = host.get_fact(Lines, script=shlex.join(["python3", "-c", CHANGED, layout.EDGE_UNIT, *paths]))
    return sorted({path.rpartition("/")[2] for path in (*unwritten, *newer)})
