"""Where checkpoints come from. A source lists its files, and either fills one sink or a whole directory."""

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from urllib.parse import quote

import requests

from rigctl.checkpoints import verify
from rigctl.checkpoints.children import follow
from rigctl.checkpoints.http import (
    GaveUp,
    HttpFetcher,
    Location,
    Origin,
    Transient,
    UnansweredError,
    check_status,
    digests_by,
    origin_of,
    secret_text,
)
from rigctl.checkpoints.hub import Hub
from rigctl.checkpoints.paths import allocated
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sink import DiskFull, Sink, SourceWrong
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import File, Manifest
from rigctl.contract.sources import GeneratorSource, HttpSource, HubSource, LocalSource, RsyncSource
from rigctl.errors import RigctlError
from rigctl.own_process import own_process
from rigctl.reached import readable

# rsync's exit codes that a better line cures: protocol stream, I/O on the socket, timeouts, ssh's own 255
RSYNC_TRANSIENT = (10, 12, 30, 35, 255)


class Http(HttpFetcher):
    """A web directory with a manifest."""

    def __init__(self, source: HttpSource, order: CheckpointJob, progress: Progress, stop: Event) -> None:
        super().__init__(order, progress, stop)
        self._manifest_url = source.manifest_url or f"{source.url}/manifest.json"
        self._bases = [source.url, *([source.mirror] if source.mirror else [])]
        self._token = secret_text(order.token)

    def listing(self) -> Manifest:
        url = self._manifest_url
        digests_by(url, self.name)
        location = Location(url, origin_of(url), self._token)
        try:
            with self.open(location, {}) as response:
                for hop in [*response.history, response]:
                    digests_by(hop.url, self.name)
                check_status(response, location, "manifest.json")
                return Manifest.parse(response.json(), url)
        except (Transient, requests.RequestException, json.JSONDecodeError) as error:
            raise UnansweredError(f"the manifest {url} cannot be fetched: {error}") from error

    def locate(self, entry: File, group: int) -> Location:
        """The mirror in every second group; it never gets the token."""
        base = self._bases[group % len(self._bases)]
        token = self._token if base == self._bases[0] else None
        return Location(f"{base}/{quote(entry.path)}", origin_of(base), token)


class Local(Origin):
    """A directory of this host; copied, never moved or linked: the source may change later."""

    def __init__(self, source: LocalSource, order: CheckpointJob, progress: Progress, stop: Event) -> None:
        super().__init__(order, progress, stop)
        self._root = Path(source.path)

    def listing(self) -> Manifest:
        return verify.manifest_of(self._root, self.name, self.order.source.selects)[0]

    def fetch(self, entry: File, sink: Sink) -> None:
        place = self._root / entry.path
        try:
            size = place.stat().st_size
            if size != entry.size:
                raise SourceWrong(f"{place}: {size} bytes, {entry.size} in the manifest")
            with readable(place) as handle:
                handle.seek(sink.offset)
                while block := handle.read(sink.limiter.block()):
                    sink.write(block)
        except OSError as error:
            raise SourceWrong(f"{place} cannot be read: {error.strerror}") from error


