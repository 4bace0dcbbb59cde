"""`make rollback`: hosts return to the state before their last deploy: environments, units and flags together.

Nothing is started or stopped beyond the host's restart policy. Shows what it does first. Exit codes: 0 rolled back;
2 (--plan) it would change something; 1 failed, or there is nothing to return to.
"""

import argparse
from collections.abc import Sequence

from rig.cli.arguments import HOSTS, Options, parse
from rig.cli.converge import CONVERGED, WOULD_CHANGE, RunFailed, change_hosts, ended, make_plan, print_notices

DEPLOY_FILE = "tasks/rollback.py"
OPTIONS: Options = {
    **HOSTS,
    "--to": {"help": "a state of the host's by its id; default: the one before the present one"},
    "--plan": {"action": "store_true", "help": "only show what would change"},
}


def rollback(arguments: argparse.Namespace) -> int:
    """Show, roll back, look again. Raises RunFailed when a host is not in its earlier state."""
    # Quoted: pyinfra would read an identity of digits as a number.
    to = ["--data", f'rollback_to="{arguments.to}"'] if arguments.to else []
    plan = make_plan(arguments.inventory, arguments.limit, to, DEPLOY_FILE)
    print(plan.text(), flush=True)
    if plan.refusals:
        raise RunFailed("\n".join(plan.refusals))
    if arguments.plan:
        return plan.exit_code(WOULD_CHANGE)
    change_hosts(arguments.inventory, arguments.limit, DEPLOY_FILE, "rollback", to)
    left = make_plan(arguments.inventory, arguments.limit, ["--data", "rollback_again=yes"], DEPLOY_FILE)
    if left.changes:
        raise RunFailed(f"not rolled back, this is left to do:\n{left.text()}")
    print_notices(left)
    print("rolled back: " + ", ".join(left.hosts))
    return CONVERGED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rollback; every failure is one message and exit code 1."""
    arguments = parse("rig.cli.rollback", __doc__, argv, OPTIONS)
    return ended(lambda: rollback(arguments), "run it again to finish")


if __name__ == "__main__":
    raise SystemExit(main())
