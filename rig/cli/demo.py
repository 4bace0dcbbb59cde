"""`kimi-rig demo`: from nothing to a served answer on this machine, with the time each phase took."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rig.catalog.entries import ROOT, load_catalog
from rig.cli import converge
from rig.cli.arguments import verb
from rig.cli.progress import Progress, verbose
from rig.sandbox import Box
from rigctl.contract.layout import unit_name
from rigctl.errors import RigctlError

INVENTORY = "inventory/sandbox.py"
CONFIGURATION = "vllm-eagle3-custom"
ENGINE_PORT = load_catalog("sandbox.yaml").serving[CONFIGURATION].listen.port
PROMPT = "Who are you?"


class DemoFailed(RigctlError):
    """A phase failed; the message says why."""


def demo(progress: Progress) -> None:
    """Boot the box, deploy, start a configuration, ask it something. Raises DemoFailed, RunFailed."""
    begun = time.monotonic()
    box = Box()
    _port_free_or_ours(box)
    _follow(progress, "box", [sys.executable, "-m", "rig", "sandbox", "up"])
    # The engine loads while the box is looked at again; `switch` starts it where this did not, and tells why.
    begin = box.ssh_command(f"systemctl start --no-block {unit_name(CONFIGURATION)}")
    converge.deploy(progress, INVENTORY, (), changed=lambda: subprocess.run(begin, capture_output=True, check=False))
    _follow(progress, "start", box.ssh_command(f"rigctl switch {CONFIGURATION}"))
    progress.begin("ask")
    answer = _ask(box)
    progress.end()
    _print(answer, time.monotonic() - begun)
    if answer["accepted"] != answer["drafted"]:
        raise DemoFailed("this drafter is always right, yet tokens of it were not accepted: see `rigctl status`")


def _follow(progress: Progress, title: str, command: Sequence[str]) -> None:
    progress.begin(title)
    if progress.follow(command, plain=True, cwd=ROOT) != 0:
        raise DemoFailed(f"{title}:\n{progress.trouble()}")
    progress.end()


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


def _ask(box: Box) -> dict[str, Any]:
    command = f"rigctl chat --json --configuration {CONFIGURATION} '{PROMPT}'"
    result = subprocess.run(box.ssh_command(command), capture_output=True, errors="replace", check=False)
    if result.returncode != 0:
        raise DemoFailed(f"{command}: {result.stderr.strip()}")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def _print(answer: dict[str, Any], seconds: float) -> None:
    print(f"\nYou:   {PROMPT}\nModel: {answer['content'].strip()}\n")
    print(f"configuration  {answer['configuration']}")
    print(
        f"speculation    {answer['accepted']} of {answer['drafted']} drafted tokens accepted, "
        f"acceptance length {answer['acceptance_length']:.2f} (the engine's own counters)"
    )
    print(f"answered       after {seconds:.0f} s")
    print(
        "\nLook further:\n"
        '  make sandbox-ssh CMD="rigctl status"          what runs, and how its drafter does\n'
        '  make sandbox-ssh CMD="rigctl chat Hello"      ask again\n'
        f'  make sandbox-ssh CMD="journalctl -u {unit_name(CONFIGURATION)}"\n'
        f"  make verify INVENTORY={INVENTORY}   prove the box\n"
        '  make sandbox-ssh CMD="systemctl start kimi-vllm-base"   switch: this one stops, that one starts\n'
        "  make sandbox-rm                               delete the box"
    )


@verb("demo", "run it again to go on, or `make sandbox-rm`")
@verbose
def demo_command(*, verbose: bool) -> None:
    """Boot the sandbox, deploy to it, start a configuration, ask it something, print its answer.

    Exit codes: 0 an answer came, 1 not.
    """
    demo(Progress("demo", verbose=verbose))
