"""Proof that files on disk are the checkpoint: by digest (all cores), or by the record of the last proof."""

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rigctl.checkpoints.paths import walk
from rigctl.contract.manifest import File, Manifest
from rigctl.errors import RigctlError
from rigctl.reached import readable

BLOCK = 1 << 20  # bytes a thread reads at a time: memory is threads x BLOCK


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Ends of the files that vLLM or SGLang load from a directory in one load format or another; an index chooses."""
NOT_LOADED = ("optimizer", "rng_state", "scaler", "scheduler", "training_")
"""How files of a trainer begin that both engines leave out, or that no load format reads as weights."""
EXTRA_CURE = "move it out of the directory"


class FileHasher:
    """Digest of a file of known size, as `sha256:...` or `git_sha1:...`."""

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        # git's blob id is not used for security where a sha256 is known
        blob = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        self._hash = hashlib.sha256() if kind == "sha256" else blob

    @classmethod
    def of(cls, file: File) -> "FileHasher":
        """A hasher of the kind that this file is proved by."""
        return cls("sha256" if file.sha256 else "git_sha1", file.size)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    def digest(self) -> str:
        return f"{self._kind}:{self._hash.hexdigest()}"


@dataclass(frozen=True)
class Seen:
    """What `stat` said of a file when its digest was checked."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Seen":
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass
class Report:
    """What a verification found. `damaged` maps a path to the reason; `foreign` files are in no manifest; `extra` ones
    neither, and an engine would load them as weights."""

    checked: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every file of the manifest is there and right, and no other weights are; other foreign files do not count."""
        return not (self.damaged or self.missing or self.extra)

    def to_json(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "checked": self.checked,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "damaged": dict(sorted(self.damaged.items())),
            "missing": sorted(self.missing),
            "foreign": sorted(self.foreign),
            "extra": self.extra,
        }

    def lines(self) -> list[str]:
        return (
            [f"damaged: {path}: {reason}" for path, reason in sorted(self.damaged.items())]
            + [f"missing: {path}" for path in sorted(self.missing)]
            + [
                f"extra weights: {path}: an engine would load it beside the proved ones; {EXTRA_CURE}"
                for path in self.extra
            ]
            + [f"foreign: {path}" for path in sorted(set(self.foreign) - set(self.extra))]
        )


class Cancelled(RigctlError):
    """The job was told to stop."""

    def __init__(self, kept: str = "") -> None:
        super().__init__(f"stopped; what is fetched is kept{kept and ' in '}{kept} for the next run")


def pool(name: str) -> ThreadPoolExecutor:
    """A thread for each CPU that this process may use."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix=name)


