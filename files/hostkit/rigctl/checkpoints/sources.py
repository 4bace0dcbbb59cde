"""Where checkpoints come from. A source lists its files, and either fills one sink or a whole directory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

import requests

from rigctl.checkpoints import secrets, verify
from rigctl.checkpoints.http import (
    PROBE_BYTES,
    PROBE_SECONDS,
    GaveUp,
    HttpFetcher,
    Location,
    Transient,
    UnansweredError,
    check_status,
)
from rigctl.checkpoints.hub import Hub
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sink import DiskFull, Sink, SourceWrong
from rigctl.checkpoints.verify import Cancelled
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import File, Manifest
from rigctl.contract.sources import (
    DirectorySource,
    GeneratorSource,
    HttpSource,
    HubSource,
    LocalSource,
    RsyncSource,
)
from rigctl.errors import RigctlError
from rigctl.own_process import own_process

# rsync's exit codes that a better line cures: protocol stream, I/O on the socket, timeouts, ssh's own 255
RSYNC_TRANSIENT = (10, 12, 30, 35, 255)


class FileSource(Protocol):
    """Files one by one; `fetch` continues at the sink's offset."""

    def describe(self) -> str: ...
    def listing(self) -> Manifest: ...
    def fetch(self, entry: File, sink: Sink) -> None: ...
    def probe(self, entry: File) -> float: ...


class TreeSource(Protocol):
    """All files in one go: `fill` leaves them (or what it got) below a directory, to be proved afterwards."""

    def describe(self) -> str: ...
    def listing(self) -> Manifest | None: ...
    def fill(self, directory: Path, entries: Sequence[File]) -> None: ...


class Http:
    """A web directory with a manifest."""

    def __init__(self, source: HttpSource, order: CheckpointJob, progress: Progress, stop: threading.Event) -> None:
        self._source = source
        self._bases = [source.url] + ([source.mirror] if source.mirror else [])
        self._token = secrets.text(order.token)
        self._fetcher = HttpFetcher(order, progress, stop)

    def describe(self) -> str:
        """For records and messages."""
        return f"http:{self._source.url}"

    def listing(self) -> Manifest:
        """The manifest that the server publishes."""
        url = self._source.manifest_url or f"{self._bases[0]}/manifest.json"
        location = Location(url, _origin(url), self._token)
        try:
            with self._fetcher.open(location, {}) as response:
                check_status(response, location, "manifest.json")
                return Manifest.parse(response.json(), url)
        except (Transient, requests.exceptions.RequestException, json.JSONDecodeError) as error:
            raise UnansweredError(f"the manifest {url} cannot be had: {error}") from error

    def _locate(self, entry: File, group: int) -> Location:
        base = self._bases[group % len(self._bases)]
        token = self._token if base == self._bases[0] else None
        return Location(f"{base}/{quote(entry.path)}", _origin(base), token)

    def fetch(self, entry: File, sink: Sink) -> None:
        """Fill the sink by range requests."""
        self._fetcher.fetch(entry, sink, lambda group: self._locate(entry, group))

    def probe(self, entry: File) -> float:
        """Bytes a second of one connection."""
        return self._fetcher.probe(self._locate(entry, 0), PROBE_BYTES, PROBE_SECONDS)


class Local:
    """A directory of this host; copied, never moved or linked: the source may change later."""

    def __init__(self, source: LocalSource) -> None:
        self._root = Path(source.path)
        self._source = source

    def describe(self) -> str:
        """For records and messages."""
        return f"local:{self._root}"

    def listing(self) -> Manifest:
        """sha256 of the source's files."""
        made, _ = verify.manifest_of(self._root, self.describe(), self._source.selects)
        return made

    def fetch(self, entry: File, sink: Sink) -> None:
        """Copy from the sink's offset on."""
        place = self._root / entry.path
        try:
            size = place.stat().st_size
            if size != entry.size:
                raise SourceWrong(f"{place}: {size} bytes, {entry.size} in the manifest")
            with place.open("rb") as handle:
                handle.seek(sink.offset)
                while block := handle.read(sink.limiter.block()):
                    sink.write(block)
        except OSError as error:
            raise SourceWrong(f"{place} cannot be read: {error.strerror}") from error

    def probe(self, entry: File) -> float:
        """Not measured: the disks decide."""
        return 0.0