class Rsync(Origin):
    """A directory of another host over SSH, by rsync (files resume inside)."""

    def __init__(self, source: RsyncSource, order: CheckpointJob, progress: Progress, stop: Event) -> None:
        super().__init__(order, progress, stop)
        self._source = source
        # ssh asks no questions; the host key must be known
        self._ssh = ["ssh", "-p", str(source.port), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
        self._ssh += ["-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
        if source.identity_file:
            self._ssh += ["-i", source.identity_file, "-o", "IdentitiesOnly=yes"]
        if source.known_hosts:
            self._ssh += ["-o", f"UserKnownHostsFile={source.known_hosts}"]

    def _remote(self, script: str, stdin: bytes = b"") -> list[str]:
        """Run a shell script in the source's directory; the items of its output, which end with NUL."""
        source = self._source
        script = f"cd -- {shlex.quote(source.path)} && {script}"
        command = [*self._ssh, f"{source.user}@{source.host}", script]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines()
            raise RigctlError(
                f"{self.name} cannot be read: {reason[-1] if reason else done.returncode}; "
                "check the path, the host key and the SSH key"
            )
        return [os.fsdecode(item) for item in done.stdout.split(b"\0") if item]

    def listing(self) -> Manifest:
        """Sizes by find, sha256 on all cores of the other host."""
        listed = [item.partition(" ") for item in self._remote(r"find . -type f -printf '%s %P\0'")]
        sizes = {name: int(size) for size, _, name in listed if self._source.selects(name)}
        if not sizes:
            raise RigctlError(f"{self.name} has no file that the patterns select")
        names = b"\0".join(os.fsencode(f"./{name}") for name in sizes)
        hashed = self._remote('xargs -0 -n 1 -P "$(nproc)" sha256sum --zero --', names)
        digests = [item.partition("  ./") for item in hashed]
        entries = [{"path": name, "size": sizes[name], "sha256": digest} for digest, _, name in digests]
        if len(entries) != len(sizes):
            raise RigctlError(f"{self.name}: {len(entries)} of {len(sizes)} files were hashed: it changes")
        return Manifest.listed(self.name, None, entries)

    def fill(self, directory: Path, entries: Sequence[File]) -> None:
        """Fetch the entries; a file that is begun is continued (--append), proof comes after."""
        with tempfile.NamedTemporaryFile("w", prefix="rigctl-rsync-", encoding="utf-8") as names:
            names.write("".join(f"{entry.path}\0" for entry in entries))
            names.flush()
            command = self._command(directory, names.name)
            failures = 0
            while True:
                code, reason, grown = follow(
                    command, lambda: allocated(directory / entry.path for entry in entries), self.progress, self.stop
                )
                if code == 0:
                    return
                self._unless_fatal(code, [text for text in reason if not text.startswith("rsync error")] or reason)
                failures = 1 if grown > 0 else failures + 1
                if failures > self.order.retries:
                    raise GaveUp(f"{self.name}: gave up after {failures} attempts: {reason[-1]}; run it again")
                self.pause("rsync", failures, reason[-1])

    def _command(self, directory: Path, names: str) -> list[str]:
        source, limit = self._source, self.order.bandwidth_limit
        command = ["rsync", "--append", "--from0", f"--files-from={names}", "--no-implied-dirs", "--copy-links"]
        command += [f"--timeout={max(1, int(self.order.stall))}", "--protect-args"]
        command += [f"--bwlimit={max(1, limit // 1024)}"] if limit else []
        host = f"[{source.host}]" if ":" in source.host else source.host
        return [*command, "-e", shlex.join(self._ssh), f"{source.user}@{host}:{source.path}/", f"{directory}/"]

    def _unless_fatal(self, code: int, reason: Sequence[str]) -> None:
        last = reason[-1]
        if "No space left" in last or "Disk quota exceeded" in last:
            raise DiskFull(f"rsync: {last}")
        refused = any(text in last for text in ("Permission denied", "Host key verification failed"))
        if code not in RSYNC_TRANSIENT or refused:
            raise SourceWrong(f"{self.name}: rsync ended with {code}: {last}")


class Generator(Origin):
    """A rigctl subcommand that makes the files (the sandbox's tiny checkpoints)."""

    def listing(self) -> Manifest | None:
        """Only known after the files are made."""
        return None

    def fill(self, directory: Path, entries: Sequence[File]) -> None:
        command = own_process("rigctl", "tiny-model", self.name.partition(":")[2], str(directory))
        code, reason, _ = follow(command, lambda: 0, self.progress, self.stop)
        if code:
            raise SourceWrong(f"{self.name} ended with {code}: {reason[-1]}")


FileSource = Hub | Http | Local
"""Files one by one; `fetch` continues at the sink's offset."""
TreeSource = Rsync | Generator
"""All files in one go: `fill` leaves them (or what it got) below a directory, to be proved afterwards."""


def open_source(order: CheckpointJob, progress: Progress, stop: Event) -> FileSource | TreeSource:
    """The source that an order names. Raises RigctlError for one that is fetched from nowhere."""
    match order.source:
        case HubSource() as source:
            return Hub(source, order, progress, stop)
        case HttpSource() as source:
            return Http(source, order, progress, stop)
        case LocalSource() as source:
            return Local(source, order, progress, stop)
        case RsyncSource() as source:
            return Rsync(source, order, progress, stop)
        case GeneratorSource():
            return Generator(order, progress, stop)
    raise RigctlError(f"{order.name} is taken as it lies: put its files into {order.destination}")
