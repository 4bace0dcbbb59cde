"""What a job is doing: counters that workers advance, a status file that readers poll, lines for people."""

import json
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rigctl.notification import notify
from rigctl.whole_files import write_json

WINDOW = 20.0  # seconds over which the rate is taken


def human_bytes(count: float) -> str:
    """Decimal units, as disks and the hub count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float | None) -> str:
    """Hours, minutes, seconds; '?' for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@dataclass
class Progress:
    """Counters of one job; thread-safe. `done` counts bytes that are right or at least on disk, `fetched`
    what came over the line in this run (so wasted bytes show)."""

    name: str
    total: int = 0
    files_total: int = 0
    done: int = 0
    fetched: int = 0
    files_done: int = 0
    phase: str = "plan"
    state: str = "running"
    message: str = ""
    retries: int = 0
    current: dict[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    _samples: deque[tuple[float, int]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, count: int, *, fetched: bool = True) -> None:
        """Count bytes that reached the disk; a negative count takes back a part that was dropped."""
        with self._lock:
            self.done += count
            if fetched and count > 0:
                self.fetched += count

    def file_starts(self, path: str, size: int) -> None:
        with self._lock:
            self.current[path] = size

    def file_ends(self, path: str, *, right: bool) -> None:
        with self._lock:
            self.current.pop(path, None)
            self.files_done += right

    def event(self, text: str, *, retry: bool = False) -> None:
        """Something a reader of the log should know: a retry, a dropped part, another mirror."""
        with self._lock:
            self.retries += retry
            self.events.append(text)

    def take_events(self) -> list[str]:
        with self._lock:
            taken, self.events = self.events, []
        return taken

    def rate(self) -> float:
        """Bytes a second over the last WINDOW seconds."""
        with self._lock:
            now = time.monotonic()
            self._samples.append((now, self.fetched))
            while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW:
                self._samples.popleft()
            (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def snapshot(self) -> dict[str, Any]:
        rate = self.rate()
        left = max(self.total - self.done, 0)
        with self._lock:
            return {
                "name": self.name,
                "pid": os.getpid(),
                "state": self.state,
                "phase": self.phase,
                "bytes_total": self.total,
                "bytes_done": self.done,
                "bytes_fetched": self.fetched,
                "files_total": self.files_total,
                "files_done": self.files_done,
                "rate": round(rate),
                "remaining_seconds": round(left / rate) if rate > 0 else None,
                "files": sorted(self.current),
                "retries": self.retries,
                "started": round(self.started, 1),
                "updated": round(time.time(), 1),
                "message": self.message,
            }


def line(status: dict[str, Any]) -> str:
    """One line for people: bytes, share, rate, remaining, current file."""
    total, done = status["bytes_total"], human_bytes(status["bytes_done"])
    if total:
        done = f"{done} of {human_bytes(total)} ({100 * status['bytes_done'] / total:.1f} %)"
    left = human_seconds(status["remaining_seconds"])
    files = status["files"]
    more = f" (+{len(files) - 1})" if len(files) > 1 else ""
    return (
        f"{status['name']}: {status['phase']} {done}, {human_bytes(status['rate'])}/s, {left} left, "
        f"{status['files_done']}/{status['files_total']} files" + (f", {files[0]}{more}" if files else "")
    )


class Reporter:
    """Writes the status file every second and a line every `every` seconds while the job runs."""

    def __init__(
        self, progress: Progress, place: Path, *, as_json: bool, every: float, out: TextIO | None = None
    ) -> None:
        self.progress = progress
        self._place = place
        self._json = as_json
        self._every = every
        self._out = out or (sys.stdout if as_json else sys.stderr)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> "Reporter":
        self._write(self.progress.snapshot())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        status = self.progress.snapshot()
        self._events()
        self._print(status)
        self._write(status)

    def _run(self) -> None:
        printed = time.monotonic()
        while not self._stop.wait(1.0 if self._every > 1 else self._every):
            status = self.progress.snapshot()
            self._write(status)
            self._events()
            if time.monotonic() - printed >= self._every:
                printed = time.monotonic()
                self._print(status)

    def _write(self, status: dict[str, Any]) -> None:
        try:
            write_json(self._place, status, durable=False)
        except OSError as error:  # a full disk must not hide the job's own message
            print(f"status file {self._place} not written: {error}", file=sys.stderr)

    def _events(self) -> None:
        for text in self.progress.take_events():
            self._emit({"name": self.progress.name, "event": text}, f"{self.progress.name}: {text}")

    def _print(self, status: dict[str, Any]) -> None:
        self._emit(status, line(status))
        notify(f"STATUS={line(status)}")

    def _emit(self, content: dict[str, Any], text: str) -> None:
        print(json.dumps(content) if self._json else text, file=self._out, flush=True)
