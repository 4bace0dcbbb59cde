"""Fetch one file over HTTP: ranges, validators, retries. The part of the hub's client that is missing.

huggingface_hub 2.4.0 removes its partial file when a download fails and starts the next one at byte 0
(file_download.py `_download_to_tmp_and_move`; huggingface_hub#4196): not good enough for shards of 9 GB.
"""

import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from urllib3.connection import HTTPConnection

from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sink import Sink, SourceWrong
from rigctl.checkpoints.verify import Cancelled
from rigctl.contract.checkpoint_job import CheckpointJob, Secret
from rigctl.contract.manifest import File
from rigctl.contract.sources import described
from rigctl.errors import RigctlError

CONNECT_TIMEOUT = 20.0  # seconds
LONGEST_WAIT = 300.0  # seconds; a server may ask for less, not for more
PROBE_BYTES = 8 << 20  # at most; they are fetched again, 0.001 % of the model
PROBE_SECONDS = 3.0
WASTE = 1 / 400  # share of a checkpoint that may lie in receive buffers
SMALLEST_WINDOW, LARGEST_WINDOW = 256 << 10, 8 << 20  # bytes
SO_RCVBUFFORCE = 33  # not in Python's socket module
SWITCH_AFTER = 2  # failures without a byte before the next address is tried
LISTING_BYTES = 16 << 20  # of a source's list of files: about 100,000 names
LISTING_SECONDS = 900.0
ENDLESS = f"what the source says has no end: more than {LISTING_BYTES >> 20} MiB, or {LISTING_SECONDS:.0f} s"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Refused(RigctlError):
    """401 or 403: the credential does not open this source."""


class GaveUp(RigctlError):
    """Retries used up without one more byte."""


class UnansweredError(RigctlError):
    """The source cannot be asked for its list: no line, or it is out of order."""


class Transient(Exception):
    """Worth another attempt; `wait` is what the server asked for, in seconds."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Location:
    """Where a file is now. `origin` names the server that answers for it, `token` goes to `url`'s host only;
    `signed`: a storage link that runs out, so that a refusal means: ask for a new one."""

    url: str
    origin: str
    token: str | None = None
    signed: bool = False


def secure(url: str) -> bool:
    """Whether who answers at an address proves to be it: only then it gets a token, or tells digests."""
    return urlsplit(url).scheme == "https"


def server_of(url: str) -> tuple[str, str | None, int]:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def bearer(token: str | None, request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Our token or none; as an `auth` it also keeps requests from taking one out of ~/.netrc."""
    request.headers.update({"Authorization": f"Bearer {token}"} if token and secure(request.url or "") else {})
    return request


class Session(requests.Session):
    """A token stays with the server that it was meant for."""

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """A redirect's request: requests itself would look for a password in ~/.netrc."""
        if server_of(str(response.request.url)) != server_of(str(prepared_request.url)):
            prepared_request.headers.pop("Authorization", None)


def digests_by(url: str, what: str) -> None:
    """Raise UnansweredError unless what is listed at this address proves files."""
    if not secure(url):
        raise UnansweredError(
            f"{what}: {url} is not https, so the digests that it lists prove nothing: give an https address (a CA of "
            "your own by SSL_CERT_FILE in the host's /etc/environment), or put a manifest into inventory/manifests"
        )


class Adapter(requests.adapters.HTTPAdapter):
    """Connections whose receive buffers are at most `window` bytes (None: no limit)."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **keys: Any) -> None:
        """Hand the socket options on, also to connections by proxy."""
        if self._window is not None:
            keys["socket_options"] = [*HTTPConnection.default_socket_options, _receive_buffer(self._window)]
        super().init_poolmanager(*arguments, **keys)


def _receive_buffer(size: int) -> tuple[int, int, int]:
    """The socket option; root may go beyond net.core.rmem_max (socket(7), SO_RCVBUFFORCE)."""
    forced = (socket.SOL_SOCKET, SO_RCVBUFFORCE, size)
    with socket.socket() as trial:
        try:
            trial.setsockopt(*forced)
        except OSError:
            return (socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    return forced


class Origin:
    """Where an order's files come from; `name` says it in records and messages."""

    def __init__(self, order: CheckpointJob, progress: Progress, stop: threading.Event) -> None:
        self.order = order
        self.progress = progress
        self.stop = stop
        self.name = f"{order.source.kind}:{described(order.source)}"

    def pause(self, what: str, failures: int, reason: object, wait: float | None = None) -> None:
        """Wait before the next attempt, at least `wait` seconds if the server asked for that. Raises Cancelled."""
        jitter = random.uniform(0.8, 1.2)  # noqa: S311  # spreads the workers, no secret
        delay = min(self.order.backoff * 2 ** (failures - 1), 60.0) * jitter
        if wait is not None:
            delay = min(max(delay, wait), LONGEST_WAIT)
        self.progress.event(f"{what}: {reason}; again in {delay:.1f} s", retry=True)
        if self.stop.wait(delay):
            raise Cancelled


