"""`rigctl bench`: measure serving configurations on this host, one after another (used by benchmark.py)."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rigctl.bench.host import host_facts, shifted_drafter
from rigctl.bench.sweep import results, run_sweep
from rigctl.contract.order import Order


def _print(orders: Iterable[Order]) -> int:
    for order in orders:
        print(json.dumps(order.document()))
    return 0


def _drafter(arguments: argparse.Namespace) -> int:
    ids = shifted_drafter(arguments.source, arguments.destination, arguments.target, arguments.shift)
    print(f"{arguments.destination}: layer ids {ids}")
    return 0


_VERBS: dict[str, tuple[str, Callable[[argparse.Namespace], int], dict[str, dict[str, Any]]]] = {
    "run": (
        "measure what is not measured yet",
        lambda arguments: run_sweep(arguments.sweep),
        {"sweep": {"type": Path, "help": "JSON: what to measure"}},
    ),
    "host": (
        "what a result needs to know of this host, as JSON",
        lambda arguments: _print([host_facts(arguments.models)]),
        {"models": {"nargs": "*", "help": "model directories"}},
    ),
    "results": (
        "the finished cells of a sweep, one JSON a line",
        lambda arguments: _print(results(arguments.sweep)),
        {"sweep": {"type": Path}},
    ),
    "drafter": (
        "make a drafter with shifted layer ids",
        _drafter,
        {
            "source": {"type": Path},
            "destination": {"type": Path},
            "--target": {"type": Path, "required": True},
            "--shift": {"type": int, "required": True},
        },
    ),
}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("bench", help="measure serving configurations (used by benchmark.py)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (words, run, options) in _VERBS.items():
        made = verbs.add_parser(verb, help=words)
        made.set_defaults(run=run)
        for name, settings in options.items():
            made.add_argument(name, **settings)
