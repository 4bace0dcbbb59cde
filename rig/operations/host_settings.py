"""Host stage: driver packages, settings the running system has yet to take over, units at boot, the reboot."""

import contextlib
import shlex
import time
from collections.abc import Generator, Sequence

from pyinfra import host, logger
from pyinfra.api import Host, State, operation
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.exceptions import OperationError

from rig.facts.host import RUNS, HostFacts
from rig.facts.report import HostReport
from rig.facts.servers import Servers
from rig.facts.state import Lines, UnitProperties
from rig.host.disk import FileSystem
from rig.host.live_settings import reboot_pending
from rig.host.nvidia_driver import Action, DriverStep
from rig.host.preflight import Finding, Severity
from rig.host.settings import Setting
from rig.host.system_files import HostFile
from rig.operations import apt, locks
from rig.operations.common import Commands, changes, disks, found, note, refuse, remember_packages, script
from rig.operations.files import Directory, File
from rig.plan.neighbours import who
from rigctl.contract import layout

INITRAMFS = "if command -v update-initramfs >/dev/null; then update-initramfs -u -k all >/dev/null; fi"
# PID 1's start differs between two boots also in a container, which shares its host's boot id.
BOOT_IDENTITY = "cat /proc/sys/kernel/random/boot_id && cut -d' ' -f22 /proc/1/stat"
HEADERS = '"linux-headers-$(uname -r)"'
DRIVER_PARTS = "sed -n 's/^Inst \\([^ ]*\\).*/\\1/p' | grep -E 'nvidia|^cuda-drivers' || true"
LOADED = "/sys/module/nvidia/version"
INSTALLED = " is installed"
NOT_BUILT = (
    "the driver's packages are installed, and there is no nvidia module for this kernel: see `dkms status` and "
    "/var/lib/dkms/nvidia/*/build/make.log; deploy again once it is built"
)


def entries(files: Sequence[HostFile]) -> list[Directory | File]:
    """The files as entries, with the one directory of ours among them."""
    folder = Directory(f"{layout.INSTALL}/libexec", "0755", "root", "root")
    written = [File(one.path, one.text.encode(), one.mode) for one in files]
    return [folder, *written] if any(one.path.startswith(folder.path) for one in files) else [*written]


@operation()
def checked(findings: Sequence[Finding], account: Sequence[FileSystem] = ()) -> Commands:
    """Report everything the preflight found; errors end the deploy, all of them in one message."""
    disks([one.document() for one in account])
    errors = [str(one) for one in findings if one.severity is Severity.ERROR]
    for one in findings:
        if one.severity is not Severity.ERROR:
            found(str(one))
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
    names = " ".join(map(shlex.quote, packages))
    yield from apt.work(
        *apt.repository_added(keyring),
        # What an earlier deploy held, and nothing that the operator holds.
        "free",
        f'for p in $(apt-mark showhold); do ! grep -qxF "package $p" {layout.CREATED} || apt-mark unhold $p; done '
        ">/dev/null",
        f"free; apt-mark unhold {names} >/dev/null 2>&1 || true",
        # Not those that the operator has: they are upgraded, and stay at an uninstall.
        remember_packages(packages, HEADERS),
        f"d=$(apt-get -s install --no-install-recommends {names} {HEADERS} | {DRIVER_PARTS})",
        f"{apt.INSTALL} {HEADERS} {names} >/dev/null 8>&-",
        # All parts: an upgrade of one library alone is a driver/library mismatch.
        f"free; apt-mark hold {names} $d >/dev/null",
        "disk=$(modinfo -F version nvidia 2>/dev/null || true)",
        f'[ -n "$disk" ] || {{ echo {shlex.quote(NOT_BUILT)} >&2; exit 1; }}',
        # A card that nouveau holds is given up at the next boot only; an older driver stays until then.
        f"[ -e {LOADED} ] || {{ modprobe nvidia && modprobe nvidia_uvm; }} 2>/dev/null || true",
        f"loaded=$(cat {LOADED} 2>/dev/null || true)",
        # In the words of rig/host/nvidia_driver.py, which the next plan finds.
        'why="${loaded:+driver }${loaded:-no driver} is loaded, $disk is installed"',
        f'[ "$loaded" = "$disk" ] || {{ {locks.place_made()}; echo "$why" > {layout.REBOOT_PENDING}; }}',
    )


@operation()
def taken_over(files: Sequence[HostFile]) -> Commands:
    """The system runs on what the files say, or has it staged for its next boot: by its state, no record."""
    tests = "; ".join(f"if {one.stale}; then echo {shlex.quote(one.path)}; fi" for one in files if one.stale)
    stale = host.get_fact(Lines, script=tests) if tests else []
    due = [one for one in files if one.path in stale]
    details = (f"{one.path} is not taken over: {one.refresh}" for one in due)
    if not changes(details, "the system has taken over all files"):
        return
    yield script(*(f"{{ {one.refresh}; }} >/dev/null" for one in due))


