"""`rigctl bench`: measure serving configurations on this host, one after another (used by benchmark.py)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rigctl.bench.host import host_facts, shifted_drafter
from rigctl.bench.sweep import results, run_sweep


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure serving configurations (used by benchmark.py)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    running = verbs.add_parser("run", help="measure what is not measured yet")
    running.add_argument("sweep", type=Path, help="JSON: what to measure")
    running.set_defaults(run=lambda arguments: run_sweep(arguments.sweep))
    facts = verbs.add_parser("host", help="what a result needs to know of this host, as JSON")
    facts.add_argument("models", nargs="*", help="model directories")
    facts.set_defaults(run=_host)
    listing = verbs.add_parser("results", help="the finished cells of a sweep, one JSON a line")
    listing.add_argument("sweep", type=Path)
    listing.set_defaults(run=_results)
    drafter = verbs.add_parser("drafter", help="make a drafter with shifted layer ids")
    drafter.add_argument("source", type=Path)
    drafter.add_argument("destination", type=Path)
    drafter.add_argument("--target", type=Path, required=True)
    drafter.add_argument("--shift", type=int, required=True)
    drafter.set_defaults(run=_drafter)


def _host(arguments: argparse.Namespace) -> int:
    print(json.dumps(host_facts(arguments.models).document()))
    return 0


def _results(arguments: argparse.Namespace) -> int:
    for result in results(arguments.sweep):
        print(json.dumps(result.document()))
    return 0


def _drafter(arguments: argparse.Namespace) -> int:
    ids = shifted_drafter(arguments.source, arguments.destination, arguments.target, arguments.shift)
    print(f"{arguments.destination}: layer ids {ids}")
    return 0
