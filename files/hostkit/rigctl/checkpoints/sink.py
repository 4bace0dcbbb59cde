"""A file being filled: resumed, hashed as it grows, never longer than its manifest says."""

import ctypes
import errno
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.verify import Cancelled, FileHasher, hash_file
from rigctl.contract.manifest import File
from rigctl.errors import RigctlError

STEP = 16 << 20  # bytes after which they are sent to the disk
# Stays in the processor's cache and the allocator's heap: with 1 MiB the kernel clears new pages for each block, and
# the same download costs 2.5 times the system time (tests/staging/bench_staging.py).
BLOCK = 256 << 10
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(RigctlError):
    """The destination's file system, quota or file size limit is exhausted."""


class SourceWrong(RigctlError):
    """The source has something else than the manifest: no retry can help."""


def disk_error(error: OSError, where: str) -> RigctlError:
    """A failed write as DiskFull or, for every other reason, as it is."""
    if error.errno in FULL:
        return DiskFull(f"{error.strerror} at {error.filename or where}; make room and run the job again")
    return RigctlError(f"{error.filename or where} cannot be used: {error.strerror or error}")


def start_writing(descriptor: int, offset: int, count: int) -> None:
    """Have the kernel begin to write a range that is in its cache, so that the flush at the end has little left.

    sync_file_range(2) with SYNC_FILE_RANGE_WRITE; where the C library lacks it nothing happens.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), 2)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class Limiter:
    """One bandwidth limit (bytes a second; None: none) shared by all workers of a job."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self._ready = 0.0
        self._lock = threading.Lock()

    def block(self) -> int:
        """Bytes to move at a time: about a tenth of a second's worth, at most BLOCK."""
        return BLOCK if self.rate is None else min(BLOCK, max(1 << 14, self.rate // 10))

    def take(self, count: int, stop: threading.Event) -> None:
        """Wait until `count` more bytes are allowed, or the job stops."""
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._ready = max(self._ready, now) + count / self.rate
            wait = self._ready - now
        stop.wait(wait)


class Sink:
    """A part file and the digest of what is in it. Use as a context manager."""

    def __init__(self, part: Path, entry: File, progress: Progress, limiter: Limiter, stop: threading.Event) -> None:
        self.part = part
        self.entry = entry
        self.offset = 0
        self.limiter = limiter
        self.stop = stop
        self._note = part.with_name(part.name + ".validator")
        self._progress = progress
        self._hasher = FileHasher.of(entry)
        self._descriptor = -1
        self._begun = 0  # up to where the kernel was told to write

    def __enter__(self) -> "Sink":
        self._descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._hasher = FileHasher.of(self.entry)
        size = os.fstat(self._descriptor).st_size
        if size > self.entry.size:
            os.ftruncate(self._descriptor, 0)
            size = 0
        if size:
            hash_file(self.part, self._hasher, lambda _: self._unless_stopped(), upto=size)
            self._progress.advance(size, fetched=False)
        self.offset = self._begun = os.lseek(self._descriptor, size, os.SEEK_SET)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Append; raises SourceWrong past the manifest's size, DiskFull, or Cancelled."""
        self._unless_stopped()
        if self.offset + len(data) > self.entry.size:
            raise SourceWrong(
                f"{self.entry.path}: the source sends more than the {self.entry.size} bytes of the manifest"
            )
        self.limiter.take(len(data), self.stop)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise self._disk_error(error) from error
        self._hasher.update(data)
        self.offset += len(data)
        if self.offset - self._begun >= STEP:
            start_writing(self._descriptor, self._begun, self.offset - self._begun)
            self._begun = self.offset
        self._progress.advance(len(data))

    def _unless_stopped(self) -> None:
        if self.stop.is_set():
            raise Cancelled

    def _disk_error(self, error: OSError) -> RigctlError:
        # a short write may have happened: keep exactly what was counted and hashed
        os.ftruncate(self._descriptor, self.offset)
        os.lseek(self._descriptor, self.offset, os.SEEK_SET)
        return disk_error(error, f"{self.entry.path}, byte {self.offset}")

    def restart(self, why: str) -> None:
        """Drop what is there and begin at byte 0."""
        if self.offset:
            self._progress.event(f"{self.entry.path}: {why}; {self.offset} bytes are dropped and fetched again")
        self._progress.advance(-self.offset)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.offset = self._begun = 0
        self._hasher = FileHasher.of(self.entry)
        self._note.unlink(missing_ok=True)

    def validator(self) -> str | None:
        """What identified the source's version of this file when the part was begun (an ETag), if known."""
        return self._note.read_text(encoding="utf-8") if self._note.exists() else None

    def remember(self, validator: str) -> None:
        """Keep the source's ETag beside the part."""
        try:
            self._note.write_text(validator, encoding="utf-8")
        except OSError:
            self._note.unlink(missing_ok=True)  # a cut-off note would look like another version
            raise

    def finish(self) -> str:
        """Flush to the disk and return the digest."""
        if self.offset != self.entry.size:
            raise SourceWrong(
                f"{self.entry.path}: the source ends at byte {self.offset}, the manifest says {self.entry.size}"
            )
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._disk_error(error) from error
        self._note.unlink(missing_ok=True)
        return self._hasher.digest()
