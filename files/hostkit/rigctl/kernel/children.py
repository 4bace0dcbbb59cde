"""A command and all that it started end together: no orphan goes on in a directory that another one takes over."""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import psutil

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
# ninja removes what it has half-made when it is asked to end.
GRACE_SECONDS = 10.0


@contextlib.contextmanager
def end_with_us() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGINT end every descendant, then this process, with 128 + the signal's number.

    Descendants whose parent has ended become our children, so that none is missed.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # nohup and a shell's background jobs ignore some of them, and mean it.
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _stop)
    try:
        yield
    finally:
        _end_descendants()


def _stop(number: int, _: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    print(f"ended by {signal.Signals(number).name}; what is built so far stays", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def _end_descendants() -> None:
    found = psutil.Process().children(recursive=True)
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    psutil.wait_procs(found, timeout=GRACE_SECONDS)
    while found := psutil.Process().children(recursive=True):
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(found, timeout=1)
