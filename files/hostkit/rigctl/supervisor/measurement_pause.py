"""While a benchmark measures a configuration, its supervisor asks nothing: a question would be counted with the rest.

A lock on a file in the unit's runtime directory says so; it ends with the benchmark, however that ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from rigctl.supervisor.specification import Specification

MARK = "measured"
"""The file that a benchmark of a configuration locks."""


def is_measured(specification: Specification) -> bool:
    """True while a benchmark holds the lock; a file that was left behind says nothing."""
    try:
        with specification.runtime.open(MARK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def undisturbed(specification: Specification) -> Iterator[None]:
    """Hold the lock while the block runs; where it cannot be held, the report says that tokens do not add up."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # without an engine there is no directory
            file = held.enter_context(specification.runtime.open(MARK, os.O_RDWR | os.O_CREAT))
            # The engine's own, and closed to others: whoever can read a file can lock it, and end the watch for ever.
            with specification.runtime.opened() as directory:
                owner = os.fstat(directory)
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            os.fchmod(file.fileno(), 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