def hash_file(
    path: Path, hasher: FileHasher, advance: Callable[[int], None] | None = None, upto: int | None = None
) -> tuple[str, os.stat_result]:
    """Digest of `path` (its first `upto` bytes) and its stat before; raises if it changes meanwhile."""
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    with readable(path) as handle:
        before = os.fstat(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        left = before.st_size if upto is None else upto
        while left > 0:
            count = handle.readinto(view[: min(BLOCK, left)])
            if not count:
                break
            hasher.update(view[:count])
            left -= count
            if advance:
                advance(count)
        after = os.fstat(handle.fileno())
    if Seen.of(before) != Seen.of(after):
        raise RigctlError(f"{path} changed while it was read: something writes to it")
    return hasher.digest(), before


def full(
    root: Path,
    manifest: Manifest,
    *,
    advance: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Digest every file, one thread a core; largest first, so that no core ends alone."""
    started = time.monotonic()
    entries = sorted(manifest.files, key=lambda entry: -entry.size)
    report = Report()
    lock = threading.Lock()

    def step(count: int) -> None:
        if stop is not None and stop.is_set():
            raise Cancelled
        if advance:
            advance(count)

    def check(entry: File) -> None:
        step(0)
        fault, seen = check_file(root, entry, step)
        with lock:
            _note(report, entry, fault, seen)

    with pool("verify") as threads:
        list(threads.map(check, entries))
    report.extra = extra_weights(root, manifest)
    report.seconds = time.monotonic() - started
    return report


def check_file(root: Path, entry: File, advance: Callable[[int], None] | None = None) -> tuple[str | None, Seen | None]:
    """(None, what stat says) for a right file, (reason, None) else; the reason "missing" is its own case."""
    place = root / entry.path
    try:
        status = place.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a plain file", None
        if status.st_size != entry.size:
            return f"{status.st_size} bytes, the manifest says {entry.size}", None
        digest, seen = hash_file(place, FileHasher.of(entry), advance)
    except (FileNotFoundError, NotADirectoryError):
        return "missing", None
    except Cancelled:
        raise
    except (OSError, RigctlError) as error:
        return str(error), None
    if digest != entry.digest():
        return f"{digest}, the manifest says {entry.digest()}", None
    return None, Seen.of(seen)


def _note(report: Report, entry: File, fault: str | None, seen: Seen | None) -> None:
    report.checked += 1
    if fault == "missing":
        report.missing.append(entry.path)
    elif fault is not None:
        report.damaged[entry.path] = fault
    elif seen is not None:
        report.seen[entry.path] = seen
        report.bytes += entry.size


def quick(root: Path, manifest: Manifest, seen: Mapping[str, Seen] | None) -> Report:
    """Compare size, mtime and inode with those of the last full verification; reads no content.

    seen: None compares sizes alone.
    """
    started = time.monotonic()
    report = Report()
    for entry in manifest.files:
        now = None
        try:
            now = Seen.of((root / entry.path).stat())
            fault = _difference(now, entry, seen)
        except (FileNotFoundError, NotADirectoryError):
            fault = "missing"
        except OSError as error:
            fault = str(error)
        _note(report, entry, fault, now)
    report.extra = extra_weights(root, manifest)
    report.seconds = time.monotonic() - started
    return report


def _difference(now: Seen, entry: File, seen: Mapping[str, Seen] | None) -> str | None:
    if now.size != entry.size:
        return f"{now.size} bytes, the manifest says {entry.size}"
    if seen is None:
        return None
    if (known := seen.get(entry.path)) is None:
        return "never verified"
    changed = [name for name in ("size", "mtime_ns", "inode") if getattr(now, name) != getattr(known, name)]
    return f"{', '.join(changed)} changed since the last full verification" if changed else None


def foreign_files(root: Path, manifest: Manifest) -> list[str]:
    """Files below `root` that the manifest does not list."""
    return [path for path, _ in walk(root) if path not in manifest.by_path]


def extra_weights(root: Path, manifest: Manifest) -> list[str]:
    """Files that an engine would load from `root` and that the manifest does not list.

    Engines look for names that do not begin with a dot, in the directory itself.
    """
    names = sorted(place.name for place in root.iterdir()) if root.is_dir() else []
    loaded = [name for name in names if name.endswith(WEIGHTS) and not name.startswith((".", *NOT_LOADED))]
    return [name for name in loaded if name not in manifest.by_path]


def manifest_of(
    root: Path,
    source: str,
    selects: Callable[[str], bool] = lambda path: True,
    *,
    revision: str | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Manifest, dict[str, Seen]]:
    """Make a manifest with sha256 from the selected files of a directory, one thread a core."""
    if not root.is_dir():
        raise RigctlError(f"{root} is not a directory: no manifest can be made from it")
    chosen = [(path, place) for path, place in walk(root) if selects(path)]
    for path, place in chosen:
        if not place.is_file():
            raise RigctlError(f"{place} ({path}) is not a plain file or a link to one: exclude it or remove it")
    if not chosen:
        raise RigctlError(f"{root} has no file that the patterns select")

    def entry(item: tuple[str, Path]) -> tuple[dict[str, Any], Seen]:
        path, place = item
        digest, status = hash_file(place, FileHasher("sha256", 0), advance)
        return {"path": path, "size": status.st_size, "sha256": digest.removeprefix("sha256:")}, Seen.of(status)

    with pool("manifest") as threads:
        results = list(threads.map(entry, chosen))
    manifest = Manifest.listed(source, revision, [made for made, _ in results])
    return manifest, {made["path"]: seen for made, seen in results}
