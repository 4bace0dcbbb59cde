"""Host stage: driver packages, settings the running system has yet to take over, units at boot, the reboot."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pyinfra import host
from pyinfra.api import operation

from rig import layout
from rig.driver import Action, DriverStep
from rig.facts.state import Lines, UnitProperties
from rig.hostfiles import HostFile
from rig.operations.common import Commands, note, refuse, remember, script
from rig.preflight import Finding, Severity

APT = "DEBIAN_FRONTEND=noninteractive apt-get -qy -o DPkg::Lock::Timeout=300"


@operation()
def checked(findings: Sequence[Finding]) -> Commands:
    """Say everything the preflight found; errors end the deploy, all of them in one message."""
    for finding in findings:
        note(str(finding))
    errors = [str(finding) for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        yield from refuse("\n".join(errors))
        return
    host.noop(f"{len(findings)} findings, none of them an error" if findings else "nothing found")


@operation()
def driver(step: DriverStep, packages: Sequence[str], keyring: Sequence[str]) -> Commands:
    """The driver's packages from NVIDIA's repository, held at their version.

    keyring: URL and sha256 of the package that brings repository and key.
    """
    if step.action is Action.REFUSE:
        yield from refuse(step.reason)
        return
    if step.action is Action.KEEP:
        host.noop(step.reason)
        return
    if len(keyring) != 2 or not packages:
        yield from refuse(f"{step.reason}, and host data driver_keyring and driver_packages name none for this system")
        return
    note(f"{step.reason}: install {', '.join(packages)}")
    url, digest = keyring
    names = " ".join(packages)
    yield script(
        *(remember("package", name) for name in packages),
        "dpkg --configure -a >/dev/null",
        't=$(mktemp); trap "rm -f $t" EXIT',
        f'curl -fsSL --retry 3 --max-time 300 -o "$t" {shlex.quote(url)}',
        f'echo {shlex.quote(digest)} "$t" | sha256sum -c --quiet',
        f'dpkg -i "$t" >/dev/null; {remember("package", "cuda-keyring")}',
        f"{APT} update >/dev/null",
        f"apt-mark unhold {names} >/dev/null 2>&1 || true",
        f'{APT} install --no-install-recommends "linux-headers-$(uname -r)" {names} >/dev/null',
        f"apt-mark hold {names} >/dev/null",
        # A card that nouveau holds is given up at the next boot only.
        "modprobe nvidia && modprobe nvidia_uvm || "
        f"{{ mkdir -p /run/kimi-rig; echo 'the new driver could not be loaded' >> {layout.REBOOT_PENDING}; }}",
    )


@operation()
def taken_over(files: Sequence[HostFile]) -> Commands:
    """The system runs on what the files say, or has it staged for its next boot: judged by its state."""
    tests = "; ".join(f"if {one.stale}; then echo {shlex.quote(one.path)}; fi" for one in files if one.stale)
    found: list[str] = host.get_fact(Lines, script=tests) if tests else []
    stale = set(found)
    due = [one for one in files if one.path in stale]
    if not due:
        host.noop("the system has taken over all files")
        return
    for one in due:
        note(f"{one.path} is not taken over: {one.refresh}")
    yield script(*(f"{{ {one.refresh}; }} >/dev/null" for one in due))


@operation()
def retired(files: Sequence[str]) -> Commands:
    """Remove files of an earlier decision, undo what units did not, and let the boot files be made anew."""
    there = host.get_fact(Lines, script="ls -d " + " ".join(map(shlex.quote, files))) if files else []
    if not there:
        host.noop("nothing of an earlier decision is left")
        return
    for path in there:
        note(f"{path} is no longer wanted")
    units = [path.rsplit("/", 1)[1] for path in there if path.endswith(".service")]
    yield script(
        *(f"systemctl disable -q --now {unit}" for unit in units),
        f"rm -f -- {' '.join(map(shlex.quote, there))}",
        *(["systemctl daemon-reload"] if units else []),
        *(["update-grub >/dev/null 2>&1"] if any("/grub.d/" in path for path in there) else []),
        *(["update-initramfs -u -k all >/dev/null"] if any("/modprobe.d/" in path for path in there) else []),
    )


@operation()
def enabled_now(units: Sequence[str]) -> Commands:
    """Units of the host stage run and start at boot. One that its package has yet to bring is passed over."""
    known = host.get_fact(UnitProperties, units=list(units)) if units else {}
    wrong = []
    for unit in units:
        state = known.get(unit, {})
        absent = state.get("LoadState") == "not-found" and unit.startswith("nvidia-")
        runs = state.get("ActiveState") == "active" and state.get("NeedDaemonReload") != "yes"
        if not absent and not (runs and state.get("UnitFileState") in ("enabled", "static")):
            wrong.append(unit)
    if not wrong:
        host.noop(f"{len(units)} units run and start at boot")
        return
    for unit in wrong:
        note(f"{unit} does not run, or does not start at boot")
    yield script("systemctl daemon-reload", *(f"systemctl enable -q {u}; systemctl restart {u}" for u in wrong))


@operation()
def asks_for_reboot(why: Sequence[str]) -> Commands:
    """The mark that keeps serving units from starting: a file in /run, one reason a line, gone after a boot."""
    there = host.get_fact(Lines, script=f"cat {layout.REBOOT_PENDING}")
    if list(there) == list(why):
        host.noop("a reboot is asked for" if why else "no reboot is asked for")
        return
    for reason in why:
        note(f"a reboot is needed: {reason}")
    if not why:
        note("no reboot is needed any longer")
        yield script(f"rm -f {layout.REBOOT_PENDING}")
        return
    lines = " ".join(map(shlex.quote, why))
    folder = layout.REBOOT_PENDING.rsplit("/", 1)[0]
    yield script(f"mkdir -p {folder}", f"printf '%s\\n' {lines} > {layout.REBOOT_PENDING}")


@operation()
def may_reboot(names: Sequence[str]) -> Commands:
    """Refuses while a serving unit runs: the operator stops it, not a deploy. names: configurations."""
    units = [layout.unit_name(name) for name in names]
    known = host.get_fact(UnitProperties, units=units) if units else {}
    running = [
        unit for unit, state in known.items() if state.get("ActiveState") in ("active", "activating", "reloading")
    ]
    if running:
        yield from refuse(f"{', '.join(running)} runs: `systemctl stop` it, then deploy again to reboot")
        return
    host.noop("no serving unit runs")


@operation()
def proved(arguments: Sequence[str]) -> Commands:
    """The kernel runs with these arguments; else something between the files and the boot went wrong."""
    lines: list[str] = host.get_fact(Lines, script="cat /proc/cmdline")
    live = " ".join(lines).split()
    missing = [one for one in arguments if one not in live]
    if missing:
        yield from refuse(f"after the reboot the kernel runs without {' '.join(missing)}: see the boot loader's entry")
        return
    host.noop(f"{len(arguments)} kernel arguments are live")
