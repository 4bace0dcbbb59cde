"""Whose socket answers at an address: our processes', or a stranger's that shares the port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rigctl.supervisor.listening import strangers

OTHER = """
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("127.0.0.1", int(sys.argv[1])))
s.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ours() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        yield listener


def test_our_own_listener_is_no_stranger(ours: socket.socket) -> None:
    port = ours.getsockname()[1]
    assert not strangers("127.0.0.1", port, lambda: [os.getpid()]), "bound is not listening"
    ours.listen()
    assert not strangers("127.0.0.1", port, lambda: [os.getpid()])
    assert strangers("127.0.0.1", port, lambda: [1])
    assert not strangers("127.0.0.1", port, list), "outside a unit nobody is a stranger"
    assert not strangers("127.0.0.2", port, lambda: [1]), "another address is another's"


def test_a_second_engine_on_the_same_port_is_noticed(ours: socket.socket) -> None:
    port = ours.getsockname()[1]
    ours.listen()
    command = [sys.executable, "-c", OTHER, str(port)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "listening\n"
    try:
        assert strangers("127.0.0.1", port, lambda: [os.getpid()]) == [f"process {other.pid}"]
        assert strangers("0.0.0.0", port, lambda: [os.getpid()]), "the closer address wins"
        assert not strangers("::1", port, lambda: [os.getpid()])
        assert not strangers("127.0.0.1", port, lambda: [os.getpid(), other.pid])
    finally:
        other.stdin.close()
        other.wait()


def test_every_address_counts_for_a_wildcard_listener() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert strangers("127.0.0.1", port, lambda: [1]) and strangers("::1", port, lambda: [1])
        assert not strangers("::1", port, lambda: [os.getpid()])
