"""An engine's output: passed on to the journal, kept in one file a run, read for phase and progress."""

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import BinaryIO

from rigctl.contract.foreign import one_line, printable
from rigctl.guarded import Place
from rigctl.supervisor.load_phases import phase_of

HARMLESS = "[harmless] "
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): |^CUDA error|^Subprocess \S+ .*crashed")
# SGLang 0.5.16: once a process of its own has died it waits five seconds and then kills its whole tree with SIGKILL.
_STAMP = re.compile(r"^\[[^]]*\d\d:\d\d:\d\d[^]]*\] ")
_CHILD = re.compile(r"[Ss]igquit from a child process|SIGQUIT received\.|Subprocess \S+ .*crashed")
# What is read from a compile cache: Triton's and PyTorch's own, vLLM's words for it, a library that was cut.
_CACHE = re.compile(
    r'File "[^"]*(?:/triton/runtime/cache\.py|/torch/_inductor/(?:codecache|standalone_compile)\.py|/inductor_cache/|'
    r"/torch_compile_cache/)|corrupted compilation artifact|\.so: (?:file too short|invalid ELF header)"
)
SHORTEST_SECRET = 4
"""Shorter ones are found in anything: they are not masked."""
_LONGEST = 16384  # bytes of one line; the rest goes to the next


class EngineLog:
    """Follows one engine's output on a thread of its own, so that a slow reader never holds the engine up for long.

    news counts lines of a kind not seen before and changes of phase: what a stuck engine repeats is no progress.
    """

    def __init__(
        self,
        engine: str,
        harmless: Sequence[str],
        secrets: Sequence[str],
        file: "RunFile",
        journal: BinaryIO | None = None,
    ) -> None:
        self.phase = "starting the engine"
        self.news = 0
        self.last_words: deque[str] = deque(maxlen=5)
        self.last_error: str | None = None
        self.child_failed = False
        self.of_cache = False
        """A traceback went through a compile cache, or a library in one was cut short."""
        self._engine, self._harmless, self._file = engine, harmless, file
        self._secrets = [secret.encode() for secret in secrets if len(secret) >= SHORTEST_SECRET]
        self._journal = journal or sys.stdout.buffer
        self._kinds: set[str] = set()
        self._thread: threading.Thread | None = None

    def follow(self, descriptor: int) -> None:
        """Read from `descriptor` until its end."""
        self._thread = threading.Thread(target=self._pump, args=(descriptor,), daemon=True)
        self._thread.start()

    def catch_up(self, seconds: float = 0.5) -> None:
        """Let what an ended engine wrote last be read; a child of it that lives on may hold the pipe open."""
        if self._thread:
            self._thread.join(seconds)

    def finish(self) -> None:
        """Wait briefly for what the engine wrote last."""
        self.catch_up(1)
        self._file.close()

    def _pump(self, descriptor: int) -> None:
        rest = b""
        while chunk := os.read(descriptor, 65536):
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
            for line in lines:
                self._line(line)
            if len(rest) > _LONGEST:
                # What is left may begin with a secret that goes on in what comes.
                rest = self._masked(rest)
                cut = len(rest) - max(map(len, self._secrets), default=0)
                self._line(rest[:cut] + b"\n")
                rest = rest[cut:]
        if rest:
            self._line(rest + b"\n")
        os.close(descriptor)

    def _masked(self, raw: bytes) -> bytes:
        for secret in self._secrets:
            raw = raw.replace(secret, b"***")
        return raw

    def _line(self, raw: bytes) -> None:
        raw = self._masked(raw)
        text = printable(raw.decode(errors="replace").rstrip(), keep="\t")
        if not text:
            return
        harmless = any(mark in text for mark in self._harmless)
        self._notice(text, harmless)
        # A progress bar redraws itself with carriage returns: it is shown as the phase.
        if raw.endswith(b"\r"):
            return
        shown = (HARMLESS + text if harmless else text).encode()
        self._file.write(shown + b"\n")
        try:
            # sd-daemon(3): a line's priority, debug here; one that begins so itself does not choose its own.
            self._journal.write((b"<7>" if harmless else b"<6>" if shown.startswith(b"<") else b"") + shown + b"\n")
            self._journal.flush()
        except OSError:
            pass  # the journal is gone; the engine must not stop for it

    def _notice(self, text: str, harmless: bool) -> None:
        if phase := phase_of(self._engine, text):
            self.news += phase != self.phase
            self.phase = phase
        kind = re.sub(r"\d+", "#", text)[:120]
        if kind not in self._kinds and len(self._kinds) < 10000:
            self._kinds.add(kind)
            self.news += 1
        if not harmless:
            self.last_words.append(one_line(text))
            bare = _STAMP.sub("", text)
            self.child_failed |= bool(_CHILD.search(bare))
            self.of_cache |= bool(_CACHE.search(bare))
            if _ERROR.match(bare):
                self.last_error = one_line(bare, 200)


class RunFile:
    """The log file of one run. It ends early, and says so, when the disk is full or it is long enough."""

    def __init__(self, directory: Place, kept: int, limit_mib: int) -> None:
        self.problem: str | None = None
        self._left = limit_mib << 20
        self._file: BinaryIO | None = None
        self._opened = ExitStack()
        name = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}.log"
        self.path = f"{directory}/{name}"
        try:
            directory.remove(*directory.names(".log")[: -(kept - 1) or None])
            self._file = self._opened.enter_context(directory.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
        except OSError as error:
            self._give_up(error.strerror or type(error).__name__)

    def write(self, line: bytes) -> None:
        """Append one line, or nothing once the file has ended."""
        if self._file is None:
            return
        try:
            self._left -= self._file.write(line) or 0
        except OSError as error:
            self._give_up(error.strerror or type(error).__name__)
        else:
            if self._left <= 0:
                self._give_up("it has reached its size")

    def close(self) -> None:
        """End the file; further lines go nowhere."""
        self._opened.close()
        self._file = None

    def _give_up(self, why: str) -> None:
        self.problem = f"{self.path} ends early ({why}); the journal goes on"
        print(self.problem, flush=True)
        self.close()
