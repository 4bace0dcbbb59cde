"""Benchmark: the load generator's environment, the units of derived configurations, the sweep as a job on the host."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from pyinfra import host, logger
from pyinfra.api import operation

from rig.bench.sweeps import LOCK, HostSweep, generator_path
from rig.bench.variants import Derived
from rig.facts.state import Lines
from rig.operations import jobs
from rig.operations.common import Commands, note, remember, script
from rigctl.contract import layout
from rigctl.contract.environment_build import EnvironmentBuild
from rigctl.contract.sweep import CellResult, HostFacts, cell_file

# A sweep of many configurations with long loads; systemd ends it after this.
LIMIT_SECONDS = 7 * 24 * 3600


def generator_environment(path: str, python: str, lock: str, cache: str, wheels: str | None) -> EnvironmentBuild:
    """The order to make the load generator's environment."""
    return EnvironmentBuild(
        path=Path(path), python=python, lock=Path(lock), cache=Path(cache), wheels=Path(wheels) if wheels else None
    )


@operation()
def generator(ml_env: str, python: str, cache: str, wheels: str | None = None) -> Commands:
    """The load generator's environment is complete; it is named by its lock, so a complete one is right.

    wheels: directory on the host with every wheel; no index is asked then.
    """
    path = generator_path(ml_env)
    proof = f"[ -e {shlex.quote(path)}/kimi-rig.json ]"
    if host.get_fact(Lines, script=f"{proof} && echo complete") == ["complete"]:
        host.noop(f"{path} is complete")
        return
    note(f"{path} is built from {LOCK.name}")
    lock = f"{layout.LOCKS}/aiperf.txt"
    base = str(PurePosixPath(path).parent)
    yield script(
        remember("directory", base),
        f"mkdir -p {layout.LOCKS}",
        f"base64 -d > {lock}.new",
        f"mv -f {lock}.new {lock}",
        content=LOCK.read_bytes(),
    )
    order = generator_environment(path, python, lock, cache, wheels)
    yield from jobs.run(
        jobs.LongJob(
            unit=f"kimi-job-env-aiperf-{PurePosixPath(path).name}",
            argv=[layout.RIGCTL, "environment", "build", json.dumps(order.document())],
            proof=proof,
            writes=[ml_env],
            properties=["EnvironmentFile=-/etc/environment"],
        )
    )


@operation()
def shifted_drafters(derived: Derived) -> Commands:
    """Drafters with shifted layer ids exist (links to the original beside a config.json of their own)."""
    if not derived.drafters:
        host.noop("no drafter is shifted")
        return
    for drafter in derived.drafters:
        note(f"{drafter.path} is {drafter.source} with layer ids shifted by {drafter.shift}")
    base = str(PurePosixPath(derived.drafters[0].path).parent)
    yield script(remember("directory", base))
    for drafter in derived.drafters:
        source = derived.plan.checkpoint_paths[drafter.source]
        command = [layout.RIGCTL, "bench", "drafter", source, drafter.path]
        yield script(shlex.join([*command, f"--target={drafter.target}", f"--shift={drafter.shift}"]))


@operation()
def removed(derived: Derived) -> Commands:
    """What existed for the sweep only is gone: units, run specifications and drafters."""
    if not derived.made:
        host.noop("nothing was made for the sweep")
        return
    files = [f"{layout.UNITS}/{layout.unit_name(name)}" for name in derived.made]
    files += [f"{layout.CONFIGURATIONS}/{name}.json" for name in derived.made]
    directories = [drafter.path for drafter in derived.drafters]
    note(f"{len(derived.made)} derived configurations are removed")
    yield script(
        shlex.join(["rm", "-f", *files]),
        *([shlex.join(["rm", "-rf", *directories])] if directories else []),
        "systemctl daemon-reload",
    )


@operation()
def measured(sweep: HostSweep, models: Sequence[str], keep: Callable[[CellResult, HostFacts], None]) -> Commands:
    """Every cell of the sweep is measured and handed to `keep`, with the facts of the host.

    The job runs on the host and survives a lost connection; one that was interrupted goes on where it ended.
    """
    order = sweep.order
    note(f"{len(order.pairs)} cells of {len(order.cells)} configurations are measured (sweep {order.id})")
    for cell in sweep.skipped:
        note(f"skipped, it does not fit into the context: {cell}")
    path = f"{sweep.directory}/sweep.json"
    yield script(
        remember("directory", str(PurePosixPath(sweep.directory).parent)),
        f"mkdir -p {sweep.directory}",
        f"base64 -d > {path}.new",
        f"mv -f {path}.new {path}",
        content=order.text().encode(),
    )
    yield from jobs.run(
        jobs.LongJob(
            unit=f"kimi-bench-{order.id}",
            argv=[layout.RIGCTL, "bench", "run", path],
            proof=" && ".join(f"[ -e {shlex.quote(f'{sweep.directory}/{cell_file(*one)}')} ]" for one in order.pairs),
            writes=[str(PurePosixPath(sweep.directory).parent)],
            network="loopback",
            watches=True,
            limit_seconds=LIMIT_SECONDS,
        )
    )
    asked, listed = shlex.join([layout.RIGCTL, "bench", "host", *models]), f"{layout.RIGCTL} bench results {path}"
    [facts] = [HostFacts.parse_text(line, asked) for line in host.get_fact(Lines, script=asked)]
    for line in host.get_fact(Lines, script=listed):
        keep(CellResult.parse_text(line, listed), facts)
    logger.info(f"{host.print_prefix}{len(order.pairs)} cells are in the ledger")
    # Kept until the next one of its kind, for whoever wants to look; a new run measures anew.
    yield script(f"rm -rf {sweep.directory}.done", f"mv -T {sweep.directory} {sweep.directory}.done")
