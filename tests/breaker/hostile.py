"""A program that tries what a hostile package would: it prints a line for each. Standard library only."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

WORK = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/tmp")


def _setuid() -> None:
    shell = WORK / "shell"
    shell.write_bytes(Path("/bin/sh").read_bytes())
    shell.chmod(0o4755)
    if not shell.stat().st_mode & stat.S_ISUID:
        raise OSError("the bit is gone")


def _run(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, capture_output=True, timeout=20)


TRIES: dict[str, Callable[[], object]] = {
    "write into an environment": lambda: Path("/opt/kimi-rig/env/planted").write_text("x"),
    "write into the kernel store": lambda: Path("/opt/kimi-rig/env/kernels/store/planted").write_text("x"),
    "change rigctl": lambda: Path("/opt/kimi-rig/hostkit/current/planted").write_text("x"),
    "plant a cron job": lambda: Path("/etc/cron.d/planted").write_text("* * * * * root id\n"),
    "plant a unit": lambda: Path("/run/systemd/system/planted.service").write_text("x"),
    "read a file of root": lambda: Path("/root/secret").read_text(),
    "read the shadow": lambda: Path("/etc/shadow").read_text(),
    "read the API key": lambda: Path("/etc/kimi-rig/credentials/api-key").read_text(),
    "list the credentials": lambda: list(Path("/etc/kimi-rig/credentials").iterdir()),
    "read root's environment": lambda: Path("/proc/1/environ").read_bytes(),
    "make a setuid program": _setuid,
    "make a device": lambda: os.mknod(WORK / "disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0)),
    "take a second name of a file of root": lambda: (WORK / "passwd").hardlink_to("/etc/passwd"),
    "become root": lambda: os.setuid(0),
    "enter a namespace of its own": _run("unshare", "--user", "true"),
    "mount": _run("mount", "-t", "tmpfs", "none", "/mnt"),
    "start a serving unit": _run("systemctl", "--no-ask-password", "start", "kimi-vllm-base"),
    "start a unit of its own": _run("systemd-run", "--no-ask-password", "true"),
    "reach a port of this host": lambda: socket.create_connection(("127.0.0.1", 22), 3),
    "reach the network": lambda: socket.create_connection(("192.0.2.1", 443), 3),
    "read the kernel's log": _run("dmesg"),
}


def main() -> None:
    for name, attempt in TRIES.items():
        try:
            attempt()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"refused: {name}: {error}", flush=True)
        else:
            print(f"done: {name}", flush=True)
    # These are allowed, and must lead nowhere.
    (WORK / "link").unlink(missing_ok=True)
    (WORK / "link").symlink_to("/etc/shadow")
    for place in ("/tmp/planted", "/var/tmp/planted", "/dev/shm/planted"):
        Path(place).write_text(str(os.geteuid()))
    subprocess.Popen(["sleep", "12345"], start_new_session=True)
    print(f"user {os.geteuid()}", flush=True)


if __name__ == "__main__":
    main()
