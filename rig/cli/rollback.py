"""`kimi-rig rollback`: hosts return to the state before their last deploy: environments, units and flags together."""

from collections.abc import Sequence
from pathlib import Path

import click

from rig.cli.arguments import CONVERGED, WOULD_CHANGE, inventory, limit, verb
from rig.cli.converge import RunFailed, change_hosts, make_plan, print_notices
from rig.cli.progress import Progress, verbose

DEPLOY_FILE = "tasks/rollback.py"


@verb("rollback", "run it again to finish")
@inventory
@limit
@click.option("--to", "state", help="A state of the host's by its id; default: the one before the present one.")
@click.option("--plan", "only_plan", is_flag=True, help="Only show what would change.")
@verbose
def rollback_command(
    inventory: str, limits: Sequence[str], state: str | None, *, only_plan: bool, verbose: bool
) -> int:
    """Return the hosts of INVENTORY (such as inventory/gpu.py) to the state before their last deploy.

    Environments, units and flags return together. Shows what it does first. Nothing is started or stopped beyond the
    host's restart policy.

    Exit codes: 0 rolled back; 2 (--plan) something would change; 1 failed, or there is nothing to return to.
    """
    # Quoted: pyinfra would read an identity of digits as a number.
    to = ["--data", f'rollback_to="{state}"'] if state else []
    plan = make_plan(inventory, limits, to, DEPLOY_FILE, quiet=True)
    print(plan.text(), flush=True)
    if plan.refusals:
        raise RunFailed("\n".join(plan.refusals))
    if only_plan:
        return plan.exit_code(WOULD_CHANGE)
    progress = Progress(f"rollback-{Path(inventory).stem}", verbose=verbose)
    change_hosts(progress, inventory, limits, DEPLOY_FILE, to)
    left = make_plan(inventory, limits, ["--data", "rollback_again=yes"], DEPLOY_FILE, quiet=True)
    if left.changes:
        raise RunFailed(f"not rolled back, this is left to do:\n{left.text()}")
    print_notices(left)
    print("rolled back: " + ", ".join(left.hosts))
    return CONVERGED
