"""Kernel wheels: what the catalogue says of them, as the specification that `rigctl kernel` works from. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from rig.catalog.entries import ROOT, Kernel
from rig.catalog.yaml_source import CatalogError
from rig.plan.host_plan import Environment, HostPlan, canonical_digest
from rigctl.contract import layout


def kernels(plan: HostPlan) -> dict[str, tuple[Environment, Kernel]]:
    """The releases of a host that have a kernel library of their own, with it."""
    return {name: (env, env.release.kernel) for name, env in plan.environments.items() if env.release.kernel}


def root(plan: HostPlan) -> str:
    """Store, work directories and compiler cache of builds."""
    return f"{plan.data.ml_env}/kernels"


def toolchains(plan: HostPlan) -> str:
    """Environments of tools and toolkits."""
    return f"{plan.data.ml_env}/toolchain"


def toolchain_lock(env: Environment, kernel: Kernel) -> Path:
    """The lock file of a kernel's tools, in this repository. Raises CatalogError where there is none."""
    path = ROOT / kernel.toolchain.lock.format(python=env.python.replace(".", ""))
    if not path.is_file():
        raise CatalogError(f"{path.relative_to(ROOT)} does not exist; `make lock` writes it")
    return path


def toolchain_path(plan: HostPlan, env: Environment, kernel: Kernel) -> str:
    """Where the tools' environment is: named by its lock, so that releases share it."""
    lock = toolchain_lock(env, kernel)
    return f"{toolchains(plan)}/{lock.stem}-{sha256(lock.read_bytes()).hexdigest()[:12]}"


def toolkit(plan: HostPlan, release: str) -> str | None:
    """CUDA_HOME of an engine that compiles while it serves; None for a release without a kernel library of its own."""
    env = plan.environments[release]
    if env.release.kernel is None:
        return None
    return f"{toolchain_path(plan, env, env.release.kernel)}/cuda-{env.name}-{env.path.rpartition('/')[2]}"


def specification(plan: HostPlan, name: str) -> dict[str, Any]:
    """What `rigctl kernel` needs of one release (files/hostkit/rigctl/kernel/spec.py)."""
    env, kernel = kernels(plan)[name]
    return {
        "name": kernel.package,
        "mode": kernel.mode,
        "environment": env.path,
        "python": env.python,
        "lock": env.lock_on_host,
        "series": env.series_on_host,
        "package": kernel.package,
        "module": kernel.module,
        "libraries": kernel.libraries,
        "toolchain": {
            "path": toolchain_path(plan, env, kernel),
            "lock": f"{layout.LOCKS}/{toolchain_lock(env, kernel).name}",
            "cuda_home": kernel.toolchain.cuda_home,
        },
        "root": root(plan),
        "source": kernel.source.model_dump() if kernel.source else None,
        "subdirectory": kernel.subdirectory,
        "patches": patches_on_host(name) if kernel.patches else None,
        "architectures": kernel.architectures,
        "minimum_cuda": kernel.minimum_cuda,
        "defines": kernel.defines,
        "variables": kernel.environment,
        "drop_targets": kernel.drop_targets,
        "dependencies": {key: each.model_dump() for key, each in kernel.dependencies.items()},
        "memory": kernel.memory_mib,
        "jobs": kernel.jobs,
        "while_serving": kernel.while_serving,
        "shared": plan.data.kernel_store,
        "minimum_disk": kernel.minimum_disk_mib,
        "wheels": plan.data.wheels,
    }


def patches_on_host(release: str) -> str:
    return f"{layout.PATCHES}/kernel-{release}"


def specification_path(release: str) -> str:
    return f"{layout.KERNELS}/{release}.json"


def specification_digest(plan: HostPlan, release: str) -> str:
    """Digest of a specification."""
    return canonical_digest(specification(plan, release))


def kernel_files(plan: HostPlan) -> Mapping[str, bytes]:
    """Path on the host -> content: specifications, locks of tools, patches of the source."""
    files: dict[str, bytes] = {}
    for name, (env, kernel) in kernels(plan).items():
        text = json.dumps(specification(plan, name), indent=2, sort_keys=True) + "\n"
        files[specification_path(name)] = text.encode()
        lock = toolchain_lock(env, kernel)
        files[f"{layout.LOCKS}/{lock.name}"] = lock.read_bytes()
        for patch in sorted((ROOT / kernel.patches).glob("*.patch")) if kernel.patches else []:
            files[f"{patches_on_host(name)}/{patch.name}"] = patch.read_bytes()
    return files
