"""`rigctl serve`: the main process of a serving unit. Starts the engine, waits until it is accepted, tells systemd.

It owns no state: the unit holds the command line, systemd the life cycle, and /run what was accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Any

import requests

from rigctl.acceptance import NotAccepted, accept
from rigctl.cli import RigctlError
from rigctl.client import Engine, api_key
from rigctl.specification import RUNTIME, Specification, read

POLL_SECONDS = 0.25
STOP_SECONDS = 90


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("serve", help="run an engine as the main process of its unit (used by systemd)")
    parser.add_argument("specification", type=Path)
    parser.add_argument("argv", nargs="+", help="the engine's command line, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the engine ends or systemd stops the unit. Raises RigctlError when the engine is not accepted."""
    specification = read(arguments.specification)
    key = api_key()
    engine = _start(specification, arguments.argv, key)
    started = time.monotonic()
    notify("STATUS=starting the engine")
    try:
        seconds, proved = _wait_accepted(engine, Engine(specification, key), started)
        _write_down(specification, proved, seconds)
        line = f"accepted after {seconds:.1f} s{_speculated(proved)}"
        notify(f"READY=1\nSTATUS={line}")
        print(f"{specification.name}: {line}", flush=True)
        status = engine.wait()
    finally:
        _end(engine)
    if _stopping:
        return 0
    message = f"the engine ended by itself ({_exit_text(status)})"
    notify(f"STATUS={message}")
    raise RigctlError(
        f"{specification.name}: {message}; its last words are above, in `journalctl -u {specification.unit}`"
    )


_stopping: list[int] = []


def _start(specification: Specification, argv: list[str], key: str | None) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    # The engine must not talk to systemd in our place.
    environment.pop("NOTIFY_SOCKET", None)
    if key and specification.engine == "vllm":
        environment["VLLM_API_KEY"] = key
    try:
        engine = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise RigctlError(f"{specification.name}: {argv[0]} cannot be run: {error.strerror}; deploy again") from None

    def stop(number: int, _frame: FrameType | None) -> None:
        _stopping.append(number)
        notify("STOPPING=1\nSTATUS=stopping the engine")
        engine.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return engine


def _wait_accepted(process: subprocess.Popen[bytes], engine: Engine, started: float) -> tuple[float, dict[str, Any]]:
    while True:
        status = process.poll()
        if status is not None:
            notify(f"STATUS=the engine ended while it was loading ({_exit_text(status)})")
            raise RigctlError(f"the engine ended while it was loading ({_exit_text(status)}); its last words are above")
        if _listens(engine):
            break
        notify(f"STATUS=loading, {time.monotonic() - started:.0f} s")
        time.sleep(POLL_SECONDS)
    notify("STATUS=asking the engine (acceptance)")
    try:
        proved = accept(engine)
    except NotAccepted as error:
        notify(f"STATUS=not accepted: {error}")
        raise RigctlError(f"not accepted: {error}") from None
    return time.monotonic() - started, proved


def _listens(engine: Engine) -> bool:
    try:
        engine.models(timeout=2)
    except requests.RequestException:
        return False
    return True


def _write_down(specification: Specification, proved: dict[str, Any], seconds: float) -> None:
    directory = RUNTIME / specification.name
    content = {
        "digest": specification.digest,
        "accepted_at": int(time.time()),
        "seconds": round(seconds, 1),
        "proved": proved,
    }
    temporary = directory / "started.json.new"
    temporary.write_text(json.dumps(content) + "\n")
    temporary.rename(directory / "started.json")


def _speculated(proved: dict[str, Any]) -> str:
    found = proved.get("speculation", {})
    return f", {found['accepted']}/{found['drafted']} drafted tokens accepted" if "drafted" in found else ""


def _end(engine: subprocess.Popen[bytes]) -> None:
    if engine.poll() is None:
        engine.terminate()
        try:
            engine.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            engine.kill()  # systemd ends the rest of the control group
            engine.wait()


def _exit_text(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


def notify(message: str) -> None:
    """Send a state to systemd (sd_notify(3)); nothing outside a unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.sendall(message.encode())
