"""A small part of systemd for a machine that has none: transient jobs, and services with a control group of their own.

standin_systemd.py install FOLDER puts systemctl, systemd-run, systemd-sysusers, systemd-analyze and journalctl there.
Only for a machine that is thrown away. What units ask of the sandbox (namespaces, devices ...) is not applied.

A service is followed by a process of ours that does what systemd.service(5) says for Type=notify, KillMode=mixed,
ExecStopPost=, Restart=on-failure, Conflicts= and OnFailure=, in systemd's order: when the main process has ended, the
post command runs beside what is left, and then what is left is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STATE = Path(os.environ.get("STANDIN_STATE", "/run/standin-systemd"))
UNITS = Path("/etc/systemd/system")
_UNIFIED = Path("/sys/fs/cgroup")
CGROUPS = _UNIFIED if (_UNIFIED / "cgroup.procs").exists() else STATE / "cgroups"
PROGRAMS = ("systemctl", "systemd-run", "systemd-sysusers", "systemd-analyze", "journalctl")
DIRECTORIES = {
    "RuntimeDirectory": "/run",
    "StateDirectory": "/var/lib",
    "CacheDirectory": "/var/cache",
    "LogsDirectory": "/var/log",
}
START_SECONDS = 180.0
# Seconds to leave what a killed main process has left behind alone, to see whether it ends by itself.
LINGER = STATE / "linger"


def install(folder: Path) -> int:
    """Put the programs into a folder of the PATH."""
    for name in PROGRAMS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        path.chmod(0o755)
    STATE.mkdir(parents=True, exist_ok=True)
    if not (CGROUPS / "cgroup.procs").exists():
        CGROUPS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "cgroup2", "none", str(CGROUPS)], check=True)
    return 0


def full_name(unit: str) -> str:
    return unit if unit.endswith((".service", ".target", ".timer")) else f"{unit}.service"


def read(unit: str) -> dict[str, str]:
    """What is known of a unit."""
    try:
        found: dict[str, str] = json.loads((STATE / f"{unit}.json").read_text())
    except (OSError, ValueError):
        found = {}
    there = (UNITS / unit).exists() or found
    base = {"Id": unit, "ActiveState": "inactive", "SubState": "dead", "Result": "success", "StatusText": ""}
    return {**base, "LoadState": "loaded" if there else "not-found", "NeedDaemonReload": "no", **found}


def write(unit: str, **what: str) -> None:
    """Change what is known of a unit."""
    path = STATE / f"{unit}.json"
    found = {key: value for key, value in read(unit).items() if key not in ("LoadState", "NeedDaemonReload")}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({**found, **what}))
    temporary.rename(path)


def is_active(unit: str) -> bool:
    state = read(unit)
    return state["ActiveState"] in ("active", "activating", "deactivating") and _runs(state.get("Follower", ""))


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def unit_text(unit: str) -> list[tuple[str, str]]:
    """Keys and values of a unit file, in order; an instance is read from its template."""
    path = UNITS / unit
    name, at, instance = unit.partition("@")
    instance = instance.removesuffix(".service")
    if at and not path.exists():
        path = UNITS / f"{name}@.service"
    pairs = []
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            value = value.replace("%%", "\0").replace("%i", instance).replace("%I", instance).replace("\0", "%")
            pairs.append((key.strip(), value.strip()))
    return pairs


def words(value: str) -> list[str]:
    return [word.replace("$$", "$") for word in shlex.split(value)]


def detached(arguments: Sequence[str], log: Path) -> int:
    """Start a process of a session of its own."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, close_fds=True
        )
    return process.pid


# Transient jobs


