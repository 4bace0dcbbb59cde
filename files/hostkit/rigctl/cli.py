"""The command line: one module a subcommand, each with `register(subparsers)`."""

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from rigctl.contract import layout
from rigctl.contract.foreign import gated
from rigctl.errors import RigctlError

MODULES: dict[str, str] = {
    "bench": "rigctl.bench",
    "canary": "rigctl.services.canary",
    "checkpoints": "rigctl.checkpoints.commands",
    "doctor": "rigctl.services.doctor",
    "drift": "rigctl.engines.drift",
    "edge-certificate": "rigctl.services.edge_certificate",
    "ended": "rigctl.supervisor.ended",
    "environment": "rigctl.engines.environment",
    "free": "rigctl.services.leftovers",
    "kernel": "rigctl.kernel",
    "probe": "rigctl.engines.probes",
    "prune": "rigctl.engines.prune",
    "serve": "rigctl.supervisor.serve",
    "status": "rigctl.services.status",
    "switch": "rigctl.services.switching",
    # Only on hosts with a generated checkpoint.
    **({"tiny-model": "rigctl.tiny_models"} if importlib.util.find_spec("rigctl.tiny_models") else {}),
    "train": "rigctl.training.commands",
    "warm": "rigctl.services.warming",
}
"""Module by the subcommand of its own name; some register further ones."""

USAGE = {"canary": 64}
"""Exit codes of wrong usage that are not argparse's own: of a command whose codes say how a comparison went."""


def parser(names: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of these subcommands."""
    found = argparse.ArgumentParser(prog="rigctl", description="kimi-rig on this host.")
    subparsers = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        importlib.import_module(MODULES[name]).register(subparsers)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 done, 1 failed with a message on stderr, 2 wrong usage."""
    os.environ.update(layout.LOCALE)
    first = (argv if argv is not None else sys.argv[1:])[:1]
    # Only what is asked for: the engines' clients take a while to import.
    try:
        arguments = parser(first if first and first[0] in MODULES else MODULES).parse_args(argv)
    except SystemExit as stopped:
        code = USAGE.get(first[0], 2) if first else 2
        raise SystemExit(code if stopped.code == 2 else stopped.code) from None
    for stream in (sys.stdout, sys.stderr):
        # Names of files and processes may be any bytes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = gated(sys.stdout), gated(sys.stderr)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except (RigctlError, OSError) as error:  # the second: such as a full disk
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"rigctl {arguments.command}: {where}", file=sys.stderr)
        return 1
