"""Engines: one environment for each release that a configuration of this host uses."""

from pathlib import Path

from pyinfra.api import deploy

from rig.catalog import ROOT
from rig.hostplan import HostPlan
from rig.operations.engines import environment
from rig.operations.files import File, present
from rig.target import current_plan


def lock_files(plan: HostPlan) -> list[File]:
    """The lock files the host's environments are built from, for building and for later comparison."""
    return [File(env.lock_on_host, Path(ROOT / env.lock).read_bytes()) for env in plan.environments.values()]


@deploy("Engines")
def engines(plan: HostPlan) -> None:
    present(name="Copy lock files", entries=lock_files(plan))
    for name, env in plan.environments.items():
        environment(name=f"Build the environment of {name}", env=env, cache=f"{plan.data.ml_env}/.cache")


if __name__ == "builtins":
    engines(plan=current_plan())