class Fetcher(Origin):
    """Fetches files one by one, and resumes inside them."""

    def attempt(self, entry: File, group: int, sink: Sink) -> None:
        """Go on where `sink` is. group: 0, and one more whenever another address shall be tried. Raises Transient."""
        raise NotImplementedError

    def fetch(self, entry: File, sink: Sink) -> None:
        """Fill `sink`. Raises Refused, GaveUp, SourceWrong, DiskFull, Cancelled."""
        failures = group = 0
        while sink.offset < entry.size:
            before = sink.offset
            try:
                self.attempt(entry, group, sink)
                if sink.offset < entry.size:
                    raise Transient(f"the line ended at byte {sink.offset} of {entry.size}")
            except Transient as error:
                failures = 1 if sink.offset > before else failures + 1
                if failures > self.order.retries:
                    raise GaveUp(
                        f"{entry.path}: gave up after {failures} attempts without progress, last: {error}; "
                        "what is fetched is kept, run the job again"
                    ) from error
                group = failures // SWITCH_AFTER
                self.pause(entry.path, failures, error, error.wait)


class HttpFetcher(Fetcher):
    """Fetches files over HTTP; one session a worker thread."""

    def __init__(self, order: CheckpointJob, progress: Progress, stop: threading.Event) -> None:
        super().__init__(order, progress, stop)
        self._local = threading.local()

    def locate(self, entry: File, group: int) -> Location:
        """Where a file is now. group: as for `attempt`."""
        raise NotImplementedError

    def attempt(self, entry: File, group: int, sink: Sink) -> None:
        self._stream(self.locate(entry, group), entry, sink)

    def session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = Session()
            for scheme in ("http://", "https://"):
                self._local.session.mount(scheme, Adapter(self._window()))
        session: requests.Session = self._local.session
        return session

    def _window(self) -> int | None:
        """Bytes of receive buffer a connection: what a kill loses of it is fetched again. None: as the kernel tunes it.

        Only a small checkpoint, of which full buffers would be more than WASTE, gets less than a fast line can use.
        """
        share = int(self.progress.total * WASTE) // self.order.workers
        return max(share, SMALLEST_WINDOW) if 0 < share < LARGEST_WINDOW else None

    def open(self, location: Location, headers: dict[str, str]) -> requests.Response:
        """GET with the body left on the line; connection trouble is Transient."""
        try:
            return self.session().get(
                location.url,
                headers={"Accept-Encoding": "identity", **headers},
                auth=partial(bearer, location.token),
                stream=True,
                timeout=(CONNECT_TIMEOUT, self.order.stall),
                verify=os.environ.get("SSL_CERT_FILE") or None,  # as the hub's client; requests knows other names only
            )
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise SourceWrong(f"{location.origin} gives an address that cannot be used: {error}") from error
        except requests.exceptions.TooManyRedirects as error:
            raise SourceWrong(f"{location.origin} redirects in a circle") from error
        except requests.RequestException as error:
            raise Transient(f"{location.origin}: {_short(error)}") from error

    def _stream(self, location: Location, entry: File, sink: Sink) -> None:
        headers = {}
        known = sink.validator()
        if sink.offset:
            headers["Range"] = f"bytes={sink.offset}-"
            if known and known.startswith(f'{location.origin} "'):
                headers["If-Range"] = known.removeprefix(f"{location.origin} ")
        with self.open(location, headers) as response:
            if response.status_code == 416:
                sink.restart("the source's file is shorter than what is here")
                raise Transient(f"{location.origin} answers 416")
            check_status(response, location, entry.path)
            self._accept(response, location, entry, sink, known)
            decode = response.headers.get("Content-Encoding", "identity") != "identity"
            try:
                # read1 gives what has arrived: read would lose a part of a block when the line breaks
                while block := response.raw.read1(sink.limiter.block(), decode_content=decode):
                    sink.write(block)
            except (urllib3.exceptions.HTTPError, requests.RequestException, ConnectionError, TimeoutError) as error:
                raise Transient(f"the line broke at byte {sink.offset}: {_short(error)}") from error

    def _accept(
        self, response: requests.Response, location: Location, entry: File, sink: Sink, known: str | None
    ) -> None:
        """Make sure that the body continues what the sink has, else restart the sink or refuse."""
        start, total = body_extent(response)
        if total is not None and total != entry.size:
            raise SourceWrong(
                f"{entry.path}: {total} bytes at {location.origin}, {entry.size} in the manifest: "
                "the source is not at the manifest's revision"
            )
        etag = response.headers.get("ETag", "")
        validator = f"{location.origin} {etag}" if etag else None
        changed = known and validator and known.split(" ")[0] == location.origin and known != validator
        if sink.offset and (start == 0 or changed):
            sink.restart("the source's file changed" if changed else "the source sends the file from its start")
        if start != sink.offset:
            raise Transient(f"{location.origin} answered from byte {start}, wanted {sink.offset}")
        if validator and sink.offset == 0:
            sink.remember(validator)

    def probe(self, entry: File) -> float:
        """Bytes a second of one connection, from at most PROBE_BYTES bytes; 0 if it cannot be measured."""
        started = time.monotonic()
        count = 0
        try:
            location = self.locate(entry, 0)
            with self.open(location, {"Range": f"bytes=0-{PROBE_BYTES - 1}"}) as response:
                response.raise_for_status()
                for block in response.raw.stream(1 << 16, decode_content=False):
                    count += len(block)
                    if count >= PROBE_BYTES or time.monotonic() - started > PROBE_SECONDS:
                        break
                response.close()
        except (Transient, requests.RequestException, urllib3.exceptions.HTTPError, OSError):
            return 0.0
        self.progress.fetched += count
        return count / max(time.monotonic() - started, 1e-6)


