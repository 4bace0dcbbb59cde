"""The load generator's own ceiling: tokens a second it can take from a server that costs nothing.

python -m tests.bench.ceiling AIPERF [CONCURRENCY]; exits with 1 below ten times February's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

from rigctl.bench.load import Generator
from rigctl.contract.sweep import Workload
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.specification import Specification
from tests.unit.serving import specification as stand_in

PORT = 18063
NEEDED = 10 * 2370  # February's peak, tok/s


def specification(port: int, model: str = "trivial") -> Specification:
    """What the generator needs to know of a server on this machine."""
    return stand_in(
        name="trivial", port=port, model=model, tool_call_parser=None, reasoning_parser=None, speculation=None
    )


def workload(concurrency: int, requests_: int, tokens: int) -> Workload:
    return Workload(
        id="w",
        prompts="mixed",
        context=0,
        concurrency=concurrency,
        requests=requests_,
        output_tokens=tokens,
        ignore_eos=True,
        temperature=0.0,
        top_p=1.0,
        seed=1,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("aiperf")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("trivial_server.py")), str(PORT)])
    try:
        _wait()
        load = workload(arguments.concurrency, 8 * arguments.concurrency, 512)
        speeds = []
        with tempfile.TemporaryDirectory() as directory:
            for _ in range(arguments.rounds):
                prompts = [f"Request {n}." for n in range(load.requests)]
                generator = Generator(arguments.aiperf, 600)
                measured, _ = generator.measure(load, Engine(specification(PORT)), prompts, Path(directory) / "round")
                speeds.append(measured.output_tok_s)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps({"tok_s": [round(s) for s in speeds], "needed": NEEDED, "cores": os.cpu_count()}))
    return 0 if max(speeds) >= NEEDED else 1


def _wait() -> None:
    for _ in range(100):
        try:
            requests.get(f"http://127.0.0.1:{PORT}/v1/models", timeout=1)
            return
        except requests.ConnectionError:
            time.sleep(0.1)
    raise SystemExit("the trivial server does not answer")


if __name__ == "__main__":
    raise SystemExit(main())
