"""vLLM's ways to read a checkpoint beside a plain read of its files, with cold and warm page cache.

PYTHON tests/engines/readers.py FOLDER [ROUNDS]: with the Python of an engine's environment; needs no GPU. Every tensor
is copied once, as into a model. Prints medians in seconds, and each as a multiple of the plain read in the same state.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Reader = Callable[[Sequence[str]], None]


def plain(files: Sequence[str]) -> None:
    """Read files to their end."""
    buffer = bytearray(8 << 20)
    for path in files:
        with Path(path).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def copied(tensors: Iterable[tuple[str, Any]]) -> None:
    """Copy every tensor."""
    for _, tensor in tensors:
        tensor.clone()


def readers() -> dict[str, Reader]:
    """The plain read and vLLM's own."""
    weight_utils = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
    single = weight_utils.safetensors_weights_iterator
    several = weight_utils.multi_thread_safetensors_weights_iterator
    return {
        "plain": plain,
        "as shipped (memory-mapped)": lambda files: copied(single([*files], False)),
        "eager": lambda files: copied(single([*files], False, "eager")),
        "prefetch": lambda files: copied(single([*files], False, "prefetch")),
        "multithreaded, 2": lambda files: copied(several([*files], False, max_workers=2)),
    }


def evict(files: Sequence[str]) -> None:
    """Take files out of the page cache."""
    for path in files:
        with Path(path).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    files = [str(path) for path in sorted(Path(sys.argv[1]).glob("*.safetensors"))]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    known = readers()
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for state in ("cold", "warm"):
            for name, reader in known.items():
                if state == "cold":
                    evict(files)
                begin = time.monotonic()
                reader(files)
                taken.setdefault((state, name), []).append(time.monotonic() - begin)
    size = sum(Path(path).stat().st_size for path in files)
    print(f"{size / 1e9:.1f} GB in {len(files)} files, {os.cpu_count()} cores, medians of {rounds}")
    for (state, name), seconds in taken.items():
        base = median(taken[state, "plain"])
        rate = size / 1e9 / median(seconds)
        print(
            f"| {name} | {state} | {median(seconds):.2f} s | {rate:.2f} GB/s | {median(seconds) / base:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