class Rsync:
    """A directory of another host over SSH, by rsync (files resume inside)."""

    def __init__(self, source: RsyncSource, order: CheckpointJob, progress: Progress, stop: threading.Event) -> None:
        self._source = source
        self._order = order
        self._progress = progress
        self._stop = stop

    def describe(self) -> str:
        """For records and messages."""
        return f"rsync:{self._source.host}:{self._source.path}"

    def _ssh(self) -> list[str]:
        """ssh without questions; the host key must be known."""
        source = self._source
        command = ["ssh", "-p", str(source.port), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
        command += ["-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
        if source.identity_file:
            command += ["-i", source.identity_file, "-o", "IdentitiesOnly=yes"]
        if source.known_hosts:
            command += ["-o", f"UserKnownHostsFile={source.known_hosts}"]
        return command

    def _at(self) -> str:
        return f"{self._source.user}@{self._source.host}"

    def _remote(self, script: str, stdin: bytes = b"") -> bytes:
        """Run a shell script in the source's directory."""
        script = f"cd -- {shlex.quote(self._source.path)} && {script}"
        done = subprocess.run([*self._ssh(), self._at(), script], input=stdin, capture_output=True, check=False)
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines()
            raise RigctlError(
                f"{self.describe()} cannot be read: {reason[-1] if reason else done.returncode}; "
                "check the path, the host key and the SSH key"
            )
        return done.stdout

    def listing(self) -> Manifest:
        """Sizes by find, sha256 on all cores of the other host."""
        listed = self._remote(r"find . -type f -printf '%s %P\0'")
        sizes: dict[str, int] = {}
        for item in filter(None, listed.split(b"\0")):
            size, _, name = os.fsdecode(item).partition(" ")
            if self._source.selects(name):
                sizes[name] = int(size)
        if not sizes:
            raise RigctlError(f"{self.describe()} has no file that the patterns select")
        names = b"\0".join(os.fsencode(f"./{name}") for name in sizes)
        hashed = self._remote('xargs -0 -n 1 -P "$(nproc)" sha256sum --zero --', names)
        entries = []
        for item in filter(None, hashed.split(b"\0")):
            digest, _, name = os.fsdecode(item).partition("  ./")
            entries.append({"path": name, "size": sizes[name], "sha256": digest})
        if len(entries) != len(sizes):
            raise RigctlError(f"{self.describe()}: {len(entries)} of {len(sizes)} files were hashed: it changes")
        return Manifest.listed(self.describe(), None, entries)

    def fill(self, directory: Path, entries: Sequence[File]) -> None:
        """Fetch the entries; a file that is begun is continued (--append), proof comes after."""
        with tempfile.NamedTemporaryFile("w", prefix="rigctl-rsync-", encoding="utf-8") as names:
            names.write("".join(f"{entry.path}\0" for entry in entries))
            names.flush()
            command = self._command(directory, names.name)
            failures = 0
            while True:
                before = _size(directory, entries)
                code, reason = _follow(command, directory, entries, self._progress, self._stop)
                if code == 0:
                    return
                self._judge(code, reason)
                failures = 1 if _size(directory, entries) > before else failures + 1
                if failures > self._order.retries:
                    raise GaveUp(f"{self.describe()}: gave up after {failures} attempts: {reason}; run it again")
                delay = min(self._order.backoff * 2 ** (failures - 1), 60.0)
                self._progress.event(f"rsync: {reason}; again in {delay:.1f} s", retry=True)
                if self._stop.wait(delay):
                    raise Cancelled("stopped; what is fetched is kept for the next run")

    def _command(self, directory: Path, names: str) -> list[str]:
        command = [
            "rsync",
            "--append",
            "--from0",
            f"--files-from={names}",
            "--no-implied-dirs",
            "--copy-links",
        ]
        command += [f"--timeout={max(1, int(self._order.stall))}", "--protect-args"]
        if self._order.bandwidth_limit:
            command.append(f"--bwlimit={max(1, self._order.bandwidth_limit // 1024)}")
        host = f"[{self._source.host}]" if ":" in self._source.host else self._source.host
        at = f"{self._source.user}@{host}:{self._source.path}/"
        return [*command, "-e", shlex.join(self._ssh()), at, f"{directory}/"]

    def _judge(self, code: int, reason: str) -> None:
        if "No space left" in reason or "Disk quota exceeded" in reason:
            raise DiskFull(f"rsync: {reason}")
        if code not in RSYNC_TRANSIENT or any(
            text in reason for text in ("Permission denied", "Host key verification failed")
        ):
            raise SourceWrong(f"{self.describe()}: rsync ended with {code}: {reason}")


class Generator:
    """A rigctl subcommand that makes the files (the sandbox's tiny checkpoints)."""

    def __init__(self, source: GeneratorSource, progress: Progress, stop: threading.Event) -> None:
        self._arguments = ["tiny-kimi", source.generator, "{directory}"]
        self._progress = progress
        self._stop = stop

    def describe(self) -> str:
        """For records and messages."""
        return f"generator:{shlex.join(self._arguments)}"

    def listing(self) -> Manifest | None:
        """Only known after the files are made."""
        return None

    def fill(self, directory: Path, entries: Sequence[File]) -> None:
        """Run it."""
        command = own_process("rigctl", *self._arguments[:-1], str(directory))
        code, reason = _follow(command, directory, entries, self._progress, self._stop)
        if code:
            raise SourceWrong(f"{self.describe()} ended with {code}: {reason}")


def _follow(
    command: Sequence[str],
    directory: Path,
    entries: Sequence[File],
    progress: Progress,
    stop: threading.Event,
) -> tuple[int, str]:
    """Run a child that writes below `directory`, count its growth; (exit code, last line of its errors)."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        counted = _size(directory, entries)
        try:
            while child.poll() is None:
                stopped = stop.wait(0.2)
                grown = _size(directory, entries)
                progress.advance(grown - counted)
                counted = grown
                if stopped:
                    raise Cancelled("stopped; what is fetched is kept for the next run")
            progress.advance(_size(directory, entries) - counted)
        finally:
            if child.poll() is None:
                child.terminate()
            child.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    telling = [text for text in lines if not text.startswith("rsync error")] or lines
    return child.returncode, telling[-1] if telling else f"exit code {child.returncode}"


def _size(directory: Path, entries: Sequence[File]) -> int:
    total = 0
    for entry in entries:
        try:
            total += (directory / entry.path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def open_source(order: CheckpointJob, progress: Progress, stop: threading.Event) -> FileSource | TreeSource:
    """The source that an order names. Raises RigctlError for one that is fetched from nowhere."""
    source = order.source
    match source:
        case HubSource():
            return Hub(source, order, progress, stop)
        case HttpSource():
            return Http(source, order, progress, stop)
        case LocalSource():
            return Local(source)
        case RsyncSource():
            return Rsync(source, order, progress, stop)
        case GeneratorSource():
            return Generator(source, progress, stop)
        case DirectorySource():
            raise RigctlError(f"{order.name} is taken as it lies: put its files into {order.destination}")
