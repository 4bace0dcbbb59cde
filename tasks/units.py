"""Units: one systemd service a serving configuration. Nothing is started or stopped here."""

from pathlib import PurePosixPath

from pyinfra.api import deploy

from rig.artifacts.rollback_states import state_of
from rig.artifacts.units import run_specification, unit_files
from rig.bench.sweeps import generator_path
from rig.operations import rollback_states, system
from rig.operations.files import File, present
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout


@deploy("Units")
def units(plan: HostPlan) -> None:
    names = [layout.unit_name(name) for name in plan.serving]
    boot = [layout.unit_name(name) for name in plan.data.at_boot]
    files = [File(path, text.encode()) for path, text in unit_files(plan).items()]
    known = [PurePosixPath(file.path).name for file in files if file.path.startswith(f"{layout.UNITS}/")]
    edge = [unit for unit in known if unit.startswith(system.EDGE_UNITS)]
    rollback_states.recorded(name="Record the state for a rollback", record=state_of(plan))
    present(name="Write units", entries=files)
    system.retired_units(name="Remove units of removed configurations", keep=known)
    system.units_loaded(name="Load units into systemd", units=[*names, *edge], files=files)
    system.enabled_at_boot(name="Choose what starts at boot", wanted=boot, units=names)
    digests = {name: run_specification(plan, name).known_as for name in plan.serving}
    system.running_current(name="Bring running services up to date", digests=digests, restart=plan.data.restart)
    # Every environment that the plan's programs run from; the load generator's too, which `make bench` builds.
    paths = [*(env.path for env in plan.built.values()), generator_path(plan.data.ml_env)]
    rollback_states.pruned(name="Remove environments that nothing needs", ml_env=plan.data.ml_env, current=paths)


if __name__ == "builtins":
    units(plan=current_plan())
