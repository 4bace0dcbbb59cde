"""What a unit tells systemd of itself."""

import os
import socket
from contextlib import suppress


def notify(message: str) -> None:
    """Send a state to systemd (sd_notify(3)); nothing outside a unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, suppress(OSError):
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.sendall(message.encode())
