"""Uninstall: what the host's record lists goes, in the order in which it may (rig/cli/uninstall.py runs this)."""

from pyinfra.api import deploy

from rig.operations import removal
from rig.operations.deploy_lock import deploy_lock
from rig.plan.current import check_privilege


@deploy("Uninstall")
def uninstall() -> None:
    deploy_lock(name="Hold the deploy lock")
    removal.units_removed(name="Stop and remove units")
    removal.paths_removed(name="Remove files and directories")
    removal.users_removed(name="Remove the service user")
    removal.packages_removed(name="Remove packages")
    removal.state_removed(name="Remove the record")


if __name__ == "builtins":
    check_privilege()
    uninstall()
