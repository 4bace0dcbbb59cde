"""Engine environments: what the plan says of them, as the orders that rigctl works from. Pure."""

from __future__ import annotations

from pathlib import Path

from rig.plan.host_plan import Environment
from rigctl.contract import environment_build as contract


def engine(env: Environment) -> contract.Environment:
    """An engine environment on its host."""
    return contract.Environment(
        path=Path(env.path),
        python=env.python,
        lock=Path(env.lock_on_host),
        patches=Path(env.series_on_host) if env.series_on_host else None,
    )


def environment_build(env: Environment, cache: str, wheels: str | None) -> contract.EnvironmentBuild:
    """The order to make it. cache: uv's. wheels: directory with every wheel."""
    return contract.EnvironmentBuild(
        **dict(engine(env)), cache=Path(cache), index=env.release.index, wheels=Path(wheels) if wheels else None
    )
