"""Benchmark: measure serving configurations one after another; results go to the ledger of this repository."""

import os
from pathlib import Path

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.exceptions import PyinfraError

from rig.artifacts.units import unit_files
from rig.bench import ledger
from rig.bench.collect import to_result
from rig.bench.sweeps import HostSweep, find_sweep, host_sweep
from rig.bench.variants import Derived, derive
from rig.catalog.yaml_source import CatalogError
from rig.operations import benchmark as operations
from rig.operations import system
from rig.operations.deploy_lock import deploy_lock
from rig.operations.files import File, present
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.sweep import CellResult, HostFacts

LEDGER = "KIMI_RIG_LEDGER"
"""Environment variable: another directory for the ledger."""


def asked(plan: HostPlan) -> tuple[Derived, HostSweep]:
    """What this host is asked to measure, from its data. Raises PyinfraError, naming the host, when it cannot."""
    name = str(host.data.get("bench_sweep") or "default")
    public = [name for name, entry in plan.serving.items() if not entry.listen.private]
    wanted = host.data.get("bench_configurations") or public
    configurations = wanted.split() if isinstance(wanted, str) else list(wanted)
    try:
        sweep = find_sweep(name)
        derived = derive(plan, sweep, configurations)
        return derived, host_sweep(derived.plan, name, sweep, derived.names)
    except CatalogError as error:
        raise PyinfraError(f"{host.name}: {error}") from None


@deploy("Benchmark")
def benchmark(plan: HostPlan) -> None:
    derived, sweep = asked(plan)
    directory = Path(os.environ.get(LEDGER) or ledger.DIRECTORY)
    name = host.name.removeprefix("@").replace("/", "-")

    def keep(cell: CellResult, facts: HostFacts) -> None:
        try:
            ledger.append(to_result(cell, sweep, derived, name, facts), directory)
        except ledger.LedgerError as error:
            raise PyinfraError(f"{host.name}: {error}; the host keeps its results, run the benchmark again") from None

    deploy_lock(name="Hold the deploy lock")
    python = next(iter(plan.environments.values())).python
    operations.generator(
        name="Build the load generator's environment",
        ml_env=plan.data.ml_env,
        python=python,
        cache=f"{plan.data.ml_env}/.cache",
        wheels=plan.data.wheels,
    )
    operations.shifted_drafters(name="Derive drafters", derived=derived)
    if derived.made:
        texts = unit_files(derived.plan)
        units = {layout.unit_name(made) for made in derived.made} | {f"{made}.json" for made in derived.made}
        files = [File(path, text.encode()) for path, text in texts.items() if Path(path).name in units]
        present(name="Write units of derived configurations", entries=files)
        system.units_loaded(
            name="Load them into systemd", units=[layout.unit_name(made) for made in derived.made], files=files
        )
    served = [derived.plan.serving[one] for one in derived.names]
    models = {name for one in served for name in one.used}
    paths = sorted({derived.plan.checkpoint_paths[model] for model in models})
    operations.measured(name="Measure", sweep=sweep, models=paths, keep=keep)
    operations.removed(name="Remove derived configurations", derived=derived)
