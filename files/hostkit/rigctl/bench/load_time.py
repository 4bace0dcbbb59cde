"""From the start of a configuration to its acceptance, with its files cold and warm in the page cache.

Beside it the time to read the same files to their end: what a perfect reader would take.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rigctl.page_cache import blocks, cached, evict, files_below
from rigctl.supervisor.specification import Specification

AT_ONCE = 4  # files
WARM_SHARE = 0.99  # of the bytes in the page cache after they were read; less: memory is too small for them


def measure(specification: Specification, start: Callable[[], object], stop: Callable[[], object]) -> dict[str, float]:
    """Start it cold and, where memory holds its files, warm; it runs afterwards. Raises what `start` raises."""
    paths = files_below([specification.target_path, specification.drafter_path])
    size = sum(path.stat().st_size for path in paths)
    stop()
    _evict(paths)
    found = {"bytes": float(size), "read_cold_seconds": read(paths)}
    _evict(paths)
    found["accepted_cold_seconds"] = _seconds(start)
    read(paths)
    if sum(map(cached, paths)) >= WARM_SHARE * size:
        found["read_warm_seconds"] = read(paths)
        stop()
        found["accepted_warm_seconds"] = _seconds(start)
    return found


def read(paths: Sequence[Path]) -> float:
    """Read files to their end; the seconds it took."""

    def all_of_them() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda path: sum(blocks(path)), paths))

    return _seconds(all_of_them)


def _evict(paths: Sequence[Path]) -> None:
    for path in paths:
        evict(path)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun
