"""The compiler launcher: holds a compiler back while too little memory is left, and notes what each one took.

Run by ccache (CCACHE_PREFIX) or by CMake (CMAKE_<LANG>_COMPILER_LAUNCHER) with the compiler's command line. Jobs
reserve what their file is known or said to need; a job starts when that fits beside what the others may still grow to,
or when no other runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rigctl.kernel import memory

STATE = "KIMI_RIG_COMPILE_STATE"
"""Environment variable: directory with needs.json, jobs/ and compiled.jsonl."""
POLL_SECONDS = 0.25
DEFAULT_MIB = 3072
# Left over when jobs are admitted: linker, CMake, and a little error in what is known.
RESERVE_MIB = 512
SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c")


@dataclass(frozen=True)
class Running:
    """A compiler at work: what it may need and what it holds, MiB."""

    need: int
    now: int


def need_of(source: str, needs: Mapping[str, int]) -> int:
    """MiB that compiling `source` is known to take: by the longest path in `needs` that it ends with."""
    known = [name for name in needs if source == name or source.endswith(f"/{name}")]
    return needs[max(known, key=len)] if known else needs.get("default", DEFAULT_MIB)


def fits(need: int, running: Sequence[Running], available: int) -> bool:
    """Whether a job of `need` MiB may start beside those running. Pure."""
    growth = sum(max(0, each.need - each.now) for each in running)
    return not running or available - growth - RESERVE_MIB >= need


class State:
    """The directory in which the jobs of one build know of each other."""

    def __init__(self, root: Path) -> None:
        self.root, self.jobs, self.log = root, root / "jobs", root / "compiled.jsonl"
        self.jobs.mkdir(parents=True, exist_ok=True)

    def needs(self) -> dict[str, int]:
        """Known needs by source; empty where none were written."""
        try:
            found: dict[str, int] = json.loads((self.root / "needs.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def running(self) -> list[Running]:
        """The jobs at work, measured now: what one of a compiler's programs gives back, the next one takes.

        A job that was killed leaves a file of a process that is gone.
        """
        found = []
        for path in self.jobs.iterdir():
            try:
                need, compiler = map(int, path.read_text().split())
                os.kill(int(path.name), 0)
            except ProcessLookupError:
                path.unlink(missing_ok=True)
            except (OSError, ValueError):
                continue
            else:
                found.append(Running(need, memory.of_tree(compiler) if compiler else 0))
        return found

    def note(self, need: int, compiler: int) -> None:
        """What this job needs, and its compiler's process; 0 before there is one."""
        path = self.jobs / str(os.getpid())
        scratch = self.root / f".{path.name}"
        scratch.write_text(f"{need} {compiler}")
        scratch.replace(path)

    @contextlib.contextmanager
    def admitted(self, need: int) -> Iterator[None]:
        """Wait until the job fits. One waits at a time, so that a large one is not passed by small ones for ever."""
        with (self.root / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            while True:
                # First what is left, then who holds what: what a program frees in between counts for neither.
                available = memory.available()
                if fits(need, self.running(), available):
                    break
                time.sleep(POLL_SECONDS)
            self.note(need, 0)
        try:
            yield
        finally:
            (self.jobs / str(os.getpid())).unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    """Run the compiler; its exit code, 128 + n for one that a signal ended."""
    state_path = os.environ.get(STATE)
    source = next((word for word in argv if word.endswith(SOURCES)), None)
    if state_path is None or source is None or ("-c" not in argv and "--compile" not in argv):
        os.execvp(argv[0], list(argv))  # noqa: S606  # not a compilation
    state = State(Path(state_path))
    with contextlib.suppress(OSError):
        # The kernel takes a compiler first: the build lives on and is told what happened.
        Path("/proc/self/oom_score_adj").write_text("600")
    need = need_of(source, state.needs())
    begun = time.time()
    with state.admitted(need):
        started = time.time()
        code, peak, said = _run(argv, state, need)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    entry = {
        "source": source,
        "seconds": round(time.time() - started, 2),
        "waited": round(started - begun, 2),
        "cpu": round(usage.ru_utime + usage.ru_stime, 2),
        "peak": max(peak, usage.ru_maxrss // 1024),
        "code": code,
        "killed": code != 0 and (code in (137, -9) or "signal 9" in said or "Killed" in said),
    }
    with state.log.open("a") as log:
        log.write(json.dumps(entry) + "\n")
    return 128 - code if code < 0 else code


def _run(argv: Sequence[str], state: State, need: int) -> tuple[int, int, str]:
    """Exit code, peak in MiB, and what it said on standard error (passed on)."""
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
    peak = 0
    while True:
        try:
            compiler.wait(POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, memory.of_tree(compiler.pid))
    reader.join()
    return compiler.returncode, peak, b"".join(said[-50:]).decode(errors="replace")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
