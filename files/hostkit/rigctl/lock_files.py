"""Locks between programs of root's, on files that nobody else can open: whoever can read one can lock it for ever."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from rigctl.errors import RigctlError

POLL_SECONDS = 0.05


class Busy(RigctlError):
    """Another program has the lock; says which."""


@contextmanager
def locked(path: Path, what: str, seconds: float) -> Iterator[None]:
    """Hold the lock while the block runs; raises Busy once `seconds` have passed, RigctlError where there can be none.

    what: the complaint, such as "a job runs already". A file that an older version left open to others is closed.
    """
    with _opened(path) as file:
        end = time.monotonic() + seconds
        while not _acquired(file, path):
            if time.monotonic() >= end:
                who = "; ".join(holders(path)) or "a process that has just ended"
                raise Busy(f"{what}: {path} is locked by {who}")
            time.sleep(POLL_SECONDS)
        yield


def is_locked(path: Path) -> bool:
    """Whether another program holds the lock now."""
    with _opened(path) as file:
        return not _acquired(file, path)


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _acquired(file: BinaryIO, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RigctlError(f"lock {path}: {error.strerror}") from error
    return True


def holders(path: Path) -> list[str]:
    """Who holds a lock, by the kernel's word (proc(5), fdinfo): pid, user, unit and command of each process."""
    wanted, found = str(path.resolve()), []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it may end at any of these
            of = Path(f"/proc/{process.pid}")
            for link in (of / "fd").iterdir():
                if str(link.readlink()) == wanted and "FLOCK" in (of / "fdinfo" / link.name).read_text():
                    unit = (of / "cgroup").read_text().strip().rpartition("/")[2] or "none"
                    command = " ".join(process.cmdline())[:100]
                    shown = "".join(one if one.isprintable() else "?" for one in command)
                    found.append(f"process {process.pid} of {process.username()}, unit {unit}: {shown}")
                    break
    return found
