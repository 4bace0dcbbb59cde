"""The compiler launcher: holds a compiler back while too little memory is left, and notes what each one took.

Run by ccache (CCACHE_PREFIX) or by CMake (CMAKE_<LANG>_COMPILER_LAUNCHER) with the compiler's command line. ninja
starts more of them than there may be compilers: a job starts when what its file is known or said to need fits beside
what the others may still grow to, or when no other runs, so that small files are compiled beside a large one while
another large one waits.
"""

import contextlib
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rigctl.kernel import memory

STATE = "KIMI_RIG_COMPILE_STATE"
"""Environment variable: directory with known.json, jobs/, waiting/ and compiled.jsonl."""
POLL_SECONDS = 0.25
# Who has waited so long is passed by nobody.
PATIENCE_SECONDS = 300.0
DEFAULT_MIB = 3072
# Left over when jobs are admitted: linker, CMake, and a little error in what is known.
RESERVE_MIB = 512
SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c")


@dataclass(frozen=True)
class Running:
    """A compiler at work: what it may need and what it holds, MiB."""

    need: int
    now: int


@dataclass(frozen=True)
class Known:
    """What a build knows: MiB that files take, stated and measured; MiB that it may take as a whole; compilers."""

    stated: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    limit: int = sys.maxsize
    jobs: int = sys.maxsize

    @property
    def named(self) -> list[str]:
        """Files of which something is known."""
        return [name for name in (*self.stated, *self.measured) if name != "default"]

    def beyond(self, files: Iterable[str]) -> dict[str, int]:
        """Those that need more than the build may take -> MiB."""
        return {file: need for file in files if (need := self.need(file)) > self.limit}

    def need(self, source: str) -> int:
        """MiB that compiling `source` takes: the larger of what is stated and what was measured."""
        stated, measured = _by_path(self.stated, source), _by_path(self.measured, source)
        if measured is None:
            return stated or self.stated.get("default", DEFAULT_MIB)
        return max(measured, stated or 0)


def _by_path(values: Mapping[str, int], source: str) -> int | None:
    """The value of the longest path that `source` ends with."""
    found = [name for name in values if source == name or source.endswith(f"/{name}")]
    return values[max(found, key=len)] if found else None


def fits(need: int, running: Sequence[Running], available: int, jobs: int) -> bool:
    """Whether a job of `need` MiB may start beside those running. Pure."""
    growth = sum(max(0, each.need - each.now) for each in running)
    return not running or (len(running) < jobs and available - growth - RESERVE_MIB >= need)


def _gone(path: Path) -> bool:
    """Whether the process that a file is named after has ended; a killed one leaves its file, which goes now."""
    try:
        os.kill(int(path.name), 0)
    except (ProcessLookupError, PermissionError):  # the second: its number is another user's by now
        path.unlink(missing_ok=True)
        return True
    return False


