"""A wheel built in this process, without the sandbox, and put into the store. As a program: ORDER JOBS."""

from __future__ import annotations

import sys

from rigctl import builder
from rigctl.contract.kernel_job import KernelJob
from rigctl.kernel import build, commands, store, toolchain


def stored(job: KernelJob, jobs: int) -> store.Stored:
    """Build with the toolchain that is there. Raises RigctlError."""
    chain = toolchain.examine(job)
    inputs = build.gather(job, chain)
    wheel, figures = build.Build(job, chain, inputs).run(jobs)
    made = store.put(job, inputs.digest, wheel, {**figures, "inputs": inputs.values})
    build.forget(job, inputs.digest)
    return made


if __name__ == "__main__":
    builder.unconfined()
    wanted = commands.read_job(sys.argv[1])
    toolchain.provide(wanted)
    stored(wanted, int(sys.argv[2]))
