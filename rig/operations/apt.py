"""All package work on a host: it waits for whoever holds dpkg's locks, finishes what was interrupted, keeps the login.

Package scripts and needrestart restart ssh. Five restarts within ten seconds are systemd's limit, and then sshd stays
down: so its counters are reset before the work, and whatever of it ran before runs afterwards.
"""

import shlex
import time
from collections.abc import Sequence

from pyinfra import host, logger

from rig.facts.state import Lines
from rig.operations.common import Commands, operation_name, remember, script
from rigctl.contract import layout

WAIT_SECONDS = 1800
"""An unattended upgrade of a kernel with its modules takes many minutes."""
REPORT_SECONDS = 15
LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")
LOGIN = ("ssh.service", "sshd.service", "ssh.socket")

# `free` waits; it stands before every command that takes a lock and gives up at once where it is held.
APT = "free; DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l apt-get -qy -o DPkg::Lock::Timeout=300"
INSTALL = f"{APT} -o APT::Keep-Downloaded-Packages=false install --no-install-recommends"


def holder(locks: Sequence[str] = LOCKS) -> str:
    """Shell: say which process holds one of the locks; nothing where none does."""
    opened = " -o ".join(f"-lname {shlex.quote(lock)}" for lock in locks)
    return (
        "for p in $(sed -n 's/^[0-9]*: POSIX *ADVISORY *WRITE *\\([0-9]*\\) .*/\\1/p' /proc/locks | sort -u); do "
        f"find /proc/$p/fd \\( {opened} \\) 2>/dev/null | grep -q . && "
        '{ echo "process $p ($(cat /proc/$p/comm))"; break; }; done'
    )


def waiting(limit_seconds: int = WAIT_SECONDS, locks: Sequence[str] = LOCKS) -> str:
    """Shell: the function `free`, which returns once nobody holds a lock, and ends the script after the limit."""
    late = (
        f"holds the lock of apt or dpkg for more than {limit_seconds} s: wait for its end, or end it, and deploy again"
    )
    return (
        f'free() {{ n=0; while h=$({holder(locks)}) ; [ -n "$h" ]; do n=$((n+1)); '
        f'[ $n -le {limit_seconds} ] || {{ echo "$h {late}" >&2; exit 1; }}; sleep 1; done; }}'
    )


def work(*lines: str) -> Commands:
    """Commands of an operation that change packages. Lines may use APT and INSTALL."""
    units = " ".join(LOGIN)
    yield script(
        f"for u in {units}; do ! systemctl is-active -q $u || echo $u; done > {layout.LOGIN_RAN}",
        f"for u in $(cat {layout.LOGIN_RAN}); do systemctl reset-failed $u; done",
    )
    _report_holder()
    back = "systemctl is-active -q $u || { systemctl reset-failed $u; systemctl start $u; }"
    yield script(
        waiting(),
        f"login() {{ for u in $(cat {layout.LOGIN_RAN}); do {back}; done; }}",
        "trap login EXIT",
        # A dpkg that was killed half-way is finished first.
        "free; dpkg --configure -a >/dev/null 8>&-",
        *lines,
    )


def _report_holder() -> None:
    """Wait while somebody holds a lock, and say who does; the script that follows has the limit."""
    begun, reported = time.monotonic(), -REPORT_SECONDS
    while (held := host.get_fact(Lines, script=holder())) and (waited := time.monotonic() - begun) < WAIT_SECONDS:
        if waited - reported >= REPORT_SECONDS:
            reported = int(waited)
            logger.info(
                f"{host.print_prefix}{operation_name()}: {waited:.0f} s: waits for {held[0]}, which changes packages"
            )
        time.sleep(1)


def repository_added(keyring: Sequence[str]) -> list[str]:
    """Script lines that add NVIDIA's package repository. keyring: URL and sha256 of the package that brings it."""
    url, digest = keyring
    package = layout.KEYRING_PACKAGE
    return [
        f"curl -fsSL --retry 3 --max-time 300 -o {package} {shlex.quote(url)}",
        f"echo {shlex.quote(digest)} {package} | sha256sum -c --quiet",
        f"dpkg -s cuda-keyring >/dev/null 2>&1 || {{ {remember('package', 'cuda-keyring')}; }}",
        f"free; dpkg -i {package} >/dev/null",
        f"rm -f {package}",
        f"{APT} update >/dev/null",
    ]