def systemd_run(arguments: list[str]) -> int:
    """`systemd-run --unit=... --property=... --setenv=... -- COMMAND`: a job, or with --wait a command as its user."""
    unit, environment, files = f"run-{uuid.uuid4().hex[:8]}", {}, []
    user, waits = None, "--wait" in arguments[: arguments.index("--")]
    command = list(arguments)
    while command and command[0].startswith("-"):
        option = command.pop(0)
        if option == "--":
            break
        key, _, value = option.partition("=")
        if key == "--unit":
            unit = value
        elif key == "--setenv":
            name, _, content = value.partition("=")
            environment[name] = content
        elif key == "--property" and value.startswith("User="):
            user = value.partition("=")[2]
        elif key == "--property" and value.startswith("EnvironmentFile="):
            files.append(value.partition("=")[2].removeprefix("-"))
    unit = full_name(unit)
    log = STATE / f"{unit}.log"
    log.write_bytes(b"")
    for file in files:
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                name, equals, content = line.partition("=")
                if equals:
                    environment.setdefault(name, re.sub(r"\\(.)", r"\1", content.strip('"')))
    if waits:
        plain = [word.replace("$$", "$") for word in command]
        done = subprocess.run(plain, env=environment, user=user, group=user, extra_groups=[], cwd="/tmp", check=False)
        return done.returncode
    job = json.dumps({"unit": unit, "environment": environment, "command": command})
    write(unit, ActiveState="active", SubState="running", Result="success", InvocationID=uuid.uuid4().hex)
    detached([sys.executable, __file__, "job", job], log)
    return 0


def job(text: str) -> int:
    """A transient job, from its start to its end."""
    what: dict[str, Any] = json.loads(text)
    write(what["unit"], Follower=str(os.getpid()))
    base = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    done = subprocess.run(what["command"], env={**base, **what["environment"]}, check=False)
    failed = done.returncode != 0
    write(what["unit"], ActiveState="failed" if failed else "inactive", Result="exit-code" if failed else "success")
    return 0


# Services


