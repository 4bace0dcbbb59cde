"""While a benchmark measures a configuration, its supervisor asks nothing: a question would be counted with the rest.

A lock on a file in the unit's runtime directory says so; it ends with the benchmark, however that ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from rigctl.supervisor.specification import Specification


def mark(specification: Specification) -> Path:
    """The file that a benchmark of this configuration locks."""
    return specification.runtime / "measured"


def is_measured(specification: Specification) -> bool:
    """True while a benchmark holds the lock; a file that was left behind says nothing."""
    try:
        with mark(specification).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def undisturbed(specification: Specification) -> Iterator[None]:
    """Hold the lock while the block runs; where it cannot be held, the report says that tokens do not add up."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # without an engine there is no directory
            # The directory is the engine's: a link of its making is not followed, and nothing is emptied.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = held.enter_context(os.fdopen(os.open(mark(specification), flags, 0o644), "rb", buffering=0))
            os.fchmod(file.fileno(), 0o644)  # whatever the umask: the engine's user reads it
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
