"""Building one wheel: a private copy of the source, CMake told what is wanted, ninja followed, the wheel proved.

A build that was killed goes on where it ended: its directory is named by the digest of its inputs, ninja keeps what is
whole, and ccache what any build has compiled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rigctl.contract.kernel_job import KernelJob
from rigctl.errors import RigctlError
from rigctl.kernel import cubins, memory, source, store, toolchain
from rigctl.kernel.compile_job import STATE, State
from rigctl.kernel.toolchain import Toolchain
from rigctl.own_process import own_process

FORCE = Path(__file__).with_name("force.cmake")
STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
OBJECT = re.compile(r"Building \w+ object (\S+)|\s-c (\S+)")
CCACHE_SIZE = "20G"
# A job for each so many MiB of free memory, at most one a core; the launcher then sees to the large ones.
JOB_MIB = 2048
SHARE_OF_CORES = 4


@dataclass(frozen=True)
class Inputs:
    """All that decides what a wheel is."""

    values: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps(self.values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def gather(job: KernelJob, chain: Toolchain) -> Inputs:
    """The inputs as they are now. Reads every file once, later only what changed."""
    memos = job.root / "memos" / job.package
    patches = sorted(job.patches.glob("*.patch")) if job.patches else []
    return Inputs(
        {
            "name": job.package,
            "source": source.identity(job, memos),
            "subdirectory": job.subdirectory,
            "patches": [store.sha256(path) for path in patches],
            "dependencies": {
                name: source.tree_digest(_dependency(job, name), memos / f"{name}.json")
                for name in sorted(job.dependencies)
            },
            "versions": dict(chain.versions),
            "architectures": cubins.wanted(job.architectures),
            "defines": dict(job.defines),
            "variables": dict(job.environment),
            "drop_targets": list(job.drop_targets),
            "technique": store.sha256(FORCE),
        }
    )


def _dependency(job: KernelJob, name: str) -> Path:
    path = job.dependencies[name].path
    if not path.is_dir():
        raise RigctlError(
            f"{path}: not there; it is dependency {name} of {job.package}: put its source there, or leave the "
            "dependency out of the release's kernel, and CMake fetches it"
        )
    return path


@dataclass
class Outcome:
    """What one run of the build did. Memory in MiB, times in seconds."""

    code: int = 0
    killed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    peak: int = 0
    steps: int = 0
    compiled: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Build:
    """One wheel's work directory and how it is filled."""

    def __init__(self, job: KernelJob, chain: Toolchain, inputs: Inputs) -> None:
        self.job, self.chain, self.inputs = job, chain, inputs
        self.work = job.root / "work" / job.package / inputs.digest
        self.source, self.build, self.out = (self.work / name for name in ("source", "build", "out"))
        self.log = self.work / "build.log"
        self.state = State(self.work / "state")
        self.peaks = job.root / "memos" / job.package / "peaks.json"

    def run(self, jobs: int) -> store.Stored:
        """Build, prove and store. Raises RigctlError; what was built so far stays for the next try."""
        try:
            return self._run(jobs)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._no_space()

    def _run(self, jobs: int) -> store.Stored:
        started = time.time()
        self._room()
        source.take(self.job, self.source, str(self.inputs.values["source"]))
        if self.job.patches is not None:
            source.apply_patches(self.job.patches, self.source)
        found = len(whole_objects(self.build))
        if found:
            print(f"{self.job.package}: going on with {found} objects of an earlier build", flush=True)
        outcome, attempts = self._compile(jobs), 1
        if outcome.code and outcome.killed:
            fewer = max(1, jobs // 2)
            print(f"{outcome.killed[0]} was killed for want of memory: once more, with {fewer} jobs", flush=True)
            outcome, attempts, jobs = self._compile(fewer), 2, fewer
        if outcome.code:
            self._fail(outcome)
        wheel = self._wheel()
        held = self.prove(wheel)
        then, memos = str(self.inputs.values["source"]), self.job.root / "memos" / self.job.package
        if edited := source.edited_since(self.job, then, memos):
            raise RigctlError(f"{edited} was edited while it was built; nothing was installed, deploy again")
        receipt = {
            "name": self.job.package,
            "inputs": self.inputs.values,
            "cubins": held,
            "seconds": round(time.time() - started, 1),
            "cpu_seconds": round(sum(each["cpu"] for each in outcome.compiled), 1),
            "peak_mib": outcome.peak,
            "largest": _largest(outcome.compiled),
            "jobs": jobs,
            "attempts": attempts,
            "steps": outcome.steps,
            "compiled": len(outcome.compiled),
            "objects_before": found,
            "host": socket.gethostname(),
            "at": int(time.time()),
        }
        stored = store.put(self.job, self.inputs.digest, wheel, receipt)
        shutil.rmtree(self.work, ignore_errors=True)
        return stored

    def prove(self, wheel: Path) -> cubins.Cubins:
        """What its libraries hold. Raises RigctlError unless all of it is for the wanted architectures."""
        held = cubins.of_wheel(wheel, self.chain.cuobjdump)
        wanted = self.inputs.values["architectures"]
        if reasons := list(cubins.objections(held, wanted, self.job.libraries, only=True)):
            raise RigctlError(
                f"{wheel.name} is not for {', '.join(wanted)} alone and is not installed: {'; '.join(reasons)}"
            )
        return held

    def _room(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.work).free // memory.MIB
        if free < self.job.minimum_disk_mib:
            raise RigctlError(f"{self.work}: {free} MiB free, a build takes {self.job.minimum_disk_mib}: make room")

    def _wheel(self) -> Path:
        wheels = list(self.out.glob("*.whl"))
        if len(wheels) != 1:
            raise RigctlError(f"{self.out}: {len(wheels)} wheels, expected one; see {self.log}")
        return wheels[0]

    def _command(self) -> list[str]:
        architectures = ";".join(f"{each}-real" for each in self.inputs.values["architectures"])
        launcher = shutil.which("ccache") or str(self._launcher())
        defines = {
            **self.job.defines,
            "CMAKE_PROJECT_INCLUDE": str(FORCE),
            "KIMI_RIG_ARCHITECTURES": architectures,
            "KIMI_RIG_DROP": ";".join(self.job.drop_targets),
            "CMAKE_CUDA_COMPILER_LAUNCHER": launcher,
            "CMAKE_CXX_COMPILER_LAUNCHER": launcher,
            "CMAKE_C_COMPILER_LAUNCHER": launcher,
        }
        for name, dependency in self.job.dependencies.items():
            path = _dependency(self.job, name)
            if dependency.private:
                path = self.work / "dependencies" / name
                if not path.exists():
                    source.copy(dependency.path, path)
            defines[f"FETCHCONTENT_SOURCE_DIR_{name.upper()}"] = str(path)
        command = [str(self.chain.tools / "bin" / "python"), "-m", "build", "--wheel", "--no-isolation"]
        command += ["--skip-dependency-check", f"--outdir={self.out}", f"--config-setting=build-dir={self.build}"]
        command += [f"--config-setting=cmake.define.{name}={value}" for name, value in defines.items()]
        return [*command, str(self.source / self.job.subdirectory)]

    def _launcher(self) -> Path:
        """A program of one name, which ccache and CMake take; runs compile_job."""
        path = self.state.root / "launch"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(own_process("rigctl.kernel.compile_job"))} "$@"\n')
        path.chmod(0o755)
        return path

    def _environment(self, jobs: int) -> dict[str, str]:
        versions = json.dumps(self.inputs.values["versions"], sort_keys=True)
        return toolchain.build_environment(
            self.chain,
            self.job,
            jobs,
            {
                STATE: str(self.state.root),
                "TMPDIR": str(self.work / "tmp"),
                "CCACHE_DIR": str(self.job.root / "ccache"),
                "CCACHE_MAXSIZE": CCACHE_SIZE,
                "CCACHE_PREFIX": str(self._launcher()),
                # Another work directory is no other input; the compilers are known by their versions.
                "CCACHE_BASEDIR": str(self.work),
                "CCACHE_NOHASHDIR": "1",
                "CCACHE_COMPILERCHECK": f"string:{versions}",
            },
        )

    def _compile(self, jobs: int) -> Outcome:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.rmtree(self.work / "tmp", ignore_errors=True)
        (self.work / "tmp").mkdir()
        shutil.rmtree(self.state.jobs, ignore_errors=True)
        self.state.jobs.mkdir()
        needs = {**self.job.memory_mib, **_merge_peaks(self._known_peaks(), self.job.memory_mib)}
        (self.state.root / "needs.json").write_text(json.dumps(needs))
        before = _lines(self.state.log)
        killed_before = memory.killed()
        print(
            f"{self.job.package}: building with {jobs} jobs, {memory.available()} MiB free; log: {self.log}", flush=True
        )
        outcome = self._follow(jobs)
        outcome.compiled = _lines(self.state.log)[len(before) :]
        outcome.failed = [each["source"] for each in outcome.compiled if each["code"]]
        outcome.killed = [each["source"] for each in outcome.compiled if each["killed"]]
        if outcome.code and not outcome.killed and memory.killed() > killed_before:
            outcome.killed = outcome.failed or ["a process of the build"]
        self._learn(outcome)
        return outcome

    def _follow(self, jobs: int) -> Outcome:
        outcome = Outcome()
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(outcome, over), daemon=True)
        with self.log.open("a") as log:
            log.write(f"# {time.strftime('%F %T')} {shlex.join(self._command())}\n")
            log.flush()
            process = subprocess.Popen(
                self._command(),
                env=self._environment(jobs),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            watcher.start()
            try:
                self._read(process, log, outcome)
                outcome.code = process.wait()
            finally:
                # ninja gives each compiler a group of its own; they end with ninja.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                over.set()
                watcher.join()
        return outcome

    def _read(self, process: subprocess.Popen[str], log: Any, outcome: Outcome) -> None:
        began: float | None = None
        for line in process.stdout or []:
            log.write(line)
            log.flush()
            found = STEP.match(line)
            if not found:
                outcome.said = [*outcome.said[-79:], line.rstrip()]
                continue
            done, total = int(found[1]), int(found[2])
            began = began or time.monotonic()
            outcome.steps = max(outcome.steps, total)
            print(progress(done, total, time.monotonic() - began, found[3]), flush=True)

    def _watch(self, outcome: Outcome, over: threading.Event) -> None:
        while not over.wait(0.5):
            outcome.peak = max(outcome.peak, sum(each.now for each in self.state.running()))

    def _known_peaks(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(self.peaks.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _learn(self, outcome: Outcome) -> None:
        """Keep what files took: the next build knows, and a file that was killed counts half as much again."""
        peaks = self._known_peaks()
        for each in outcome.compiled:
            name = Path(each["source"]).name
            took = each["peak"] * 3 // 2 if each["killed"] else each["peak"]
            peaks[name] = max(took, peaks.get(name, 0)) if each["killed"] else max(each["peak"], 1)
        self.peaks.parent.mkdir(parents=True, exist_ok=True)
        self.peaks.write_text(json.dumps(peaks, sort_keys=True))

    def _no_space(self) -> NoReturn:
        raise RigctlError(
            f"{self.job.package}: no space left on the disk of {self.work}: make room and deploy again, the build goes "
            "on"
        )

    def _fail(self, outcome: Outcome) -> NoReturn:
        name, log = self.job.package, self.log
        if outcome.killed:
            took = max((each["peak"] for each in outcome.compiled if each["killed"]), default=0)
            raise RigctlError(
                f"{name}: {_short(outcome.killed[0])} was killed for want of memory twice (it held {took} MiB, "
                f"{memory.available()} MiB are free now): stop what takes the host's memory, or add swap; log: {log}"
            )
        print("\n".join(outcome.said[-25:]), flush=True)
        if "No space left on device" in "\n".join(outcome.said):
            self._no_space()
        if outcome.failed:
            raise RigctlError(f"{name}: {_short(outcome.failed[0])} does not compile (above); log: {log}")
        raise RigctlError(f"{name}: the build failed with exit code {outcome.code} (above); log: {log}")


def whole_objects(folder: Path) -> set[str]:
    """Object files that ninja has noted as made: their names below a build directory."""
    log = folder / ".ninja_log"
    # Start, end, time of the file, name, hash of the command; its first line is a comment.
    lines = log.read_text().splitlines() if log.exists() else []
    named = {fields[3] for line in lines if len(fields := line.split("\t")) == 5 and fields[3].endswith(".o")}
    return {name for name in named if (folder / name).exists()}


def jobs_for(job: KernelJob, cores: int, free: int, *, serving: bool) -> int:
    """How many compilers at once: by free memory (MiB) and cores; a quarter of the cores beside a serving engine."""
    usable = max(1, cores // SHARE_OF_CORES) if serving else cores
    return max(1, min(job.jobs or usable, usable, free // JOB_MIB))


def progress(done: int, total: int, seconds: float, step: str) -> str:
    """One line for the journal: "[37/62] heavy.cu, about 12 min left". seconds: since the first step began. Pure."""
    found = OBJECT.search(step)
    what = Path(found[1] or found[2]).name.removesuffix(".o") if found else step[:60]
    left = seconds / done * (total - done) if done else 0.0
    if done == total or seconds < 5:
        return f"[{done}/{total}] {what}"
    time_left = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"[{done}/{total}] {what}, about {time_left} left"


def _merge_peaks(measured: Mapping[str, int], stated: Mapping[str, int]) -> dict[str, int]:
    """What files were measured to take; where data states more, that."""
    return {name: max(took, stated.get(name, 0)) for name, took in measured.items()}


def _lines(log: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    except FileNotFoundError:
        return []


def _largest(compiled: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The five files that took the most memory: MiB and processor seconds."""
    ordered = sorted(compiled, key=lambda each: -int(each["peak"]))[:5]
    return {_short(str(each["source"])): {"mib": each["peak"], "cpu": each["cpu"]} for each in ordered}


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-3:])


def cores() -> int:
    """Processors that we may use."""
    return len(os.sched_getaffinity(0))