class Service:
    """One unit from its start to its end, with restarts."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.text = unit_text(unit)
        self.stopping = False
        self.group = CGROUPS / unit
        self.user = pwd.getpwnam(self.one("User", "root"))

    def one(self, key: str, default: str = "") -> str:
        found = [value for name, value in self.text if name == key]
        return found[-1] if found else default

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.text if name == key]

    def environment(self) -> dict[str, str]:
        result = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": self.user.pw_dir,
            "USER": self.user.pw_name,
            "LOGNAME": self.user.pw_name,
            "INVOCATION_ID": uuid.uuid4().hex,
        }
        for key, parent in DIRECTORIES.items():
            if name := self.one(key):
                path = Path(parent, name)
                path.mkdir(parents=True, exist_ok=True)
                os.chown(path, self.user.pw_uid, self.user.pw_gid)
                result[re.sub(r"(?<!^)(?=[A-Z])", "_", key).upper()] = str(path)
        for line in self.all("Environment"):
            for assignment in words(line):
                name, _, value = assignment.partition("=")
                result[name] = value
        return result

    def spawn(self, command: str, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        def enter() -> None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
            os.umask(int(self.one("UMask", "0022"), 8))
            os.initgroups(self.user.pw_name, self.user.pw_gid)
            os.setgid(self.user.pw_gid)
            os.setuid(self.user.pw_uid)

        with log.open("ab") as out:
            return subprocess.Popen(
                words(command.lstrip("-+!@")),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=enter,  # noqa: PLW1509  # one thread only
                start_new_session=True,
            )

    def members(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.group / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def kill_group(self) -> None:
        """SIGKILL for whatever is left in the control group, until it is empty."""
        while left := self.members():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def run(self) -> int:
        """Until it is stopped or has failed for good."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        for wanted in self.all("AssertPathExists"):
            if Path(wanted.lstrip("!")).exists() == wanted.startswith("!"):
                write(self.unit, ActiveState="inactive", Result="assert")
                return 1
        never = {int(word) for word in self.one("RestartPreventExitStatus").split() if word.isdigit()}
        while True:
            result, status = self.once()
            again = self.one("Restart") == "on-failure" and result != "success" and status not in never
            if self.stopping or not again:
                break
            write(self.unit, ActiveState="activating", SubState="auto-restart", Result=result)
            time.sleep(float(self.one("RestartSec", "1")))
        if self.one("RuntimeDirectory"):
            shutil.rmtree(f"/run/{self.one('RuntimeDirectory')}", ignore_errors=True)
        write(self.unit, ActiveState="inactive" if result == "success" else "failed", SubState="dead", Result=result)
        if result != "success":
            for other in self.all("OnFailure"):
                detached([sys.executable, __file__, "systemctl", "start", other], STATE / f"{other}.log")
        return 0

    def once(self) -> tuple[str, int]:
        """One run; Result= as systemd calls it, and the exit status."""
        self.group.mkdir(exist_ok=True)
        log = STATE / f"{self.unit}.log"
        address = STATE / f"{self.unit}.sock"
        address.unlink(missing_ok=True)
        environment = self.environment()
        write(self.unit, InvocationID=environment["INVOCATION_ID"], ActiveState="activating", SubState="start")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.bind(str(address))
            address.chmod(0o666)
            channel.settimeout(0.1)
            notify = self.one("Type") == "notify"
            more = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "120000000"} if notify else {}
            main = self.spawn(self.one("ExecStart"), environment | more, log)
            write(self.unit, MainPID=str(main.pid))
            result = self.follow(main, channel)
        status = main.wait()
        if status == -signal.SIGKILL and LINGER.exists():
            time.sleep(float(LINGER.read_text()))
            write(self.unit, Lingering=" ".join(map(str, self.members())))
        told = {"SERVICE_RESULT": result, "EXIT_CODE": "killed" if status < 0 else "exited"}
        told["EXIT_STATUS"] = signal.Signals(-status).name.removeprefix("SIG") if status < 0 else str(status)
        for command in self.all("ExecStopPost"):
            self.spawn(command, environment | told, log).wait()
        self.kill_group()
        with contextlib.suppress(OSError):
            self.group.rmdir()
        return result, status

    def follow(self, main: subprocess.Popen[bytes], channel: socket.socket) -> str:
        """Until the main process has ended; asks it to, when we are asked to stop."""
        deadline, ready, asked = time.monotonic() + START_SECONDS, False, 0.0
        stop_seconds = float(self.one("TimeoutStopSec", "90").removesuffix("s"))
        while main.poll() is None:
            for key, value in self.heard(channel):
                if key == "READY":
                    ready = True
                    write(self.unit, ActiveState="active", SubState="running")
                elif key == "STATUS":
                    write(self.unit, StatusText=value)
                elif key == "EXTEND_TIMEOUT_USEC":
                    deadline = max(deadline, time.monotonic() + int(value) / 1e6)
            now = time.monotonic()
            if self.stopping and not asked:
                asked = now
                write(self.unit, ActiveState="deactivating", SubState="stop-sigterm")
                main.terminate()
            if asked and now > asked + stop_seconds:
                main.kill()
                return "timeout"
            if self.one("Type") == "notify" and not ready and not asked and now > deadline:
                main.kill()
                return "timeout"
        if main.returncode == 0 or (asked and main.returncode == -signal.SIGTERM):
            return "success"
        return "signal" if main.returncode < 0 else "exit-code"

    @staticmethod
    def heard(channel: socket.socket) -> Iterator[tuple[str, str]]:
        try:
            message = channel.recv(65536).decode(errors="replace")
        except TimeoutError:
            return
        for line in message.splitlines():
            key, _, value = line.partition("=")
            yield key, value


# systemctl


def start(unit: str, *, wait: bool = True) -> int:
    """Stop what conflicts, start, and wait until it is active."""
    if is_active(unit):
        return 0
    if not any((UNITS / name).exists() for name in (unit, f"{unit.partition('@')[0]}@.service")):
        print(f"Failed to start {unit}: Unit {unit} not found.", file=sys.stderr)
        return 5
    for line in (value for key, value in unit_text(unit) if key == "Conflicts"):
        for other in line.split():
            stop(other)
    write(unit, ActiveState="activating", SubState="start", Result="success", StatusText="", Lingering="")
    log = STATE / f"{unit}.log"
    write(unit, Follower=str(detached([sys.executable, __file__, "follow", unit], log)))
    while wait and read(unit)["ActiveState"] == "activating" and _runs(read(unit)["Follower"]):
        time.sleep(0.1)
    state = read(unit)
    oneshot = dict(unit_text(unit)).get("Type") == "oneshot" and state["Result"] == "success"
    if not wait or state["ActiveState"] == "active" or oneshot:
        return 0
    print(f"Job for {unit} failed: {state['Result']}. See journalctl -u {unit}.", file=sys.stderr)
    return 1