class State:
    """The directory in which the jobs of one build know of each other."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "compiled.jsonl"
        self.jobs, self.waiting = root / "jobs", root / "waiting"
        self.failed = root / "failed"
        """There once a file did not compile: nothing more is started."""
        for each in (self.jobs, self.waiting):
            each.mkdir(parents=True, exist_ok=True)

    def begin(self, known: Known) -> None:
        """Forget the jobs of an earlier run."""
        shutil.rmtree(self.jobs)
        shutil.rmtree(self.waiting)
        self.failed.unlink(missing_ok=True)
        self.jobs.mkdir()
        self.waiting.mkdir()
        (self.root / "known.json").write_text(json.dumps(asdict(known)))

    def known(self) -> Known:
        """What the build knows; nothing where it wrote nothing."""
        try:
            return Known(**json.loads((self.root / "known.json").read_text()))
        except (OSError, ValueError):
            return Known()

    def running(self) -> list[Running]:
        """The jobs at work, measured now: what one of a compiler's programs gives back, the next one takes."""
        found = []
        for path in self.jobs.iterdir():
            try:
                need, compiler = map(int, path.read_text().split())
            except (OSError, ValueError):
                continue
            if not _gone(path):
                found.append(Running(need, memory.of_tree(compiler) if compiler else 0))
        return found

    def note(self, need: int, compiler: int) -> None:
        """What this job needs, and its compiler's process; 0 before there is one."""
        path = self.jobs / str(os.getpid())
        scratch = self.root / f".{path.name}"
        scratch.write_text(f"{need} {compiler}")
        scratch.replace(path)

    @contextlib.contextmanager
    def admitted(self, need: int, jobs: int) -> Iterator[None]:
        """Wait until the job fits and none that has waited for long is before it."""
        mine = self.waiting / str(os.getpid())
        mine.write_text(str(need))
        while not self._admit(need, jobs, mine):
            time.sleep(POLL_SECONDS)
        mine.unlink()
        try:
            yield
        finally:
            (self.jobs / mine.name).unlink(missing_ok=True)

    def _admit(self, need: int, jobs: int, mine: Path) -> bool:
        with (self.root / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            # First what is left, then who holds what: what a program frees in between counts for neither.
            available, running = memory.available(), self.running()
            if not fits(need, running, available, jobs):
                return False
            for earlier, since in self._before(mine):
                if since < time.time() - PATIENCE_SECONDS or fits(earlier, running, available, jobs):
                    return False
            self.note(need, 0)
            return True

    def _before(self, mine: Path) -> Iterator[tuple[int, float]]:
        """Those that wait for longer: what each needs, and since when it waits."""
        since = mine.stat().st_mtime_ns
        for path in self.waiting.iterdir():
            with contextlib.suppress(FileNotFoundError):  # just admitted
                status, need = path.stat(), path.read_text()
                if status.st_mtime_ns < since and not _gone(path):
                    yield int(need or 0), status.st_mtime


def main(argv: Sequence[str]) -> int:
    """Run the compiler; its exit code, 128 + n for one that a signal ended."""
    state_path = os.environ.get(STATE)
    source = next((word for word in argv if word.endswith(SOURCES)), None)
    if state_path is None or source is None or ("-c" not in argv and "--compile" not in argv):
        os.execvp(argv[0], list(argv))  # noqa: S606  # not a compilation
    state, source = State(Path(state_path)), os.path.abspath(source)  # noqa: PTH100  # links in it stay
    with contextlib.suppress(OSError):
        # The kernel takes a compiler first: the build lives on and reports what happened.
        Path("/proc/self/oom_score_adj").write_text("600")
    known = state.known()
    need = known.need(source)
    entry: dict[str, Any] = {"source": source}
    if "-o" in argv:
        entry["object"] = os.path.abspath(argv[argv.index("-o") + 1])  # noqa: PTH100  # the same
    if need > known.limit:
        print(f"{source} needs {need} MiB, the build may take {known.limit}: not compiled", file=sys.stderr)
        return _ended(state, {**entry, "code": 1, "too_large": need})
    begun = time.time()
    with state.admitted(need, known.jobs):
        if state.failed.exists():
            return 1
        started, killed_before = time.time(), memory.killed()
        code, peak, said, alone = _run(argv, state, need)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = max(peak, usage.ru_maxrss // 1024)
    killed = code != 0 and (code in (137, -9) or "signal 9" in said or "Killed" in said)
    if killed:
        # It wants more than it held. That it wants more than the build may take is known when it ran alone only.
        beyond = alone and memory.killed() > killed_before
        most = max(known.limit + 1, peak * 3 // 2) if beyond else min(known.limit, peak * 3 // 2)
        entry["need"] = max(need, most)
    elif code == 0:
        entry["need"] = max(peak, 1)
    entry["seconds"], entry["waited"] = round(time.time() - started, 2), round(started - begun, 2)
    entry["cpu"] = round(usage.ru_utime + usage.ru_stime, 2)
    return _ended(state, {**entry, "peak": peak, "code": code, "killed": killed, "alone": alone})


def _ended(state: State, entry: dict[str, Any]) -> int:
    """Note how a file ended; the exit code for it."""
    code: int = entry["code"]
    if code and not entry.get("killed") and not entry.get("too_large"):
        state.failed.touch()
    with state.log.open("a") as log:
        log.write(json.dumps(entry) + "\n")
    return 128 - code if code < 0 else code


def _run(argv: Sequence[str], state: State, need: int) -> tuple[int, int, str, bool]:
    """Exit code, peak in MiB, what it said on standard error (passed on), and whether no other compiler ran beside."""
    compiler = subprocess.Popen(argv, stderr=subprocess.PIPE)
    state.note(need, compiler.pid)
    said: list[bytes] = []

    def pass_on() -> None:
        for line in compiler.stderr or []:
            said.append(line)
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    peak, alone = 0, True
    while True:
        try:
            compiler.wait(POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, memory.of_tree(compiler.pid))
            alone = alone and len(list(state.jobs.iterdir())) == 1
    reader.join()
    return compiler.returncode, peak, b"".join(said[-50:]).decode(errors="replace"), alone


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
