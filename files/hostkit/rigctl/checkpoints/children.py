"""Child processes that fetch or make files: their growth is counted, a stopped job ends them."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from threading import Event

from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.verify import Cancelled


def follow(  # noqa: PLR0913 what a watched child needs
    command: Sequence[str],
    size: Callable[[], int],
    progress: Progress,
    stop: Event,
    *,
    given: bytes = b"",
    stall: float | None = None,
    variables: dict[str, str] | None = None,
) -> tuple[int, list[str], int]:
    """(exit code, lines of its errors, bytes it added). Raises Cancelled when the job is stopped.

    size: bytes that it has written so far. given: its input. stall: seconds without a byte after which it is ended.
    """
    before = counted = size()
    moved = time.monotonic()
    with tempfile.TemporaryFile() as errors, os.fdopen(os.memfd_create("input"), "w+b") as words:
        words.write(given)
        words.seek(0)
        child = subprocess.Popen(
            command,
            stdin=words,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )
        stalled = False
        try:
            while child.poll() is None and not stalled:
                stopped = stop.wait(0.2)
                grown = size()
                if grown > counted:
                    moved = time.monotonic()
                progress.advance(grown - counted)
                counted = grown
                if stopped:
                    raise Cancelled
                stalled = stall is not None and time.monotonic() - moved > stall
            progress.advance(size() - counted)
        finally:
            if child.poll() is None:
                child.kill() if stalled else child.terminate()
            child.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if stalled:
        lines = [f"no byte for {stall:.0f} s"]
    return child.returncode, lines or [f"exit code {child.returncode}"], size() - before
