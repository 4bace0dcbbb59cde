"""`rigctl status` and `rigctl chat`: what runs on this host, and a word with it."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from typing import Any

import requests

from rigctl.acceptance import reasoning_of
from rigctl.cli import RigctlError
from rigctl.client import Engine, api_key
from rigctl.specification import Specification, installed, named, started


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = subparsers.add_parser("status", help="what runs, how its load proceeds, what its drafter achieves")
    status.add_argument("--json", action="store_true", help="the same as one JSON list")
    status.set_defaults(run=show)
    chat = subparsers.add_parser("chat", help="one chat completion, and what speculation did for it")
    chat.add_argument("prompt")
    chat.add_argument("--configuration", help="default: the one that is active")
    chat.add_argument("--max-tokens", type=int, default=256)
    chat.add_argument("--json", action="store_true")
    chat.set_defaults(run=talk)


def show(arguments: argparse.Namespace) -> int:
    """Print one line a configuration."""
    rows = [_row(specification) for specification in installed()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        stale = "  STALE: deployed anew since it was started" if row["stale"] else ""
        length = row["acceptance_length"]
        speculation = f"  acceptance length {length:.2f}" if length is not None else ""
        print(f"{row['state']:<12} {row['name']:<32} {row['status']}{speculation}{stale}")
    return 0


def _row(specification: Specification) -> dict[str, Any]:
    properties = _properties(specification.unit)
    ran_as = started(specification) if properties["ActiveState"] == "active" else None
    length = None
    if ran_as is not None and specification.speculation:
        try:
            counters = Engine(specification, api_key()).speculation()
            length = counters.acceptance_length if counters else None
        except requests.RequestException:
            pass
    return {
        "name": specification.name,
        "state": properties["ActiveState"],
        "status": properties["StatusText"],
        "release": specification.release,
        "address": f"{specification.host}:{specification.port}",
        "model": specification.model,
        "accepted_at": ran_as["accepted_at"] if ran_as else None,
        "acceptance_length": length,
        "stale": ran_as is not None and ran_as["digest"] != specification.digest,
    }


def _properties(unit: str) -> dict[str, str]:
    wanted = ["ActiveState", "StatusText"]
    command = ["systemctl", "show", f"--property={','.join(wanted)}", unit]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    return {key: found.get(key, "") for key in wanted}


def talk(arguments: argparse.Namespace) -> int:
    """Send one chat completion and print the answer. Raises RigctlError when nothing is active or it fails."""
    specification = named(arguments.configuration) if arguments.configuration else _active()
    engine = Engine(specification, api_key())
    try:
        before = engine.speculation() if specification.speculation else None
        begun = time.monotonic()
        message = engine.chat(
            [{"role": "user", "content": arguments.prompt}], max_tokens=arguments.max_tokens, temperature=None
        )["message"]
        seconds = time.monotonic() - begun
        after = engine.speculation() if specification.speculation else None
    except requests.RequestException as error:
        raise RigctlError(f"{specification.name} does not answer: {error}; see `rigctl status`") from None
    counted = after.since(before) if after and before else None
    answer = {
        "configuration": specification.name,
        "content": message.get("content") or "",
        "reasoning": reasoning_of(message),
        "seconds": round(seconds, 3),
        "drafted": counted.drafted if counted else None,
        "accepted": counted.accepted if counted else None,
        "acceptance_length": counted.acceptance_length if counted else None,
    }
    print(json.dumps(answer) if arguments.json else _text(answer))
    return 0


def _text(answer: dict[str, Any]) -> str:
    lines = [answer["content"].strip(), "", f"{answer['configuration']}, {answer['seconds']:.2f} s"]
    if answer["drafted"]:
        share = 100 * answer["accepted"] / answer["drafted"]
        lines[-1] += (
            f"; {answer['accepted']} of {answer['drafted']} drafted tokens accepted ({share:.0f} %), "
            f"acceptance length {answer['acceptance_length']:.2f}"
        )
    return "\n".join(lines)


def _active() -> Specification:
    for specification in installed():
        if _properties(specification.unit)["ActiveState"] == "active":
            return specification
    raise RigctlError("no configuration is active; start one with `systemctl start kimi-<configuration>`")
