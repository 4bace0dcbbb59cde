"""What our commands share: wrong usage and children that end with us."""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from typing import NoReturn

USAGE = 64
"""Exit code of wrong usage (EX_USAGE of sysexits.h): argparse's own 2 would read as "something would change"."""

PR_SET_PDEATHSIG = 1  # prctl(2)


class Parser(argparse.ArgumentParser):
    """An argument parser that ends with 64 on wrong usage; its subparsers do so too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def end_with_parent() -> None:
    """For a child before it becomes another program: the kernel kills it when its parent ends, by SIGKILL too.

    Elsewhere than on Linux nothing happens: there a killed wrapper leaves its deploy at work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
