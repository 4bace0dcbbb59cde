"""What is done for a kernel library as the builder: everything that reads its source or runs what others wrote.

Root asks (`ask`), and this module answers in a process of the builder's: the order comes on standard input, progress
and at last one line with the answer go to standard output. What the builder answers is its own word: root takes nothing
on it but a wheel, as bytes, and figures to show.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, StringConstraints

from rigctl import builder
from rigctl.contract.kernel_job import GitSource, KernelJob
from rigctl.contract.order import Part
from rigctl.engines.installed import distributions, normalised, site_packages
from rigctl.errors import RigctlError
from rigctl.kernel import build, cubins, forecast, install, memory, requirements, toolchain
from rigctl.kernel.children import end_with_us
from rigctl.own_process import own_process

RESULT = "rigctl-result: "
ALONE = ("take", "build", "forecast", "forget")
"""Steps that work in the build's directory."""
DISCONNECTED = "FETCHCONTENT_FULLY_DISCONNECTED"


class Figures(Part):
    """What a build took; further keys are kept for the receipt."""

    model_config = ConfigDict(extra="allow")

    seconds: float
    compiled: int
    peak_mib: int


class Made(Part):
    """A build's answer: its wheel, in the directory of what it put out, and what it took."""

    wheel: Annotated[str, StringConstraints(pattern=r"^\w[\w.+!-]*\.whl$")]
    figures: Figures


class Gathered(Part):
    """All that decides what a wheel is."""

    values: dict[str, Any]


class Held(Part):
    """Which GPUs libraries are for."""

    libraries: cubins.Cubins


class Looked(Part):
    """What a build would take."""

    model_config = ConfigDict(strict=False)

    forecast: forecast.Forecast


class Reply(Part):
    """The last line of a step: its answer, or why there is none."""

    answer: Any = None
    error: str | None = None


def directories(job: KernelJob) -> list[Path]:
    """The builder's own for this library: work, what it remembers of files, the compiler cache. Made where missing."""
    names = (Path("work", job.package), Path("memos", job.package), Path("ccache"))
    return [builder.handed_over(job.root / name) for name in names]


def ask(job: KernelJob, step: str, given: Any = None, *, network: bool = False) -> Any:
    """The answer of a step; its progress is printed. given: what it needs besides the order. Raises RigctlError."""
    reads = [*requirements.trees(job).values(), job.engine.path, job.toolchain.path]
    if job.source is not None and not isinstance(job.source, GitSource):
        reads.append(job.source.path)
    writes = directories(job) if job.root.exists() else []
    code, said = builder.spoken(
        own_process("rigctl.kernel.steps", step),
        json.dumps({"order": job.document(), "given": given}),
        RESULT,
        # Only who has the library's lock may end a build that another process has left behind.
        unit=f"kernel-{job.package}" + ("" if step in ALONE else f"-{os.getpid()}"),
        writes=writes,
        reads=reads,
        network="any" if network else "none",
        environment={"TMPDIR": str(writes[0])} if writes else {},
        properties=[f"MemoryMax={job.memory_limit}", "Nice=15", "CPUWeight=20", "IOWeight=20"],
    )
    return _answer(code, said, f"{job.package}: {step}")


def _answer(code: int, said: str, what: str) -> Any:
    if not said.startswith(RESULT):
        raise RigctlError(f"{what} ended with exit code {code} and no answer (its last lines are above)")
    found = Reply.validated(_json(said.removeprefix(RESULT), what), f"the answer of {what}")
    if found.error is not None:
        raise RigctlError(found.error)
    return found.answer


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RigctlError(f"{what} answered with something else than JSON: {text[:100]!r}") from None


def inputs(job: KernelJob) -> build.Inputs:
    """All that decides what a wheel is, as it is now."""
    return build.Inputs(Gathered.validated({"values": ask(job, "inputs")}, f"inputs of {job.package}").values)


def looked(job: KernelJob, *, serving: bool) -> forecast.Forecast:
    """What a build would lack, compile and take."""
    answer = ask(job, "forecast", serving, network=isinstance(job.source, GitSource))
    return Looked.validated({"forecast": answer}, f"forecast of {job.package}").forecast


