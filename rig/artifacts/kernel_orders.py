"""Kernel wheels: what the catalogue says of them, as the order that `rigctl kernel` works from. Pure."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from rig.artifacts.engine_inputs import engine
from rig.catalog.entries import ROOT, Kernel
from rig.catalog.yaml_source import CatalogError
from rig.plan.host_plan import Environment, HostPlan
from rigctl.contract import layout
from rigctl.contract.kernel_job import KernelJob, KernelLibrary, KernelTools


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


def kernel_job(plan: HostPlan, name: str) -> KernelJob:
    env, kernel = kernels(plan)[name]
    wheels = plan.data.wheels
    return KernelJob(
        **kernel.model_dump(include=set(KernelLibrary.model_fields)),
        engine=engine(env),
        toolchain=KernelTools(
            path=Path(toolchain_path(plan, env, kernel)),
            lock=Path(f"{layout.LOCKS}/{toolchain_lock(env, kernel).name}"),
            cuda_home=Path(kernel.toolchain.cuda_home) if kernel.toolchain.cuda_home else None,
        ),
        root=Path(root(plan)),
        patches=Path(patches_on_host(name)) if kernel.patches else None,
        kernel_store=plan.data.kernel_store,
        wheels=Path(wheels) if wheels else None,
    )


def patches_on_host(release: str) -> str:
    return f"{layout.PATCHES}/kernel-{release}"


def kernel_job_path(release: str) -> str:
    return f"{layout.KERNELS}/{release}.json"


def kernel_files(plan: HostPlan) -> Mapping[str, bytes]:
    """Path on the host -> content: orders, locks of tools, patches of the source."""
    files: dict[str, bytes] = {}
    for name, (env, kernel) in kernels(plan).items():
        files[kernel_job_path(name)] = kernel_job(plan, name).text().encode()
        lock = toolchain_lock(env, kernel)
        files[f"{layout.LOCKS}/{lock.name}"] = lock.read_bytes()
        for patch in sorted((ROOT / kernel.patches).glob("*.patch")) if kernel.patches else []:
            files[f"{patches_on_host(name)}/{patch.name}"] = patch.read_bytes()
    return files
