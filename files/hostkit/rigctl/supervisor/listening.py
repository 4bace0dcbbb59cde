"""Who answers at the engine's address? A listening socket must belong to a process of the unit.

Engines share a port without a word (SO_REUSEPORT), so a stranger's answers could be taken for ours.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"
SOCKET = re.compile(r"socket:\[(\d+)\]")


def strangers(host: str, port: int, pids: Iterable[int]) -> bool:
    """Whether a socket listens at the address that none of `pids` holds.

    False also where a process's descriptors cannot be read: then nobody is accused. Sources: proc_net_tcp.txt of the
    kernel's documentation, proc(5). By inodes, which psutil does not tell: several processes may share a socket.
    """
    listening = _listening(host, port)
    if not listening:
        return False
    held: set[str] = set()
    for pid in pids:
        found = _sockets(Path(f"/proc/{pid}/fd"))
        if found is None:
            return False
        held |= found
    return bool(listening - held)


def _listening(host: str, port: int) -> set[str]:
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local, _, local_port = fields[1].rpartition(":")
            anyone = not local.strip("0")
            if fields[3] == LISTEN and int(local_port, 16) == port and (anyone or local == _hexadecimal(address)):
                found.add(fields[9])
    return found


def _hexadecimal(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """As /proc/net/tcp writes it: 32-bit words in the machine's (little-endian) order."""
    raw = address.packed
    return "".join(raw[start : start + 4][::-1].hex().upper() for start in range(0, len(raw), 4))


def _sockets(descriptors: Path) -> set[str] | None:
    """Inodes of a process's sockets; none once it has ended, None where they may not be read."""
    found: set[str] = set()
    try:
        for entry in os.scandir(descriptors):
            try:
                match = SOCKET.match(str(Path(entry.path).readlink()))
            except FileNotFoundError:
                continue
            if match:
                found.add(match[1])
    except FileNotFoundError:
        return found
    except OSError:
        return None
    return found