def bounded(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks of a list of files. Raises SourceWrong where it has no end, in bytes or in time."""
    end, left = time.monotonic() + LISTING_SECONDS, LISTING_BYTES
    for block in blocks:
        left -= len(block)
        if left < 0 or time.monotonic() > end:
            raise SourceWrong(ENDLESS)
        yield block


def secret_text(secret: Secret | None) -> str | None:
    """The secret's text; None where none is ordered. Raises RigctlError when it cannot be read."""
    if secret is None:
        return None
    place = _secret_place(secret)
    try:
        if secret.file is not None and place.stat().st_mode & 0o077:
            raise RigctlError(f"{place} can be read by others: chmod 600 it")
        found = place.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RigctlError(f"secret {place} cannot be read: {error.strerror}") from error
    if not found:
        raise RigctlError(f"secret {place} is empty")
    return found


def _secret_place(secret: Secret) -> Path:
    if secret.file is not None:
        return Path(secret.file)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise RigctlError(
            f"credential {secret.credential!r} is wanted, but $CREDENTIALS_DIRECTORY is not set: "
            "start the job through its systemd unit (LoadCredential=)"
        )
    return Path(directory) / str(secret.credential)


def body_extent(response: requests.Response) -> tuple[int, int | None]:
    """(first byte, size of the whole file or None) that a 200 or 206 answer announces."""
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not match:
            raise Transient("partial answer without a readable Content-Range")
        return int(match[1]), None if match[3] == "*" else int(match[3])
    length = response.headers.get("Content-Length", "")
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    return 0, int(length) if length.isdigit() and not encoded else None


def check_status(response: requests.Response, location: Location, what: str) -> None:
    """Turn an HTTP status into Refused, SourceWrong or Transient."""
    signed = location.signed or urlsplit(response.url).netloc != urlsplit(location.url).netloc
    if response.status_code not in (200, 206):
        raise fault_of(response.status_code, location.origin, what, response.headers.get("Retry-After"), signed=signed)


def fault_of(status: int, origin: str, what: str, retry_after: str | None, *, signed: bool = False) -> Exception:
    """The fault that an HTTP status means: Refused, SourceWrong or Transient.

    signed: the answer is from a storage server, whose link may simply have run out. retry_after: seconds, or a date.
    """
    if status in (401, 403) and not signed:
        return Refused(
            f"{what}: {origin} answers {status}: the token is missing, wrong, expired or revoked, or lacks access; "
            "what is fetched is kept: put a valid token into the file that hub_token_file names and deploy again, or "
            "run the job again"
        )
    if status in (401, 403):
        return Transient(f"{origin} answers {status}: its link has run out, or the token behind it was revoked")
    if status in (408, 425, 429) or status >= 500:
        return Transient(f"{origin} answers {status}", seconds_of(retry_after))
    missing = status in (404, 410)
    return SourceWrong(f"{what}: {origin} {f'does not have it ({status})' if missing else f'answers {status}'}")


def seconds_of(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header (a number or a date) asks for; None without one that can be read."""
    try:
        return urllib3.Retry().parse_retry_after(retry_after) if retry_after else None
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return None


def origin_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _short(error: BaseException) -> str:
    """The innermost reason, without addresses (they may be signed)."""
    text = str(error.args[0]) if error.args else type(error).__name__
    text = re.sub(r"https?://\S+|/\S*\?\S+", "...", text)
    return f"{type(error).__name__}: {text[:160]}"
