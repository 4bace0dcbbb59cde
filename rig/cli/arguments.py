"""What our commands share: wrong usage and children that end with us."""

import argparse
import ctypes
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

USAGE = 64
"""Exit code of wrong usage (EX_USAGE of sysexits.h): argparse's own 2 would read as "something would change"."""

PR_SET_PDEATHSIG = 1  # prctl(2)


class Parser(argparse.ArgumentParser):
    """An argument parser that ends with 64 on wrong usage; its subparsers do so too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def hosts_parser(module: str, doc: str | None) -> Parser:
    """The parser of a command on the hosts of an inventory."""
    parser = Parser(prog=f"python -m {module}", description=(doc or "").split("\n", 1)[0])
    parser.add_argument("inventory", help="such as inventory/gpu.py")
    parser.add_argument("--limit", action="append", default=[], help="a host, a group or a pattern; may be repeated")
    return parser


def limit_options(limits: Sequence[str]) -> list[str]:
    """pyinfra's options for --limit."""
    return [word for limit in limits for word in ("--limit", limit)]


def end_with_parent() -> None:
    """For a child before it becomes another program: the kernel kills it when its parent ends, by SIGKILL too.

    Elsewhere than on Linux nothing happens: there a killed wrapper leaves its deploy at work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
