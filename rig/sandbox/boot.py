"""Starting, finding, asking and ending a box's processes.

A process is the box's when its root directory is the box's root, or when it is a systemd-nspawn started with
`--directory=` that root; signals go through a pidfd opened before that check, so that a PID used again
cannot be hit.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rig.sandbox.box import ADDRESS, Box, SandboxError, State

KEEPER = Path(__file__).with_name("keeper.sh")
CGROUPS = Path("/sys/fs/cgroup")
BOOT_SECONDS = 90
STOP_SECONDS = 30
CAP_BPF = 39  # linux/capability.h
NETWORKS = "KIMI_RIG_SANDBOX_NETWORKS"
"""Environment variable, any value: the box may administrate networks. Its systemd brings up the loopback of a unit with
a network of its own (PrivateNetwork=) only then; the box shares this computer's network, so it is not the default."""


@dataclass(frozen=True)
class Process:
    pid: int
    started: int  # clock ticks since boot


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat; 0 when there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def arguments(pid: int) -> list[str]:
    """Argv of a process, empty when it is gone or a kernel thread."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return []


def _is_nspawn(box: Box, pid: int) -> bool:
    argv = arguments(pid)
    return Path(argv[0] if argv else "").name == "systemd-nspawn" and f"--directory={box.root}" in argv


def _is_leader(box: Box, pid: int) -> bool:
    """Whether this is the box's own PID 1."""
    with suppress(OSError):
        if os.path.samestat(Path(f"/proc/{pid}/root").stat(), box.root.stat()):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            return any(line.split()[-1] == "1" for line in status.splitlines() if line.startswith("NSpid:"))
    return False


def _is_keeper(box: Box, pid: int) -> bool:
    return str(KEEPER) in arguments(pid) and f"--directory={box.root}" in arguments(pid)


def _processes(box: Box, test: Callable[[Box, int], bool]) -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and test(box, int(entry.name)) and (started := start_time(int(entry.name))):
            yield Process(int(entry.name), started)


def nspawn(box: Box) -> Process | None:
    return next(_processes(box, _is_nspawn), None)


def leader(box: Box) -> Process | None:
    return next(_processes(box, _is_leader), None)


def keeper(box: Box) -> Process | None:
    """The recorded process that keeps the box if it still is that one, else the box's systemd-nspawn.

    They differ after a reboot of the box under systemd, and when keeper.sh was killed.
    """
    state = box.state()
    ours = _is_keeper(box, state.pid) or _is_nspawn(box, state.pid)
    if state.pid and ours and start_time(state.pid) == state.started:
        return Process(state.pid, state.started)
    return nspawn(box)


def is_running(box: Box) -> bool:
    return keeper(box) is not None and leader(box) is not None


