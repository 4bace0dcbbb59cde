"""What engine environments are made from, and what each installed engine is asked before a unit is written. Pure."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rig.catalog.entries import ROOT, Checkpoint, Configuration
from rig.plan.command_lines import command_line
from rig.plan.host_plan import Built, HostPlan
from rigctl.contract import environment_build as contract


def engine_files(plan: HostPlan) -> dict[str, bytes]:
    """Lock files and patches the host's environments are made from, for building and for later comparison: by path."""
    files = {env.lock_on_host: (ROOT / env.lock).read_bytes() for env in plan.built.values()}
    for env in plan.built.values():
        if env.release.patches:
            patches = sorted((ROOT / env.release.patches).glob("*.patch"))
            files |= {f"{env.series_on_host}/{path.name}": path.read_bytes() for path in patches}
    return files


def command_lines(plan: HostPlan, release: str) -> list[list[str]]:
    """The command lines of a release's configurations, as its own parser will see them."""
    env = plan.environments[release]
    mine = [entry for entry in plan.serving.values() if entry.release == release]
    drain = plan.data.supervision.drain_seconds
    return [command_line(entry, env.release, plan.locations(entry), drain) for entry in mine]


def features(plan: HostPlan, release: str) -> list[str]:
    """What a release must have for its configurations, as `rigctl probe --require` takes it."""
    mine = [entry for entry in plan.serving.values() if entry.release == release]
    return sorted({*plan.environments[release].release.features, *needed(mine, plan.checkpoints)})


def needed(entries: Iterable[Configuration], checkpoints: Mapping[str, Checkpoint]) -> set[str]:
    """Features that these need: their targets' architectures, those as EAGLE-3 targets, and their parsers."""
    found = set[str]()
    for entry in entries:
        name = checkpoints[entry.target].architecture
        eagle3 = entry.speculation is not None and entry.speculation.method == "eagle3"
        wanted = {
            "architecture": name,
            "eagle3_interface": name if eagle3 else None,
            "tool_parser": None if "tool-parser-plugin" in entry.flags else entry.tool_call_parser,
            "reasoning_parser": None if "reasoning-parser-plugin" in entry.flags else entry.reasoning_parser,
        }
        found |= {f"{feature}:{of}" for feature, of in wanted.items() if of is not None}
    return found


def variables(plan: HostPlan, release: str) -> dict[str, list[str]]:
    """Engine variables (VLLM_*, SGLANG_*) that the catalogues set: name -> its configurations of this release.

    Not those that every unit gets, for whichever engine reads them.
    """
    found: dict[str, list[str]] = {}
    for name, entry in plan.serving.items():
        if entry.release == release:
            for variable in {**plan.environments[release].release.environment, **entry.environment}:
                if variable.startswith(("VLLM_", "SGLANG_", "SGL_")):
                    found.setdefault(variable, []).append(name)
    return dict(sorted(found.items()))


def engine(env: Built) -> contract.Environment:
    return contract.Environment(
        path=Path(env.path),
        python=env.python,
        lock=Path(env.lock_on_host),
        patches=Path(env.series_on_host) if env.series_on_host else None,
    )


def environment_build(env: Built, cache: str, wheels: str | None) -> contract.EnvironmentBuild:
    """The order to make it. cache: uv's. wheels: directory with every wheel."""
    return contract.EnvironmentBuild(
        **dict(engine(env)), cache=Path(cache), index=env.release.index, wheels=Path(wheels) if wheels else None
    )
