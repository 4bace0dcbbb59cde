"""What our commands share: their arguments, wrong usage, and children that end with us."""

import argparse
import ctypes
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rigctl.contract.foreign import gated

USAGE = 64
"""Exit code of wrong usage (EX_USAGE of sysexits.h): argparse's own 2 would read as "something would change"."""

PR_SET_PDEATHSIG = 1  # prctl(2)


class Parser(argparse.ArgumentParser):
    """An argument parser that ends with 64 on wrong usage; its subparsers do so too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


Options = Mapping[str, Mapping[str, Any]]
"""Arguments of a command: a name, or a flag with its dashes -> what argparse's add_argument takes."""
Verbs = Mapping[str, tuple[Callable[[argparse.Namespace], int], str, Options]]
"""Verbs of a command: name -> (what runs it, its help, its arguments)."""

NOTHING: Mapping[str, Any] = {}
LIMIT: Options = {
    "--limit": {"action": "append", "default": [], "help": "a host, a group or a pattern; may be repeated"},
}
HOSTS: Options = {"inventory": {"help": "such as inventory/gpu.py"}, **LIMIT}
"""Of a command on the hosts of an inventory."""


def parse(
    module: str, doc: str | None, argv: Sequence[str] | None, options: Options = NOTHING, verbs: Verbs = NOTHING
) -> argparse.Namespace:
    """The arguments of `python -m module`; `.error(message)` of the answer ends as wrong usage does.

    From here on all that the command prints goes through the gate for foreign words (rigctl/contract/foreign.py).
    """
    sys.stdout, sys.stderr = gated(sys.stdout), gated(sys.stderr)
    parser = Parser(prog=f"python -m {module}", description=(doc or "").split("\n", 1)[0])
    tables = [(parser, options)]
    if verbs:
        subparsers = parser.add_subparsers(required=True, metavar="VERB")
        for name, (run, what, more) in verbs.items():
            verb = subparsers.add_parser(name, help=what)
            verb.set_defaults(run=run)
            tables.append((verb, more))
    for each, table in tables:
        for name, keywords in table.items():
            each.add_argument(name, **keywords)
    parser.set_defaults(error=parser.error)
    return parser.parse_args(argv)


def limit_options(limits: Sequence[str]) -> list[str]:
    """pyinfra's options for --limit."""
    return [word for limit in limits for word in ("--limit", limit)]


def end_with_parent() -> None:
    """For a child before it becomes another program: the kernel kills it when its parent ends, by SIGKILL too.

    Elsewhere than on Linux nothing happens: there a killed wrapper leaves its deploy at work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
