"""While a benchmark measures a configuration, its supervisor asks nothing: a question would be counted with the rest.

A mark in the unit's runtime directory says so, and only for as long as the benchmark renews it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rigctl.supervisor.specification import Specification

RENEWED_SECONDS = 5
VALID_SECONDS = 30


def mark(specification: Specification) -> Path:
    """Where a benchmark of this configuration leaves its mark."""
    return specification.runtime / "measured"


def is_measured(specification: Specification) -> bool:
    """True while a benchmark renews the mark; a mark that was left behind says nothing."""
    try:
        age = time.time() - mark(specification).stat().st_mtime
    except OSError:
        return False
    return abs(age) < VALID_SECONDS


@contextlib.contextmanager
def undisturbed(specification: Specification) -> Iterator[None]:
    """Keep the mark while the block runs; where it cannot be kept, the report says that tokens do not add up."""
    path, ended = mark(specification), threading.Event()

    def renew() -> None:
        while not ended.wait(RENEWED_SECONDS):
            _touch(path)

    _touch(path)
    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink()


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # without an engine there is no directory
        path.touch()
