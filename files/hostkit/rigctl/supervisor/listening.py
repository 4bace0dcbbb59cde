"""Who answers at the engine's address? A listening socket must belong to a process of the unit.

Engines share a port without a word (SO_REUSEPORT), so a stranger's answers could be taken for ours.
"""

import ipaddress
import os
from collections.abc import Callable, Iterable

import psutil


def strangers(host: str, port: int, members: Callable[[], Iterable[int]]) -> list[str]:
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
