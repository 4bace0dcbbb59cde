"""What our commands share: their class, arguments that many have, and children that end with us."""

import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from rigctl.errors import RigctlError

CONVERGED, FAILED, WOULD_CHANGE, REBOOT_PENDING, USAGE = 0, 1, 2, 3, 64
"""Exit codes of `kimi-rig`; 4 is reserved. USAGE: sysexits.h, click's own 2 would read as "something would change"."""

PR_SET_PDEATHSIG = 1  # prctl(2)


class Verb(click.Command):
    """A command whose function returns the exit code (None: 0). interrupted: what becomes of work that is interrupted.

    An option takes one value (click's nargs 1) or, as `multiple`, one each time it is named.
    """

    def __init__(self, *given: Any, interrupted: str = "", **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.interrupted = interrupted

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. Raises RigctlError where it is interrupted."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise RigctlError("; ".join(filter(None, ("interrupted", self.interrupted)))) from None


def verb(name: str, interrupted: str = "") -> Callable[[Callable[..., int | None]], Verb]:
    """Decorator: a function as the command `name`; its docstring is the help."""
    return click.command(name, cls=Verb, interrupted=interrupted)


inventory = click.argument("inventory")
limit = click.option(
    "--limit", "limits", multiple=True, metavar="HOST", help="A host, a group or a pattern; may be repeated."
)


def limit_options(limits: Sequence[str]) -> list[str]:
    """pyinfra's options for --limit."""
    return [word for one in limits for word in ("--limit", one)]


def end_with_parent() -> None:
    """For a child before it becomes another program: the kernel kills it when its parent ends, by SIGKILL too.

    Elsewhere than on Linux nothing happens: there a killed wrapper leaves its deploy at work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
