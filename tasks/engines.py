"""Engines: one environment for each release that a configuration of this host uses."""

from pyinfra.api import deploy

from rig.artifacts.engine_inputs import command_lines, engine_files, features, variables
from rig.operations.engine_environments import accepted, environment, undrifted
from rig.operations.files import File, present
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan


@deploy("Engines")
def engines(plan: HostPlan) -> None:
    files = [File(path, content) for path, content in engine_files(plan).items()]
    present(name="Copy locks and patches", entries=files)
    undrifted(name="Look for drift", environments=list(plan.built.values()))
    cache = f"{plan.data.ml_env}/.cache"
    for name, trainer in plan.trainers.items():
        environment(name=f"Build the environment of {name}", env=trainer, cache=cache, wheels=plan.data.wheels)
    for name, env in plan.environments.items():
        environment(name=f"Build the environment of {name}", env=env, cache=cache, wheels=plan.data.wheels)
        accepted(
            name=f"Ask {name} for its features and command lines",
            env=env,
            features=features(plan, name),
            argvs=command_lines(plan, name),
            variables=variables(plan, name),
        )


if __name__ == "builtins":
    engines(plan=current_plan())