def held(job: KernelJob, step: Literal["prove", "stock"], wheel: Path | None = None) -> cubins.Cubins:
    """Which GPUs the libraries of a wheel are for, or those of the package in the environment. Raises RigctlError."""
    answer = ask(job, step, None if wheel is None else str(wheel))
    return Held.validated({"libraries": answer}, f"libraries of {job.package}").libraries


def made(job: KernelJob, wanted: build.Inputs, *, serving: bool) -> tuple[Path, Made]:
    """Build the wheel; where it lies, in the builder's directory, and what it took. Raises RigctlError."""
    # Whatever the source's own build does, it only gets a network where its CMake files need one.
    ask(job, "take", wanted.digest, network=isinstance(job.source, GitSource))
    connected = job.defines.get(DISCONNECTED, "").upper() not in requirements.TRUE
    given = {"digest": wanted.digest, "serving": serving}
    found = Made.validated(ask(job, "build", given, network=connected), f"the build of {job.package}")
    return build.work_directory(job, wanted.digest) / "out", found


# In the builder's process


def _missing(job: KernelJob, _: Any) -> list[str]:
    return list(requirements.missing(job))


def _inputs(job: KernelJob, _: Any) -> Mapping[str, Any]:
    return build.gather(job, toolchain.examine(job)).values


def _builder(job: KernelJob, digest: str) -> build.Build:
    chain = toolchain.examine(job)
    found = build.gather(job, chain)
    if found.digest != digest:
        raise RigctlError(f"{job.package}: its source was edited since it was looked at; deploy again")
    return build.Build(job, chain, found)


def _take(job: KernelJob, digest: str) -> None:
    _builder(job, digest).take()


def _build(job: KernelJob, given: Mapping[str, Any]) -> dict[str, Any]:
    jobs = build.jobs_for(job, build.cores(), memory.available(), serving=bool(given["serving"]))
    wheel, figures = _builder(job, str(given["digest"])).run(jobs)
    return {"wheel": wheel.name, "figures": figures}


def _forecast(job: KernelJob, serving: bool) -> dict[str, Any]:
    return asdict(forecast.forecast(job, serving=serving))


def _prove(job: KernelJob, wheel: str) -> cubins.Cubins:
    """What a wheel holds, which must be for the wanted architectures alone."""
    chain = toolchain.examine(job)
    return build.prove(job, Path(wheel), chain, cubins.wanted(job.architectures))


def _stock(job: KernelJob, _: Any) -> cubins.Cubins:
    """What the libraries of the package in the environment hold."""
    site = site_packages(job.engine.path)
    [package] = [each for each in distributions(site) if each.name == normalised(job.package)]
    paths = [path for path, _ in package.record()]
    return cubins.of_tree(site, toolchain.cuda_root(job) / "bin" / "cuobjdump", paths)


def _try(job: KernelJob, wheel: str) -> None:
    install.try_import(job, Path(wheel))


def _forget(job: KernelJob, digest: str) -> None:
    build.forget(job, digest)


STEPS: Mapping[str, Callable[[KernelJob, Any], Any]] = {
    "missing": _missing,
    "inputs": _inputs,
    "take": _take,
    "build": _build,
    "forecast": _forecast,
    "prove": _prove,
    "stock": _stock,
    "try": _try,
    "forget": _forget,
}


def main() -> int:
    """Do a step of the order on standard input; exit code 1 where it cannot be done."""
    builder.inside()
    request = json.load(sys.stdin)
    with end_with_us():
        try:
            content = {"answer": STEPS[sys.argv[1]](KernelJob.parse(request["order"], "the order"), request["given"])}
        except RigctlError as error:
            content = {"error": str(error)}
        except OSError as error:  # such as a full disk, or a file that the builder cannot read
            content = {"error": f"{error.filename}: {error.strerror}" if error.filename else str(error)}
    print(RESULT + json.dumps(content), flush=True)
    return 1 if "error" in content else 0


if __name__ == "__main__":
    raise SystemExit(main())