def signal_ours(box: Box, process: Process, test: Callable[[Box, int], bool], number: int) -> None:
    """Send a signal to a process that is still the one meant and passes `test`; else nothing."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if start_time(process.pid) == process.started and test(box, process.pid):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def stop(box: Box) -> bool:
    """Power the box off, killing its PID 1 when that takes over 30 s. False when nothing of it ran."""
    outer, inner = nspawn(box), leader(box)
    if outer is None and inner is None:
        return False
    if outer is not None:
        signal_ours(box, outer, _is_nspawn, signal.SIGTERM)  # nspawn asks the box to power off
    elif inner is not None:
        signal_ours(box, inner, _is_leader, signal.SIGRTMIN + 4)  # systemd(1): power off
    if not _gone(box, STOP_SECONDS):
        if inner := leader(box):
            signal_ours(box, inner, _is_leader, signal.SIGKILL)
        if not _gone(box, 5) and (outer := nspawn(box)):
            signal_ours(box, outer, _is_nspawn, signal.SIGKILL)
        if not _gone(box, 5):
            raise SandboxError(f"box {box.name} could not be ended; its processes have {box.root} in their arguments")
    for group in own_cgroups(box):
        for directory, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                Path(directory).rmdir()
    return True


def _gone(box: Box, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while nspawn(box) or leader(box) or keeper(box):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def has_systemd() -> bool:
    """Whether systemd is PID 1 of this computer (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir() and Path("/proc/1/comm").read_text().strip() == "systemd"


def own_cgroups(box: Box) -> list[Path]:
    """The box's control groups where systemd is not there to make one: one a hierarchy."""
    if (CGROUPS / "cgroup.procs").exists():
        return [CGROUPS / box.unit]
    return [CGROUPS / part / box.unit for part in ("systemd", "unified") if (CGROUPS / part).is_dir()]


def nspawn_arguments(box: Box, binds: tuple[str, ...], bpf: bool) -> list[str]:
    """Argv of systemd-nspawn. CAP_BPF lets the box's systemd enforce IPAddressDeny and DevicePolicy."""
    escaped = (path.replace("\\", "\\\\").replace(":", "\\:") for path in binds)
    return [
        "systemd-nspawn",
        "--quiet",
        f"--directory={box.root}",
        "--boot",
        f"--machine={box.unit}",
        f"--hostname={box.name}",
        "--register=no",
        "--keep-unit",
        "--link-journal=no",
        "--resolv-conf=replace-host",
        *(["--capability=CAP_BPF", "--system-call-filter=bpf"] if bpf else []),
        *(["--capability=CAP_NET_ADMIN"] if os.environ.get(NETWORKS) else []),
        *(f"--bind-ro={path}" for path in escaped),
    ]


def can_grant_bpf(status: str) -> bool:
    """Whether our own bounding set (text of /proc/self/status) has CAP_BPF."""
    bounding = next((line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:")), "0")
    return bool(int(bounding, 16) >> CAP_BPF & 1)


def start(box: Box, binds: tuple[str, ...]) -> Process:
    """Start the box's keeper, apart from this shell. Returns at once; see `wait_ready`."""
    command = nspawn_arguments(box, binds, can_grant_bpf(Path("/proc/self/status").read_text()))
    # cgroup v2 inside, where the computer has it at all: BPF limits need it.
    unified = (CGROUPS / "unified").is_dir() or (CGROUPS / "cgroup.controllers").exists()
    extra = {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"} if unified else {}
    box.console.unlink(missing_ok=True)
    pid = _start_unit(box, command, extra) if has_systemd() else _start_daemon(box, command, extra)
    return Process(pid, start_time(pid))


def _start_daemon(box: Box, command: list[str], extra: dict[str, str]) -> int:
    groups = ":".join(map(str, own_cgroups(box)))
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"} | extra
    with box.console.open("w") as console:
        return subprocess.Popen(
            ["sh", str(KEEPER), groups, *command],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            cwd="/",
            env=environment,
            start_new_session=True,
        ).pid


def _start_unit(box: Box, command: list[str], extra: dict[str, str]) -> int:
    unit = f"{box.unit}.service"
    nspawn_path = shutil.which(command[0]) or command[0]
    properties = {
        "Type": "notify",
        "NotifyAccess": "all",
        "KillMode": "mixed",
        "Delegate": "yes",
        "TasksMax": "infinity",
        "RestartForceExitStatus": "133",
        "SuccessExitStatus": "133",
        "StandardOutput": f"file:{box.console}",
        "StandardError": f"file:{box.console}",
    }
    options = [f"--property={key}={value}" for key, value in properties.items()]
    options += [f"--setenv={key}={value}" for key, value in extra.items()]
    run = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", *options, "--", nspawn_path, *command[1:]]
    done = subprocess.run(run, capture_output=True, errors="replace", check=False)
    if done.returncode != 0:
        trouble = (done.stderr.strip() or "no message").splitlines()[-1]
        raise SandboxError(f"systemd-run could not start {unit}: {trouble} (console: {box.console})")
    show = ["systemctl", "show", "--property=MainPID", "--value", unit]
    return int(subprocess.run(show, capture_output=True, errors="replace", check=True).stdout.strip() or 0)


def answers(state: State, timeout: float = 0.5) -> bool:
    """Whether an SSH server greets on the box's port."""
    try:
        with socket.create_connection((ADDRESS, state.port), timeout) as connection:
            connection.settimeout(timeout)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def wait_ready(box: Box, seconds: float = BOOT_SECONDS) -> str:
    """Wait until the box has booted; the word of `systemctl is-system-running`, by SSH."""
    end = time.monotonic() + seconds
    trouble = "no answer"
    while time.monotonic() < end:
        # --wait is systemd's own; with --wait, "starting" is never the answer
        done = in_box(box, "systemctl is-system-running --wait", timeout=max(1.0, end - time.monotonic()))
        if (word := done.stdout.strip()) in ("running", "degraded"):
            return word
        trouble = word or done.stderr.strip() or trouble
        if keeper(box) is None:
            raise SandboxError(f"box {box.name} ended while booting: {console_tail(box)}")
        time.sleep(0.2)
    raise SandboxError(
        f"box {box.name} did not come up in {seconds:.0f} s ({trouble}): {console_tail(box)}; "
        "look there, then `make sandbox-rm` and `make sandbox`"
    )


def in_box(box: Box, command: str, text: str | None = None, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a shell command in the box by SSH and catch its output; exit status 255 when the link fails."""
    argv = box.ssh_command(command)
    try:
        return subprocess.run(
            argv,
            input="" if text is None else text,
            capture_output=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 255, "", f"no answer in {timeout:.0f} s")


def failed_units(box: Box) -> list[str]:
    """Names of the box's failed units."""
    lines = in_box(box, "systemctl --failed --plain --no-legend").stdout.splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def console_tail(box: Box) -> str:
    """The last line on the box's console and where the rest is."""
    text = box.console.read_text(encoding="utf-8", errors="replace") if box.console.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'nothing on its console'} ({box.console})"


def port_owner(port: int) -> str | None:
    """Who holds the port, as "pid 12 (sshd -D)"; "somebody" when not visible, None when it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
            return None
        except PermissionError:
            return None  # a port below 1024: the box's root may, we may not
        except OSError:
            pass
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            listens = (one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
            if any(one.laddr.port == port for one in listens):
                return f"pid {process.pid} ({' '.join(process.cmdline())[:80]})"
    return "somebody"
