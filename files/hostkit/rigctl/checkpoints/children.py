"""Child processes that send or make files; a stopped job ends them."""

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from threading import Event
from typing import IO

from rigctl.checkpoints.http import ENDLESS, LISTING_BYTES
from rigctl.checkpoints.sink import BLOCK, Sink, SourceWrong
from rigctl.checkpoints.verify import Cancelled

LAST_BYTES = 1 << 16  # of a child's errors
MOST_ERRORS = 256 << 20  # bytes, in a temporary file
BEGINNING = 120.0  # seconds more until the first byte: a login on a busy host, the start of a program


def run(
    command: Sequence[str],
    stop: Event,
    sink: Sink | bytearray | None = None,
    *,
    given: bytes = b"",
    stall: float = 24 * 3600,
) -> tuple[int, str]:
    """(exit code, last line of its errors); what it writes to its output is added to the sink.

    sink: a bytearray takes a list of files. given: its input. stall: seconds without a byte after which it is ended.
    Raises Cancelled when the job is stopped, SourceWrong for a list or errors without end, and what `Sink.write` does.
    """
    with tempfile.TemporaryFile() as errors, os.fdopen(os.memfd_create("input"), "w+b") as words:
        words.write(given)
        words.seek(0)
        with subprocess.Popen(
            command, stdin=words, stdout=subprocess.PIPE, stderr=errors, bufsize=0, start_new_session=True
        ) as child:
            try:
                stalled = child.stdout is not None and not _taken(child.stdout, errors, stop, sink, stall)
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
            if stalled:
                os.killpg(child.pid, signal.SIGKILL)
        errors.seek(max(0, os.fstat(errors.fileno()).st_size - LAST_BYTES))
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if stalled:
        lines = [f"no byte for {stall:.0f} s"]
    return child.returncode, lines[-1] if lines else f"exit code {child.returncode}"


def _taken(output: IO[bytes], errors: IO[bytes], stop: Event, sink: Sink | bytearray | None, stall: float) -> bool:
    """Whether the output came to its end, not to a halt."""
    moved = time.monotonic() + BEGINNING
    while time.monotonic() - moved < stall:
        if stop.is_set():
            raise Cancelled
        listed = len(sink) if isinstance(sink, bytearray) else 0
        if listed > LISTING_BYTES or os.fstat(errors.fileno()).st_size > MOST_ERRORS:
            raise SourceWrong(ENDLESS)
        if select.select([output], [], [], 0.2)[0]:
            block = output.read(sink.limiter.block() if isinstance(sink, Sink) else BLOCK)
            if not block:
                return True
            if isinstance(sink, Sink):
                sink.write(block)
            elif sink is not None:
                sink += block
            moved = time.monotonic()
    return False
