"""Who answers at the engine's address? A listening socket must belong to a process of the unit.

Engines share a port without a word (SO_REUSEPORT), so a stranger's answers could be taken for ours.
"""

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from rigctl.errors import RigctlError

Members = Callable[[], Iterable[int]]
Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
STRANGE_SECONDS = 0.2  # a socket has its number a moment before the process that accepted it has its descriptor


class StrangerAnswers(RigctlError):
    """A process outside the unit has accepted a connection that a secret was to be sent over."""


def accepted_by(connection: socket.socket, members: Members, seconds: float) -> int:
    """The process of the unit that has accepted this TCP connection of ours, by the kernel's table of sockets.

    Who listens is not enough: several may listen on one port, and who listens now need not be who accepted. Raises
    StrangerAnswers for another process, and TimeoutError where nobody has accepted it in `seconds`.
    """
    ours, theirs = _place(*connection.getsockname()[:2]), _place(*connection.getpeername()[:2])
    end, strange = time.monotonic() + seconds, 0.0
    while True:
        inode = _inode(theirs, ours)
        if inode and (holder := _holder(inode, members())):
            return holder
        now = time.monotonic()
        strange = (strange or now) if inode else 0.0
        if strange and now - strange > STRANGE_SECONDS:
            raise StrangerAnswers(
                f"{theirs[0]}:{theirs[1]} is answered by a process outside this unit, which gets no API key; "
                "`rigctl free` names who holds the port"
            )
        if now > end and not inode:
            raise TimeoutError(f"{theirs[0]}:{theirs[1]}: nobody has accepted the connection within {seconds:g} s")
        time.sleep(0.01)


def _inode(local: Place, remote: Place) -> int:
    """The socket of a connection, seen from its other end; 0 until it is accepted (proc_pid_net(5), tcp)."""
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, one, other, *fields = line.split()
                if (_from_table(one), _from_table(other)) == (local, remote):
                    return int(fields[6])
    return 0


def _from_table(written: str) -> Place:
    """An address of the kernel's table: 32-bit words in the machine's byte order."""
    address, port = written.split(":")
    words = (int(address[start : start + 8], 16) for start in range(0, len(address), 8))
    return _place(b"".join(struct.pack("=I", word) for word in words), int(port, 16))


def _place(address: str | bytes, port: int) -> Place:
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found, port


def _holder(inode: int, pids: Iterable[int]) -> int:
    """The process that has this socket; 0 where none of them has, or their descriptors cannot be read."""
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) == f"socket:[{inode}]":
                        return pid
    return 0


def strangers(host: str, port: int, members: Members) -> list[str]:
    """The processes outside the unit that listen where the engine does; "process ?" for one that is not visible.

    members: the unit's processes, asked after the sockets, so that one that has just been started counts. Empty also
    outside a unit, and where a member's descriptors cannot be read: then nobody is accused.
    """
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    found = [one for one in listening if one.laddr and one.laddr.port == port and _meet(host, one.laddr.ip)]
    unit = set(members())
    # An engine that has just ended has no directory any more, and no socket.
    readable = all(os.access(f"/proc/{pid}/fd", os.R_OK) or not psutil.pid_exists(pid) for pid in unit)
    if not unit or not readable:
        return []
    return sorted({f"process {one.pid or '?'}" for one in found if one.pid not in unit})


def _meet(ours: str, theirs: str) -> bool:
    """Whether a connection to one address may reach a socket that listens at the other: of two, the closer wins."""
    one, other = (ipaddress.ip_address("127.0.0.1" if name == "localhost" else name) for name in (ours, theirs))
    other = getattr(other, "ipv4_mapped", None) or other
    if one.version != other.version:  # only a socket at every address takes the other kind too
        return (one if one.version == 6 else other).is_unspecified
    return one == other or one.is_unspecified or other.is_unspecified
