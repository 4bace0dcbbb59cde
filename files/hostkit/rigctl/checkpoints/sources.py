"""Where checkpoints come from. A source lists its files and fills a sink with each; a generator makes a directory."""

import os
import shlex
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import requests
import urllib3

from rigctl import builder, ssh
from rigctl.checkpoints import children, verify
from rigctl.checkpoints.http import (
    Fetcher,
    HttpFetcher,
    Location,
    Origin,
    Transient,
    UnansweredError,
    bounded,
    check_status,
    digests_by,
    origin_of,
    secret_text,
)
from rigctl.checkpoints.hub import Hub
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sink import BLOCK, Sink, SourceWrong
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.foreign import one_line
from rigctl.contract.manifest import File, Manifest
from rigctl.contract.sources import GeneratorSource, HttpSource, HubSource, LocalSource, RsyncSource
from rigctl.errors import RigctlError
from rigctl.own_process import own_process
from rigctl.reached import readable


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
                text = b"".join(bounded(iter(partial(response.raw.read1, BLOCK, decode_content=True), b"")))
        except (Transient, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise UnansweredError(f"the manifest {url} cannot be fetched: {error}") from error
        return Manifest.parse_text(text, url)

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


class Ssh(Fetcher):
    """A directory of another host over SSH. The client is the builder's; root takes the bytes that it sends."""

    def __init__(self, source: RsyncSource, order: CheckpointJob, progress: Progress, stop: Event) -> None:
        super().__init__(order, progress, stop)
        self._source = source

    def _remote(self, script: str, unit: str = "list") -> dict[str, Any]:
        """What `builder.sandboxed` needs to run a shell script in the source's directory."""
        source, name = self._source, f"ssh-{self.order.name}-{unit}"
        words, files = ssh.client(name, source.port, source.identity_file, source.known_hosts)
        argv = [*words, f"{source.user}@{source.host}", f"cd -- {shlex.quote(source.path)} && {script}"]
        return {"argv": argv, "unit": name, "network": "any", "properties": files}

    def _answer(self, script: str, stdin: bytes = b"") -> list[str]:
        """The items of a script's output, which end with NUL."""
        said = bytearray()
        with builder.sandboxed(**self._remote(script)) as command:
            code, why = children.run(command, self.stop, said, given=stdin)
        if code:
            raise RigctlError(
                f"{self.name} cannot be read: {one_line(why)}; check the path, the host key and the SSH key"
            )
        return [os.fsdecode(item) for item in bytes(said).split(b"\0") if item]

    def listing(self) -> Manifest:
        """Sizes by find, sha256 on all cores of the other host."""
        listed = [item.partition(" ") for item in self._answer(r"find . -type f -printf '%s %P\0'")]
        try:
            sizes = {name: int(size) for size, _, name in listed if self._source.selects(name)}
        except ValueError:
            raise SourceWrong(f"{self.name}: what it lists is no list of files") from None
        if not sizes:
            raise RigctlError(f"{self.name} has no file that the patterns select")
        names = b"\0".join(os.fsencode(f"./{name}") for name in sizes)
        hashed = self._answer('xargs -0 -n 1 -P "$(nproc)" sha256sum --zero --', names)
        digests = {name: digest for digest, _, name in (item.partition("  ./") for item in hashed)}
        if digests.keys() != sizes.keys():
            raise RigctlError(f"{self.name}: of {len(sizes)} files others or fewer were hashed: it changes")
        entries = [{"path": name, "size": size, "sha256": digests[name]} for name, size in sizes.items()]
        return Manifest.listed(self.name, None, entries)

    def attempt(self, entry: File, group: int, sink: Sink) -> None:
        script = f"exec tail -c +{sink.offset + 1} -- {shlex.quote(f'./{entry.path}')}"
        with builder.sandboxed(**self._remote(script, sink.part.name)) as command:
            code, why = children.run(command, self.stop, sink, stall=self.order.stall)
        if code and not any(text in why for text in ssh.REFUSALS) and code in ssh.TRANSIENT:
            raise Transient(f"{self.name}: {one_line(why)}")
        if code:
            raise SourceWrong(f"{self.name}: {entry.path}: {one_line(why)}")


class Generator(Origin):
    """A rigctl subcommand that makes the files (the sandbox's tiny checkpoints)."""

    def listing(self) -> Manifest | None:
        """Only known after the files are made."""
        return None

    def fill(self, directory: Path) -> None:
        """Leave all files below a directory."""
        command = own_process("rigctl", "tiny-model", self.name.partition(":")[2], str(directory))
        code, reason = children.run(command, self.stop)
        if code:
            raise SourceWrong(f"{self.name} ended with {code}: {reason}")


FileSource = Hub | Http | Ssh | Local
"""Files one by one; `fetch` continues at the sink's offset."""


def open_source(order: CheckpointJob, progress: Progress, stop: Event) -> FileSource | Generator:
    """The source that an order names. Raises RigctlError for one that is fetched from nowhere."""
    match order.source:
        case HubSource() as source:
            return Hub(source, order, progress, stop)
        case HttpSource() as source:
            return Http(source, order, progress, stop)
        case LocalSource() as source:
            return Local(source, order, progress, stop)
        case RsyncSource() as source:
            return Ssh(source, order, progress, stop)
        case GeneratorSource():
            return Generator(order, progress, stop)
    raise RigctlError(f"{order.name} is taken as it lies: put its files into {order.destination}")
