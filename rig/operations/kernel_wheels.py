"""Kernel wheels on the host: built or proved by `rigctl kernel`, as a long job that yields to everything else."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from pyinfra import host
from pyinfra.api import operation

from rig.catalog.entries import Kernel
from rig.facts.state import InstalledPackages, JsonFile, Lines
from rig.operations import apt, jobs
from rig.operations.common import Commands, note, notice, refuse, remember, remember_packages, script
from rigctl.contract import layout
from rigctl.contract.kernel_job import KernelJob
from rigctl.contract.order import ContractError

# The whole of sgl-kernel for one architecture takes 40 minutes on two cores.
LIMIT_SECONDS = 12 * 3600
DONE = ("installed", "wheel")


@operation()
def toolkit(packages: Sequence[str], keyring: Sequence[str]) -> Commands:
    """Packages of NVIDIA's repository that bring a CUDA toolkit. The repository is added where apt knows them not."""
    installed = host.get_fact(InstalledPackages, packages=list(packages))
    missing = sorted(set(packages).difference(installed))
    if not missing:
        host.noop(f"{len(packages)} packages of the toolkit are installed")
        return
    note(f"packages to install: {', '.join(missing)}")
    names = " ".join(map(shlex.quote, missing))
    known = f"apt-cache show {names} >/dev/null 2>&1"
    if len(keyring) != 2:
        yield from refuse(
            f"{', '.join(missing)} are to be installed, and host data driver_keyring names no repository for this "
            "system: add it, or set the kernel's mode to wheel"
        )
        return
    adding = "; ".join(apt.repository_added(keyring))
    yield from apt.work(
        f"{known} || {{ {adding}; }}",
        remember_packages(missing),
        f"{apt.INSTALL} {names} >/dev/null 8>&-",
    )


@operation()
def kernel(release: str, wanted: Kernel, path: str, digest: str, trees: Sequence[str]) -> Commands:
    """The kernel library of a release is what the catalogue says, proved by the code in it.

    Its state is `rigctl kernel status`: every file against the wheel in the store, whose digest covers all it is made
    from. path: of the order, written before this runs; a plan sees the one before. digest: of what is ordered. trees:
    directories that builds make.
    """
    status = f"{layout.RIGCTL} kernel status {shlex.quote(release)} --json"
    state = _state(host.get_fact(Lines, script=status))
    if state and _ordered(host.get_fact(JsonFile, path=path), path) != digest:
        state = {"state": "missing", "why": "its description changes"}
    if state.get("state") in DONE:
        host.noop(f"{wanted.package} of {release} is what it should be")
        return
    if state.get("state") == "replaced":
        notice(f"{release}: {state['why']}; it is installed again")
    note(f"{wanted.package} of {release}: {_what_happens(wanted, state)}")
    limits = [f"MemoryMax={wanted.memory_limit}", "OOMPolicy=continue"]
    share = ["Nice=15", "CPUWeight=20", "IOWeight=20"]
    yield script(*(f"[ -e {shlex.quote(path)} ] || {{ {remember('tree', path)}; }}" for path in trees))
    yield from jobs.run(
        jobs.LongJob(
            unit=f"kimi-job-kernel-{release}-{digest[:8]}",
            argv=[layout.RIGCTL, "kernel", "ensure", release],
            proof=f"{layout.RIGCTL} kernel status {shlex.quote(release)} >/dev/null",
            writes=None,
            network="any",
            watches=True,
            limit_seconds=LIMIT_SECONDS,
            properties=["EnvironmentFile=-/etc/environment", *limits, *share],
        )
    )


def _ordered(document: Any, path: str) -> str | None:
    """Digest of the order that is on the host, in whatever format; None where it is none."""
    try:
        return KernelJob.parse(document, path).digest
    except ContractError:
        return None


def _state(lines: list[str]) -> dict[str, Any]:
    """What rigctl said; nothing on a host that has none yet."""
    for line in lines:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


def _what_happens(wanted: Kernel, state: dict[str, Any]) -> str:
    if state.get("state") in ("built", "replaced"):
        return f"is installed from the store ({state['why']})"
    doing = "is built for this host's GPUs, proved and installed" if wanted.mode == "source" else "is proved"
    return f"{doing}{f' ({why})' if (why := state.get('why')) else ''}"
