"""What the edge adds to a request: `python -m tests.edge.latency` prints milliseconds, direct and through it.

A stand-in engine that answers at once, on this machine's loopback; five rounds in turn, of 200 requests each over one
kept connection; the median of the rounds' medians, and the rounds'.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import requests

from tests.edge.conftest import ENGINE_KEY, making
from tests.support.plans import INVENTORY

KEY = "latency-key-0123456789"
QUESTION = {"model": "kimi", "messages": [{"role": "user", "content": "What is a token?"}]}
ROUNDS, REQUESTS = 5, 200


def timed(session: requests.Session, url: str, key: str) -> float:
    """Median of one round, in milliseconds, to the whole answer."""

    def each() -> Iterator[float]:
        for _ in range(REQUESTS):
            begun = time.perf_counter()
            session.post(url, json=QUESTION, headers={"Authorization": f"Bearer {key}"}, timeout=30).raise_for_status()
            yield (time.perf_counter() - begun) * 1000

    return statistics.median(each())


def main() -> None:
    os.environ["KIMI_RIG_INVENTORY"] = str(INVENTORY)
    with tempfile.TemporaryDirectory() as directory, making(Path(directory)) as make, requests.Session() as session:
        edge, engine = make({"alice": KEY}, limits={"requests_a_minute": 1_000_000})
        session.trust_env, session.verify = False, str(edge.certificate)
        ways = {
            "direct": (f"http://127.0.0.1:{engine.port}/v1/chat/completions", ENGINE_KEY),
            "through the edge (TLS)": (f"{edge.url}/v1/chat/completions", KEY),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, (url, key) in ways.items():
                found[way].append(timed(session, url, key))
        for way, medians in found.items():
            rounds = ", ".join(f"{median:.2f}" for median in medians)
            print(f"{way}: {statistics.median(medians):.2f} ms (rounds: {rounds})")
        added = [edge - direct for direct, edge in zip(*found.values(), strict=True)]
        print(f"added: {statistics.median(added):.2f} ms")


if __name__ == "__main__":
    main()