@operation()
def retired(files: Sequence[str]) -> Commands:
    """Remove files of an earlier decision, undo what units did not, and let the boot files be made anew."""
    there = host.get_fact(Lines, script="ls -d " + " ".join(map(shlex.quote, files))) if files else []
    if not changes((f"{path} is no longer wanted" for path in there), "nothing of an earlier decision is left"):
        return
    units = [path.rsplit("/", 1)[1] for path in there if path.endswith(".service")]
    yield script(
        *(f"systemctl disable -q --now {unit}" for unit in units),
        f"rm -f -- {' '.join(map(shlex.quote, there))}",
        *(["systemctl daemon-reload"] if units else []),
        *(["update-grub >/dev/null 2>&1"] if any("/grub.d/" in path for path in there) else []),
        *([INITRAMFS] if any("/modprobe.d/" in path for path in there) else []),
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
    details = (f"{unit} does not run, or does not start at boot" for unit in wrong)
    if not changes(details, f"{len(units)} units run and start at boot"):
        return
    yield script("systemctl daemon-reload", *(f"systemctl enable -q {u}; systemctl restart {u}" for u in wrong))


@operation()
def asks_for_reboot(why: Sequence[str], installing: bool = False) -> Commands:
    """The mark that keeps serving units from starting: a file in /run, one reason a line, gone after a boot.

    installing: this deploy installs a driver, and only afterwards knows whether it could be loaded.
    """
    there = host.get_fact(Lines, script=f"cat {layout.REBOOT_PENDING}")
    if installing:
        why = [*(line for line in there if line.endswith(INSTALLED) and line not in why), *why]
    if list(there) == list(why):
        host.noop("a reboot is asked for" if why else "no reboot is asked for")
        return
    for reason in why:
        note(f"a reboot is needed: {reason}")
    if not why:
        note("no reboot is needed any longer")
        yield script(f"rm -f {layout.REBOOT_PENDING}")
        return
    yield _mark(why)


def _mark(why: Sequence[str]) -> StringCommand:
    lines = " ".join(map(shlex.quote, why))
    return script(f"printf '%s\\n' {lines} > {layout.REBOOT_PENDING}")


@operation()
def may_reboot(names: Sequence[str], ports: Sequence[int] = ()) -> Commands:
    """Refuses while a serving unit or a server that is not ours runs: the operator stops it, not a deploy.

    names: configurations. ports: theirs; whoever listens there, or holds a GPU, serves.
    """
    units = [layout.unit_name(name) for name in names]
    known = host.get_fact(UnitProperties, units=units) if units else {}
    running = [unit for unit, state in known.items() if state.get("ActiveState") in RUNS]
    if running:
        yield from refuse(f"{', '.join(running)} runs: `systemctl stop` it, then deploy again to reboot")
        return
    servers = host.get_fact(Servers, ports=list(ports))
    strangers = [who(server) for server in servers if server.pid and not server.ours]
    if strangers:
        yield from refuse(f"{'; '.join(strangers)} serves here and is not ours: end it, then deploy again to reboot")
        return
    host.noop("no serving unit runs")


@operation()
def rebooted(limit_seconds: int) -> Generator[StringCommand | FunctionCommand, None, None]:
    """Reboot now, and go on when the host answers from another boot.

    pyinfra's own server.reboot compares uptimes, which a container shares with its host, and ends in a traceback when a
    connection is made to a system that is on its way down.
    """
    lines = host.get_fact(Lines, script=BOOT_IDENTITY)
    note("the host reboots")
    # Detached: the connection must be free before the host goes down.
    yield StringCommand("systemd-run --quiet --on-active=2 --timer-property=AccuracySec=100ms systemctl reboot")
    yield FunctionCommand(_wait_for_boot, (" ".join(lines), limit_seconds), {})


def _wait_for_boot(state: State, host: Host, before: str, limit_seconds: int) -> None:
    # pyinfra hands state and host to a callback whose parameters have these names.
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        time.sleep(2)
        host.disconnect()
        with contextlib.suppress(Exception):  # refused, reset, half a system: it is not there yet
            host.connect(show_errors=False, raise_exceptions=True)
            done, output = host.run_shell_command(BOOT_IDENTITY, _timeout=20)
            after = " ".join(output.stdout_lines)
            if done and after and after != before:
                logger.info(f"{host.print_prefix}answers from its new boot")
                return
    raise OperationError(f"{host.name} did not come back within {limit_seconds} s: look at its console")


@operation()
def proved(settings: Sequence[Setting]) -> Commands:
    """Kernel and driver run with what was staged; else the mark stays and the deploy ends."""
    facts: HostFacts = host.get_fact(HostReport)
    missing = [one.key for one in reboot_pending(settings, facts)]
    if missing:
        if not host.state.is_executing:  # the reboot is yet to come
            note("the new boot is proved")
            yield _mark(missing)
            return
        yield _mark(missing)
        yield from refuse(f"after the reboot the host runs without {', '.join(missing)}: see the boot loader's entry")
        return
    host.noop("kernel and driver run with all settings")
