"""`kimi-rig uninstall`: remove from hosts what their own record lists as brought by us, and nothing else."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rig.cli.arguments import CONVERGED, FAILED, inventory, limit, verb
from rig.cli.converge import Plan, RunFailed, change_hosts, make_plan
from rig.cli.progress import Progress, verbose

DEPLOY_FILE = "tasks/uninstall.py"


def text(plan: Plan) -> str:
    """What goes and what stays, by host."""
    lines: list[str] = []
    for host in plan.hosts:
        mine = [detail for change in plan.changes if change.host == host for detail in change.details]
        lines.append(f"{host}: {'this is removed' if mine else 'nothing of ours is there'}")
        lines += [f"  - {detail}" for detail in mine]
        lines += [f"  {notice}" for notice in plan.notices.get(host, [])]
    return "\n".join(lines)


def agreed() -> bool:
    """Whether the operator wants it. Raises RunFailed where nobody can be asked."""
    if not sys.stdin.isatty():
        raise RunFailed("nothing was removed: there is no terminal to ask on; say YES=1 (--yes) to remove this")
    try:
        return input("Remove this? Type yes: ").strip() == "yes"
    except EOFError:
        return False


@verb("uninstall", "run it again to finish")
@inventory
@limit
@click.option("--plan", "only_plan", is_flag=True, help="Only show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@verbose
def uninstall_command(inventory: str, limits: Sequence[str], *, only_plan: bool, yes: bool, verbose: bool) -> int:
    """Remove from the hosts of INVENTORY what their own record lists as brought by us, and nothing else.

    The model and drafters that were there before, training data, and packages that something else needs stay. Shows
    what would be removed first, then asks.

    Exit codes: 0 nothing of ours is left; 1 failed or not agreed to.
    """
    plan = make_plan(inventory, limits, deploy_file=DEPLOY_FILE, quiet=True)
    print(text(plan), flush=True)
    if not plan.changes or only_plan:
        return CONVERGED
    if not (yes or agreed()):
        print("nothing was removed")
        return FAILED
    change_hosts(Progress(f"uninstall-{Path(inventory).stem}", verbose=verbose), inventory, limits, DEPLOY_FILE)
    left = make_plan(inventory, limits, deploy_file=DEPLOY_FILE, quiet=True)
    if left.changes:
        raise RunFailed(f"this is left:\n{text(left)}")
    print("removed: " + ", ".join(plan.hosts))
    return CONVERGED
