"""The command line: one module a subcommand, each with `register(subparsers)`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

MODULES: tuple[str, ...] = ("bench", "environment", "serve", "status", "tiny_kimi")


class RigctlError(Exception):
    """A failure the operator can act on: says what is wrong, where, and what to do. Exit code 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 done, 1 failed with a message on stderr, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="rigctl", description="kimi-rig on this host.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in MODULES:
        importlib.import_module(f"rigctl.{name}").register(subparsers)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except RigctlError as error:
        print(f"rigctl {arguments.command}: {error}", file=sys.stderr)
        return 1
