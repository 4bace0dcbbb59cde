"""`kimi-rig`, also `python -m rig`: an operator's one command. Each verb is a click command in a module of its own.

A verb returns its exit code; every failure is one message and exit code 1, an interrupt too.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from rig.cli.arguments import FAILED, USAGE
from rigctl.contract.foreign import gated
from rigctl.errors import RigctlError

VERBS = {
    "Hosts of an inventory": {
        "plan": ("rig.cli.converge", "what a deploy would change; changes nothing"),
        "deploy": ("rig.cli.converge", "bring hosts to the state that the inventory describes"),
        "verify": ("rig.cli.verify", "prove the live hosts, test by test"),
        "status": ("rig.cli.status", "one line a host: what serves, drift, pending reboot"),
        "explain": ("rig.cli.explain", "what is set on a host, what not, and why"),
        "rollback": ("rig.cli.rollback", "return to environments, units and flags of the deploy before"),
        "bench": ("rig.cli.bench", "measure configurations, report, compare"),
        "train": ("rig.cli.train", "make a drafter of one's own, publish it"),
        "uninstall": ("rig.cli.uninstall", "remove what the hosts' records list, nothing else"),
    },
    "This machine, no host needed": {
        "demo": ("rig.cli.demo", "boot the sandbox, deploy to it, start a configuration, print its answer"),
        "sandbox": ("rig.cli.sandbox", "the box that takes the place of a host: up, stop, rm, ssh, status"),
        "tour": ("rig.cli.tour", "plan, unit, explanation and report of an 8-card host, from recorded facts"),
        "diff": ("rig.cli.diff", "what an edit of inventory/ changes: flags, units, findings"),
    },
    "The catalogues": {
        "pin": ("rig.maintain.pin", "pin a checkpoint's revision, write its manifest"),
        "add-model": ("rig.maintain.add_model", "entries of a model from its config.json"),
        "release-add": ("rig.maintain.release_add", "lock an engine release, ask it, write its entry"),
        "locks": ("rig.maintain.locks", "make the engines' lock files from their recipes"),
        "references": ("rig.maintain.schemas", "write what docs/ shows of schemas and commands"),
    },
}
"""Section of the help -> verb -> (module, one line). The module has the verb as `VERB_command`."""


class Verbs(click.Group):
    """The verbs of VERBS. Only the one that is asked for is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for verbs in VERBS.values():
            if cmd_name in verbs:
                module = import_module(verbs[cmd_name][0])
                found: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
                return found
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in verbs.items()])


@click.group("kimi-rig", cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def kimi_rig() -> None:
    """Turns a bare host with eight cards into one that serves, and keeps it so.

    `kimi-rig VERB --help` says what a verb takes. Paths of inventories are relative to the repository.

    \b
    Exit codes:
      0   converged, done
      1   failed, interrupted
      2   plan: something would change
      3   converged as far as a pending reboot allows
      64  wrong usage
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; the exit code. All that is printed goes through the gate for foreign words."""
    sys.stdout, sys.stderr = gated(sys.stdout), gated(sys.stderr)
    # Also where the caller ignores interrupts (a job in the background): pyinfra would end with 0 and be believed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        code: Any = kimi_rig.main(argv, prog_name="kimi-rig", standalone_mode=False)
        return code or 0
    except click.UsageError as error:
        error.show()
        return USAGE
    except click.Abort:
        print("failed: interrupted", file=sys.stderr)
    except OSError as error:
        print(f"failed: {error.filename}: {error.strerror}", file=sys.stderr)
    except (RigctlError, subprocess.CalledProcessError) as error:
        print(f"failed: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    raise SystemExit(main())
