"""`rigctl kernel plan`: what a build would lack, compile, take and cost, before anything is built."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rigctl.contract.kernel_job import GitSource, KernelJob
from rigctl.errors import RigctlError
from rigctl.kernel import build, memory, requirements, source, store, toolchain
from rigctl.kernel.compile_job import Known

# A file that includes torch's headers and little else: for those that no build has measured yet.
UNMEASURED_SECONDS = 60.0


@dataclass
class Forecast:
    """Memory in MiB. files: to be compiled; None before the toolchain is there. measured: those with a known time."""

    limit: int
    free: int
    jobs: int
    missing: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    """Dependencies that CMake would fetch from the network."""
    beyond: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    stored: bool = False
    files: int | None = None
    measured: int = 0
    seconds: float | None = None
    """Of wall time, with all jobs."""

    def note(self, known: Known, files: Sequence[str]) -> None:
        """The memory that these files take, as far as it is known."""
        needs = sorted(((_short(file), known.need(file)) for file in files), key=lambda each: -each[1])
        self.largest, self.beyond = dict(needs[:5]), {_short(file): need for file, need in known.beyond(files).items()}

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from (f"missing: {each}" for each in self.missing)
        if self.fetched:
            yield f"fetched by CMake, unless they are given in dependencies: {', '.join(self.fetched)}"
        if self.stored:
            yield "its wheel is in the store: nothing is compiled"
            return
        known = ", ".join(f"{name} {need}" for name, need in self.largest.items()) or "nothing is known of any file"
        yield f"memory (MiB): a build may take {self.limit}, {self.free} are free; {known}"
        yield from (f"too large: {name} needs {need} MiB: raise memory_limit" for name, need in self.beyond.items())
        if self.files is None or self.seconds is None:
            yield "files and time: known once nothing is missing and the toolchain is there (--configure makes it)"
            return
        yield (
            f"files: {self.files} to compile, at most {self.jobs} at once; about {build.duration(self.seconds)} "
            f"({self.measured} of them measured by an earlier build, {UNMEASURED_SECONDS:.0f} s each for the others)"
        )


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def forecast(job: KernelJob, *, serving: bool) -> Forecast:
    """Look, and configure where the toolchain is there. As the builder."""
    free = memory.available()
    jobs = build.jobs_for(job, build.cores(), free, serving=serving)
    known = build.known_memory(job, jobs)
    found = Forecast(known.limit, free, jobs)
    found.note(known, known.named)
    found.missing += requirements.missing(job)
    with _tree(job, found) as tree:
        if tree is not None:
            if isinstance(job.source, GitSource):
                found.missing += requirements.undeclared(job, tree)
            found.fetched = list(requirements.fetched(job, tree))
    if not found.missing:
        try:
            _configure(job, found, known)
        except RigctlError as error:
            found.missing.append(str(error))
    return found


@contextlib.contextmanager
def _tree(job: KernelJob, found: Forecast) -> Iterator[Path | None]:
    """The source, to be read: the operator's directory, or a checkout for the time being."""
    if not isinstance(job.source, GitSource):
        yield job.source.path if job.source and job.source.path.is_dir() else None
        return
    with tempfile.TemporaryDirectory(prefix="rigctl-plan-") as scratch:
        tree = Path(scratch) / "source"
        try:
            source.checkout(job.source, tree)
        except RigctlError as error:
            found.missing.append(str(error))
        yield tree if tree.exists() else None


def _configure(job: KernelJob, found: Forecast, known: Known) -> None:
    if not toolchain.ready(job):
        return
    chain = toolchain.examine(job)
    builder = build.Build(job, chain, build.gather(job, chain))
    found.stored = store.find(job, builder.inputs.digest) is not None
    if found.stored:
        return
    files = builder.configure()
    found.note(known, files)
    times = builder.seconds(files)
    found.files, found.measured = len(files), len(times)
    whole = sum(times) + UNMEASURED_SECONDS * (len(files) - len(times))
    found.seconds = max(whole / found.jobs, max(times, default=0.0))
