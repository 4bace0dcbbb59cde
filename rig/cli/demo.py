"""`make demo`: from nothing to a served answer on this machine, with the time each phase took."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rig.catalog.entries import ROOT, load_catalog
from rig.cli import converge
from rig.cli.arguments import parse
from rig.sandbox import Box, SandboxError
from rigctl.contract.layout import unit_name

INVENTORY = "inventory/sandbox.py"
CONFIGURATION = "vllm-eagle3-custom"
ENGINE_PORT = load_catalog("sandbox.yaml").serving[CONFIGURATION].listen.port
PROMPT = "Who are you?"


class DemoFailed(Exception):
    """A phase failed; its own messages stand above."""


@contextmanager
def phase(title: str, took: dict[str, float]) -> Iterator[None]:
    """Announce a phase and keep its seconds."""
    print(f"\n== {title}", flush=True)
    begun = time.monotonic()
    yield
    took[title] = time.monotonic() - begun


def demo() -> None:
    """Boot the box, deploy, start a configuration, ask it something. Raises DemoFailed or SandboxError."""
    took: dict[str, float] = {}
    box = Box()
    _port_free_or_ours(box)
    with phase("boot the sandbox", took):
        _must(lambda: subprocess.run([sys.executable, "-m", "rig.sandbox", "up"], check=False, cwd=ROOT).returncode)
    with phase(f"deploy {INVENTORY}", took):
        # A box that has converged needs no deploy; the plan says so in seconds.
        if converge.main(["plan", INVENTORY]) != converge.CONVERGED:
            _must(lambda: converge.main(["deploy", INVENTORY]))
    with phase(f"start {unit_name(CONFIGURATION)}", took):
        _must(
            lambda: (
                subprocess.run(box.ssh_command(f"systemctl start {unit_name(CONFIGURATION)}"), check=False).returncode
            )
        )
    with phase("ask it", took):
        answer = _ask(box)
    _print(answer, took)
    if answer["accepted"] != answer["drafted"]:
        raise DemoFailed("this drafter is always right, yet tokens of it were not accepted: see `rigctl status`")


def _port_free_or_ours(box: Box) -> None:
    """The box shares this computer's network: an engine that listens already must be the box's own."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", ENGINE_PORT)) != 0:
            return
    state = subprocess.run(
        box.ssh_command("systemctl is-active 'kimi-vllm-*'"), capture_output=True, errors="replace", check=False
    )
    if "active" not in state.stdout.split():
        raise DemoFailed(f"port {ENGINE_PORT} on 127.0.0.1 is taken by something else; end it and run the demo again")


def _must(run: Callable[[], int]) -> None:
    if run() != 0:
        raise DemoFailed("its own messages stand above")


def _ask(box: Box) -> dict[str, Any]:
    command = f"rigctl chat --json --configuration {CONFIGURATION} '{PROMPT}'"
    result = subprocess.run(box.ssh_command(command), stdout=subprocess.PIPE, errors="replace", check=False)
    if result.returncode != 0:
        raise DemoFailed("its own messages stand above")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def _print(answer: dict[str, Any], took: dict[str, float]) -> None:
    print(f"\nYou:   {PROMPT}\nModel: {answer['content'].strip()}\n")
    print(f"configuration  {answer['configuration']}")
    print(
        f"speculation    {answer['accepted']} of {answer['drafted']} drafted tokens accepted, "
        f"acceptance length {answer['acceptance_length']:.2f} (the engine's own counters)"
    )
    print("elapsed        " + ", ".join(f"{title} {seconds:.0f} s" for title, seconds in took.items()))
    print(
        "\nLook further:\n"
        '  make sandbox-ssh CMD="rigctl status"          what runs, and how its drafter does\n'
        '  make sandbox-ssh CMD="rigctl chat Hello"      ask again\n'
        f'  make sandbox-ssh CMD="journalctl -u {unit_name(CONFIGURATION)}"\n'
        f"  make verify INVENTORY={INVENTORY}   prove the box\n"
        '  make sandbox-ssh CMD="systemctl start kimi-vllm-base"   switch: this one stops, that one starts\n'
        "  make sandbox-rm                               delete the box"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when an answer came, else 1 with the reason."""
    parse("rig.cli.demo", __doc__, argv)
    os.environ.setdefault("PYINFRA_PROGRESS", "off")

    def work() -> int:
        demo()
        return 0

    again = "run it again to go on, or `make sandbox-rm`"
    return converge.ended(work, again, (DemoFailed, SandboxError))


if __name__ == "__main__":
    raise SystemExit(main())
