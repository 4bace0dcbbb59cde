"""Building one wheel: a private copy of the source, CMake configured, ninja followed, the wheel proved.

A build that was killed goes on where it ended: its directory is named by the digest of its inputs, ninja keeps what is
whole, and ccache what any build has compiled. All of it is done as the builder (steps.py).
"""

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rigctl import builder
from rigctl.contract.kernel_job import KernelJob, SourceDirectory
from rigctl.errors import RigctlError
from rigctl.kernel import cubins, memory, requirements, source, store, toolchain
from rigctl.kernel.compile_job import STATE, Known, State
from rigctl.kernel.toolchain import Toolchain
from rigctl.own_process import own_process
from rigctl.whole_files import read_object, write_json

FORCE = Path(__file__).with_name("force.cmake")
STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
MADE = re.compile(r"Building \w+ object (\S+)|(?<= -o )(\S+)")
OBJECT = re.compile(r"Building \w+ object (\S+)|\s-c (\S+)")
CCACHE_SIZE = "20G"
# A job for each so many MiB of free memory, at most one a core; the launcher then sees to the large ones.
JOB_MIB = 2048
# Launchers that wait beside those that may run: among them is one that fits.
WAITING = 8
PEAKS, SECONDS = "peaks.json", "seconds.json"
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
    requirements.refuse(job, requirements.absent_trees(job))
    patches = sorted(job.patches.glob("*.patch")) if job.patches else []
    return Inputs(
        {
            "name": job.package,
            "source": source.identity(job, _memos(job)),
            "subdirectory": job.subdirectory,
            "patches": [store.sha256(path) for path in patches],
            "dependencies": {
                name: source.tree_digest(path, _memos(job) / f"{name.replace('/', '-')}.json")
                for name, path in sorted(requirements.trees(job).items())
            },
            "versions": dict(chain.versions),
            "architectures": cubins.wanted(job.architectures),
            "defines": dict(job.defines),
            "variables": dict(job.environment),
            "drop_targets": list(job.drop_targets),
            "technique": store.sha256(FORCE),
        }
    )


def known_memory(job: KernelJob, jobs: int) -> Known:
    """What is stated and was measured of the memory that files take, and what a build may take."""
    return Known(job.memory_mib, read_object(_memos(job) / PEAKS) or {}, memory.budget(job.memory_limit), jobs)


def _memos(job: KernelJob) -> Path:
    return job.root / "memos" / job.package


def work_directory(job: KernelJob, digest: str) -> Path:
    """Where the wheel of these inputs is built."""
    return job.root / "work" / job.package / digest


def forget(job: KernelJob, digest: str) -> None:
    """Remove a build's directory."""
    source.remove(work_directory(job, digest))


def prove(job: KernelJob, wheel: Path, chain: Toolchain, wanted: Sequence[str]) -> cubins.Cubins:
    """What its libraries hold. Raises RigctlError unless all of it is for the wanted architectures."""
    held = cubins.of_wheel(wheel, chain.cuobjdump)
    if reasons := list(cubins.objections(held, wanted, job.libraries, only=True)):
        raise RigctlError(
            f"{wheel.name} is not for {', '.join(wanted)} alone and is not installed: {'; '.join(reasons)}"
        )
    return held


@dataclass
class Outcome:
    """What one run of the build did. Memory in MiB, times in seconds."""

    code: int = 0
    peak: int = 0
    steps: int = 0
    ended: list[dict[str, Any]] = field(default_factory=list)
    """What the launcher noted of each file (compile_job.py)."""
    said: list[str] = field(default_factory=list)
    group_killed: bool = False
    """The kernel ended a process of the build for want of memory."""

    @property
    def killed(self) -> list[str]:
        """Files whose compiler was ended for want of memory."""
        found = [each["source"] for each in self.ended if each.get("killed")]
        if not found and self.code and self.group_killed:
            return self.failed or ["a process of the build"]
        return found

    @property
    def failed(self) -> list[str]:
        """Files that do not compile."""
        return [each["source"] for each in self.compiled if each["code"] and not each.get("killed")]

    @property
    def too_large(self) -> dict[str, int]:
        """Files that were not compiled -> MiB that they need."""
        return {each["source"]: each["too_large"] for each in self.ended if each.get("too_large")}

    @property
    def compiled(self) -> list[dict[str, Any]]:
        return [each for each in self.ended if not each.get("too_large")]