def stop(unit: str) -> int:
    """Ask it to stop and wait for its end."""
    if is_active(unit):
        os.kill(int(read(unit)["Follower"]), signal.SIGTERM)
        while is_active(unit):
            time.sleep(0.05)
    return 0


def systemctl(arguments: list[str]) -> int:
    """The verbs that the deploy and rigctl use."""
    flags = [word for word in arguments if word.startswith("-")]
    wanted: list[str] = []
    plain: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "-P":
            wanted = [next(rest)]
            flags.append("--value")
        elif word.startswith("--property="):
            wanted = word.partition("=")[2].split(",")
        elif not word.startswith("-"):
            plain.append(word)
    if "--version" in flags:
        print("systemd 0 (stand-in)")
        return 0
    verb, names = plain[0], [full_name(name) for name in plain[1:]]
    if verb in ("start", "restart", "stop"):
        codes = [stop(name) for name in names if verb != "start"]
        codes += [start(name, wait="--no-block" not in flags) for name in names if verb != "stop"]
        return max(codes, default=0)
    if verb == "is-active":
        states = [read(name)["ActiveState"] for name in names]
        if not {"-q", "--quiet"} & {*flags}:
            print("\n".join(states))
        return 0 if "active" in states else 3
    if verb == "show":
        for number, name in enumerate(names):
            state = read(name)
            print("\n" * bool(number), end="")
            for key in wanted:
                print(state.get(key, "") if "--value" in flags else f"{key}={state.get(key, '')}")
    return 0


def journalctl(arguments: list[str]) -> int:
    """The last lines of a unit, named or by its invocation."""
    count, unit = 15, None
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before == "-n" or word.startswith("--lines="):
            count = int(word.partition("=")[2] or word)
        if before == "-u" or word.startswith("_SYSTEMD_UNIT="):
            unit = full_name(word.partition("=")[2] or word)
        if word.startswith("_SYSTEMD_INVOCATION_ID="):
            wanted = word.partition("=")[2]
            for path in STATE.glob("*.json"):
                if wanted and read(path.stem).get("InvocationID") == wanted:
                    unit = path.stem
    with contextlib.suppress(OSError, TypeError):
        print("\n".join((STATE / f"{unit}.log").read_text(errors="replace").splitlines()[-count:]))
    return 0


def sysusers(arguments: list[str]) -> int:
    """`u NAME - "TEXT" / /usr/sbin/nologin` lines."""
    for line in Path(arguments[-1]).read_text().splitlines():
        kind, name, *_ = line.split()
        if kind == "u":
            with contextlib.suppress(KeyError):
                pwd.getpwnam(name)
                continue
            subprocess.run(["useradd", "--system", "--home-dir", "/", "--shell", "/usr/sbin/nologin", name], check=True)
    return 0


def main() -> int:
    """Do what the program of this name would."""
    name, *arguments = sys.argv[1:]
    STATE.mkdir(parents=True, exist_ok=True)
    programs: dict[str, Callable[[list[str]], int]] = {
        "install": lambda words: install(Path(words[0])),
        "job": lambda words: job(words[0]),
        "follow": lambda words: Service(words[0]).run(),
        "systemd-run": systemd_run,
        "systemctl": systemctl,
        "journalctl": journalctl,
        "systemd-sysusers": sysusers,
        "systemd-analyze": lambda _: 0,  # units are verified where there is a systemd
    }
    return programs[name](arguments)


if __name__ == "__main__":
    sys.exit(main())
