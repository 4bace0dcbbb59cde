"""`make uninstall`: remove from hosts what their own record lists as brought by us, and nothing else.

The model and drafters that were there before, training data, and packages that something else needs stay. Shows what
would go first, then asks (or takes --yes). Exit codes: 0 nothing of ours is left; 1 failed or not agreed to.
"""

import argparse
import sys
from collections.abc import Sequence

from rig.cli.arguments import HOSTS, Options, parse
from rig.cli.converge import CONVERGED, FAILED, Plan, RunFailed, change_hosts, ended, make_plan

DEPLOY_FILE = "tasks/uninstall.py"
OPTIONS: Options = {
    **HOSTS,
    "--plan": {"action": "store_true", "help": "only show what would be removed"},
    "--yes": {"action": "store_true", "help": "do not ask"},
}


def text(plan: Plan) -> str:
    """What goes and what stays, by host."""
    lines: list[str] = []
    for host in plan.hosts:
        mine = [detail for change in plan.changes if change.host == host for detail in change.details]
        lines.append(f"{host}: {'this is removed' if mine else 'nothing of ours is there'}")
        lines += [f"  - {detail}" for detail in mine]
        lines += [f"  {notice}" for notice in plan.notices.get(host, [])]
    return "\n".join(lines)


def agreed(arguments: argparse.Namespace) -> bool:
    """Whether the operator wants it. Raises RunFailed where nobody can be asked."""
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise RunFailed("nothing was removed: there is no terminal to ask on; say YES=1 (--yes) to remove this")
    try:
        return input("Remove this? Type yes: ").strip() == "yes"
    except EOFError:
        return False


def uninstall(arguments: argparse.Namespace) -> int:
    """Show, ask, remove, look again. Raises RunFailed when something of ours is left."""
    plan = make_plan(arguments.inventory, arguments.limit, deploy_file=DEPLOY_FILE)
    print(text(plan), flush=True)
    if not plan.changes or arguments.plan:
        return CONVERGED
    if not agreed(arguments):
        print("nothing was removed")
        return FAILED
    change_hosts(arguments.inventory, arguments.limit, DEPLOY_FILE, "uninstall")
    left = make_plan(arguments.inventory, arguments.limit, deploy_file=DEPLOY_FILE)
    if left.changes:
        raise RunFailed(f"this is left:\n{text(left)}")
    print("removed: " + ", ".join(plan.hosts))
    return CONVERGED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the uninstall; every failure is one message and exit code 1."""
    arguments = parse("rig.cli.uninstall", __doc__, argv, OPTIONS)
    return ended(lambda: uninstall(arguments), "run it again to finish")


if __name__ == "__main__":
    raise SystemExit(main())