class Build:
    """One wheel's work directory and how it is filled."""

    def __init__(self, job: KernelJob, chain: Toolchain, inputs: Inputs) -> None:
        self.job, self.chain, self.inputs = job, chain, inputs
        self.work = work_directory(job, inputs.digest)
        self.source, self.build, self.out = (self.work / name for name in ("source", "build", "out"))
        self.log = self.work / "build.log"
        self.state = State(self.work / "state")
        self.limit = memory.budget(job.memory_limit)

    def run(self, jobs: int) -> tuple[Path, dict[str, Any]]:
        """Build and prove: the wheel, and what it took. Raises RigctlError; what was built so far stays for the next
        try."""
        try:
            return self._run(jobs)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._no_space()

    def _run(self, jobs: int) -> tuple[Path, dict[str, Any]]:
        started = time.time()
        self._prepare()
        found = len(whole_objects(self.build))
        if found:
            print(f"{self.job.package}: going on with {found} objects of an earlier build", flush=True)
        outcome, attempts = self._compile(jobs), 1
        if outcome.code and outcome.killed and not outcome.failed and not self._beyond(outcome):
            fewer = max(1, jobs // 2)
            print(f"{outcome.killed[0]} was killed for want of memory: once more, with {fewer} jobs", flush=True)
            outcome, attempts, jobs = self._compile(fewer), 2, fewer
        if outcome.code:
            self._fail(outcome)
        wheel = self._wheel()
        held = prove(self.job, wheel, self.chain, self.inputs.values["architectures"])
        if edited := self._edited():
            raise RigctlError(f"{', '.join(edited)} was edited while it was built; nothing was installed, deploy again")
        return wheel, {
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
            "system_packages": requirements.installed(self.job.system_packages),
        }

    def take(self) -> None:
        """A private copy of the source, patched, which may need a network. Raises RigctlError."""
        for other in self.work.parent.glob("*"):
            # One that was given up: ccache has what it compiled.
            if other != self.work:
                source.remove(other)
        self._room()
        if self.job.patches is not None and not (self.source / source.PATCHED).exists():
            source.remove(self.source)  # some patches may be applied already
        source.take(self.job, self.source, str(self.inputs.values["source"]), _memos(self.job))
        if self.job.patches is not None:
            source.apply_patches(self.job.patches, self.source)

    def _prepare(self) -> None:
        """The work directory with all that configuration reads. Raises RigctlError with what is missing."""
        self.take()
        shutil.rmtree(self.work / "tmp", ignore_errors=True)
        (self.work / "tmp").mkdir()
        requirements.refuse(self.job, requirements.undeclared(self.job, self.source))
        for name, dependency in self.job.dependencies.items():
            target = self._copy_of(name)
            if (dependency.private or dependency.nested) and not target.exists():
                source.copy(dependency.path, target, dependency.nested)

    def _copy_of(self, name: str) -> Path:
        return self.work / "dependencies" / name

    def _edited(self) -> list[str]:
        """Directories of the operator's that are others than those that were built."""
        now, then = gather(self.job, self.chain).values, self.inputs.values
        paths = requirements.trees(self.job)
        edited = [str(paths[name]) for name, was in then["dependencies"].items() if now["dependencies"][name] != was]
        if isinstance(self.job.source, SourceDirectory) and now["source"] != then["source"]:
            edited.append(str(self.job.source.path))
        return edited

    def configure(self) -> list[str]:
        """Configure without compiling; the source of every object that is yet to be made. Raises RigctlError."""
        builder.inside()
        self._prepare()
        command = self._command("-n")  # ninja's dry run: the installation of nothing fails after it
        done = subprocess.run(command, env=self._environment(1), capture_output=True, errors="replace", check=False)
        steps = [found[3] for line in done.stdout.splitlines() if (found := STEP.match(line))]
        if not steps:
            print("\n".join((done.stdout + done.stderr).splitlines()[-25:]), file=sys.stderr)
            raise RigctlError(f"{self.job.package}: it cannot be configured (above)")
        made = {found[1] or found[2] for step in steps if (found := MADE.search(step))}
        ninja: list[str | Path] = [self.chain.tools / "bin" / "ninja", "-C", self.build, "-t", "compdb"]
        listed = json.loads(subprocess.run(ninja, capture_output=True, errors="replace", check=True).stdout)
        return [
            str(self.build / each["file"])
            for each in listed
            if each["output"] in made and each["output"].endswith(".o")
        ]

    def seconds(self, files: Sequence[str]) -> list[float]:
        """Processor seconds of those files that an earlier build has measured."""
        measured = read_object(_memos(self.job) / SECONDS) or {}
        return [measured[name] for name in map(self._name, files) if name in measured]

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

    def _command(self, *ninja: str) -> list[str]:
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
            path = self._copy_of(name) if dependency.private or dependency.nested else dependency.path
            defines[f"FETCHCONTENT_SOURCE_DIR_{name.upper()}"] = str(path)
        command = [str(self.chain.tools / "bin" / "python"), "-m", "build", "--wheel", "--no-isolation"]
        command += ["--skip-dependency-check", f"--outdir={self.out}", f"--config-setting=build-dir={self.build}"]
        # A file that is killed, or needs too much, is no reason to leave the others: the launcher ends what is.
        command += [f"--config-setting=build.tool-args={';'.join(('-k0', *ninja))}"]
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
                "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs + WAITING if jobs > 1 else 1),
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
        before = _lines(self.state.log)
        self._learn(before)  # what a run that was killed has measured
        self.state.begin(known := known_memory(self.job, jobs))
        for name, need in known.beyond(known.named).items():
            print(f"{name} needs {need} MiB, the build may take {self.limit}: every other file is compiled", flush=True)
        killed_before = memory.killed()
        print(
            f"{self.job.package}: building with {jobs} jobs, {memory.available()} MiB free; log: {self.log}", flush=True
        )
        outcome = Outcome()
        try:
            self._follow(jobs, outcome, len(before))
        finally:
            outcome.ended = _lines(self.state.log)[len(before) :]
            outcome.group_killed = memory.killed() > killed_before
            self._learn(outcome.ended)
        return outcome

    def _follow(self, jobs: int, outcome: Outcome, before: int) -> None:
        builder.inside()
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
                self._read(process, log, outcome, before)
                outcome.code = process.wait()
            finally:
                # ninja gives each compiler a group of its own; they end with ninja.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                over.set()
                watcher.join()

    def _read(self, process: subprocess.Popen[str], log: Any, outcome: Outcome, before: int) -> None:
        """Show what ninja says. After a file that does not compile only the others' ends come: they are not shown."""
        began, failed = 0.0, False
        for line in process.stdout or []:
            log.write(line)
            log.flush()
            found = STEP.match(line)
            if failed and found:
                break
            if not found:
                outcome.said = [*outcome.said[-79:], line.rstrip()]
                continue
            ended = _lines(self.state.log)[before:]
            compiled = [each for each in ended if not each["code"]]
            if compiled and not began:
                began = time.monotonic() - compiled[0]["seconds"]
            outcome.steps = max(outcome.steps, int(found[2]))
            made = MADE.search(found[3])
            how = next((each for each in ended if made and each.get("object") == str(self.build / made[1])), None)
            if how is not None and how["code"]:
                reason = "was killed" if how.get("killed") else "is too large" if how.get("too_large") else "failed"
                failed = reason == "failed"
                print(f"[{found[1]}/{found[2]}] {_short(how['source'])} {reason}", flush=True)
                continue
            seconds = (time.monotonic() - began) / len(compiled) if began else None
            print(progress(int(found[1]), int(found[2]), seconds, found[3]), flush=True)
        log.writelines(process.stdout or [])

    def _watch(self, outcome: Outcome, over: threading.Event) -> None:
        while not over.wait(0.5):
            outcome.peak = max(outcome.peak, sum(each.now for each in self.state.running()))

    def _learn(self, ended: Sequence[Mapping[str, Any]]) -> None:
        """Keep what files took, MiB and processor seconds, for the next build and its plan."""
        for name, key in ((PEAKS, "need"), (SECONDS, "cpu")):
            path = _memos(self.job) / name
            fresh: dict[str, float] = {}
            for each in ended:
                if each.get("need"):
                    file = self._name(each["source"])
                    fresh[file] = max(each[key], fresh.get(file, 0))
            write_json(path, {**(read_object(path) or {}), **fresh}, durable=False)

    def _name(self, path: str) -> str:
        """A source file, the same in every work directory."""
        return str(Path(path).relative_to(self.source)) if Path(path).is_relative_to(self.source) else _short(path)

    def _beyond(self, outcome: Outcome) -> dict[str, int]:
        """Files that need more than the build may take -> MiB."""
        killed = {each["source"]: each["need"] for each in outcome.ended if each.get("killed")}
        return {name: need for name, need in (outcome.too_large | killed).items() if need > self.limit}

    def _no_space(self) -> NoReturn:
        raise RigctlError(
            f"{self.job.package}: no space left on the disk of {self.work}: make room and deploy again, the build goes "
            "on"
        )

    def _fail(self, outcome: Outcome) -> NoReturn:
        name, log = self.job.package, self.log
        if (beyond := self._beyond(outcome)) and not outcome.failed:
            needs = ", ".join(f"{_short(file)} ({need} MiB)" for file, need in sorted(beyond.items()))
            raise RigctlError(
                f"{name}: {needs} needs more than the {self.limit} MiB that a build may take here (memory_limit "
                f"{self.job.memory_limit}); all else is compiled: raise memory_limit in the release's kernel, add "
                f"memory, or take the wheel of another host by kernel_store; log: {log}"
            )
        if outcome.killed and not outcome.failed:
            took = max((each["peak"] for each in outcome.ended if each.get("killed")), default=0)
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


def progress(done: int, total: int, seconds: float | None, step: str) -> str:
    """One line for the journal: "[37/62] heavy.cu, about 12 min left". Pure.

    seconds: that one compiled file took so far, whole build by files; None before the first. What a cache answered
    says nothing of the rest.
    """
    found = OBJECT.search(step)
    what = Path(found[1] or found[2]).name.removesuffix(".o") if found else step[:60]
    if done == total or seconds is None:
        return f"[{done}/{total}] {what}"
    return f"[{done}/{total}] {what}, about {duration(seconds * (total - done))} left"


def duration(seconds: float) -> str:
    """ "12 min", or "70 s" below 90 seconds."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


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
