"""Kernel libraries: those of the host's releases, for its GPUs, proved and put last into their environments."""

from pyinfra.api import deploy

from rig.artifacts.kernel_orders import (
    kernel_files,
    kernel_job,
    kernel_job_path,
    kernels,
    root,
    toolchains,
)
from rig.operations.files import File, present
from rig.operations.kernel_wheels import kernel, toolkit
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan


def described(plan: HostPlan) -> None:
    """The orders, and what they name: enough for `rigctl kernel plan`."""
    files = [File(path, content) for path, content in kernel_files(plan).items()]
    present(name="Describe kernel libraries", entries=files)


@deploy("Kernel libraries")
def sgl_kernel(plan: HostPlan) -> None:
    mine = kernels(plan)
    if not mine:
        return
    described(plan)
    packages = sorted({package for _, each in mine.values() for package in each.toolchain.packages})
    if packages:
        toolkit(
            name="Install CUDA toolkits",
            packages=packages,
            keyring=plan.data.driver_keyring.get(plan.distribution, []),
        )
    for name, (_, wanted) in mine.items():
        kernel(
            name=f"Build or prove {wanted.package} of {name}",
            release=name,
            wanted=wanted,
            path=kernel_job_path(name),
            digest=kernel_job(plan, name).digest,
            trees=[root(plan), toolchains(plan)],
        )


if __name__ == "builtins":
    sgl_kernel(plan=current_plan())
