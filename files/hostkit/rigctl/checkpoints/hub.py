"""A hub repository at a pinned commit: listing and addresses by huggingface_hub, bodies by our own fetcher.

The hub's chunked transfer (hf_xet) is a process of its own, the builder's: it has been seen to hang (xet-core#883).
When it stalls or fails, http takes over where it ended.
"""

import json
import os
import time
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from threading import Event
from typing import Any

from rigctl import builder
from rigctl.checkpoints import children
from rigctl.checkpoints.http import (
    CONNECT_TIMEOUT,
    ENDLESS,
    LISTING_SECONDS,
    HttpFetcher,
    Location,
    Refused,
    Transient,
    UnansweredError,
    bounded,
    digests_by,
    fault_of,
    origin_of,
    secret_text,
    secure,
    server_of,
)
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sink import Sink, SourceWrong
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.foreign import one_line
from rigctl.contract.manifest import File, Manifest
from rigctl.contract.sources import HubSource
from rigctl.errors import RigctlError
from rigctl.own_process import own_process

HUGGING_FACE = "https://huggingface.co"
MOST_FILES = 100_000
ANSWER_SECONDS = 60.0
XET_FROM = 64 << 20  # bytes; smaller files are not worth a process
XET_ERRORS = 2  # failures after which a job stops trying it


_TOKEN_FOR: set[tuple[str, str | None, int]] = set()
"""Servers that get a token: those of endpoints, over https."""
_LISTING: ContextVar[tuple[str, float]] = ContextVar("listing", default=("", 0.0))
"""What is being listed, and until when: then every answer must come over https, and have an end."""


def _guard(request: Any) -> None:
    """Before each request of the client, redirects included: who may get the token, and whom digests may come from."""
    if server_of(str(request.url)) not in _TOKEN_FOR:
        request.headers.pop("authorization", None)
    what, end = _LISTING.get()
    if what:
        digests_by(str(request.url), what)
        if time.monotonic() > end:
            raise SourceWrong(ENDLESS)
    # Left to itself the client waits for an answer for ever.
    waits = request.extensions.get("timeout", {}).items()
    request.extensions["timeout"] = {kind: ANSWER_SECONDS if seconds is None else seconds for kind, seconds in waits}


def _listed(response: Any) -> None:
    """Read each answer of a list, before the client does: all it keeps is what its own read() would."""
    if _LISTING.get()[0]:
        vars(response)["_content"] = b"".join(bounded(response.iter_bytes()))


def client(*tokens_for: str) -> Any:
    """huggingface_hub, told not to look for anybody's token and not to report usage. tokens_for: addresses of servers
    that may get the token; those that are not https get none."""
    os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"  # noqa: S105 a switch
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    import huggingface_hub  # noqa: PLC0415 the environment must be set before

    _TOKEN_FOR.update(map(server_of, filter(secure, tokens_for)))
    http = _http_library()
    hooks = {"request": [_guard], "response": [_listed]}
    huggingface_hub.set_client_factory(lambda: http.Client(event_hooks=hooks, follow_redirects=True, timeout=None))
    return huggingface_hub


class Hub(HttpFetcher):
    """One repository. `_candidates`: the endpoint, which alone tells digests, then mirrors, which only send files."""

    def __init__(self, source: HubSource, order: CheckpointJob, progress: Progress, stop: Event) -> None:
        super().__init__(order, progress, stop)
        self.source = source
        endpoint = source.endpoint or HUGGING_FACE
        self._client = client(endpoint)
        # Who sets HF_ENDPOINT has a mirror of Hugging Face in mind.
        mirrors = [source.mirror, None if source.endpoint else os.environ.get("HF_ENDPOINT")]
        self._candidates = list(dict.fromkeys([endpoint, *filter(None, mirrors)]))
        self._token = secret_text(order.token)
        if self._token and not secure(endpoint):
            progress.event(f"{endpoint} is not https: it gets no token")
        self._preferred = 0  # the candidate that answered last: a dead endpoint is not asked for every file
        self._xet_failures = 0
        self._revision = source.revision

    @property
    def revision(self) -> str:
        """The commit that is fetched; resolves `main` once if the spec allows that."""
        if self._revision is None:
            if not self.source.allow_unpinned:
                raise RigctlError(
                    f"{self.source.repository} has no pinned revision: pin it (and its manifest) in the "
                    "inventory, or set allow_unpinned to take what the hub calls main today"
                )
            self._revision = str(self._ask(lambda api: api.model_info(self.source.repository).sha))
            self.progress.event(f"{self.source.repository}: main is {self._revision} now; pin it")
        return self._revision

    def listing(self) -> Manifest:
        """All files of the revision with sizes and digests, from the hub."""
        revision = self.revision
        files = self._ask(
            lambda api: list(
                islice(api.list_repo_tree(self.source.repository, revision=revision, recursive=True), MOST_FILES + 1)
            )
        )
        if len(files) > MOST_FILES:
            raise SourceWrong(f"{self.name}: more than {MOST_FILES} files are listed: it is no checkpoint")
        return Manifest.listed(self.name, revision, [_file(item) for item in files if hasattr(item, "blob_id")])

    def _ask(self, question: Any) -> Any:
        """Ask the endpoint, with retries. A mirror is not asked: it would vouch for what it sends itself."""
        endpoint = self._candidates[0]
        digests_by(endpoint, self.source.repository)
        api = self._client.HfApi(endpoint=endpoint, token=self._token_for(endpoint) or False)
        for attempt in range(self.order.retries + 1):
            listing = _LISTING.set((self.source.repository, time.monotonic() + LISTING_SECONDS))
            try:
                return self._translated(lambda: question(api), self.source.repository, endpoint)
            except Transient as error:
                last = error
            finally:
                _LISTING.reset(listing)
            if attempt < self.order.retries:
                self.pause(self.source.repository, attempt + 1, last, last.wait)
        mirrors = "; a mirror sends files, but its digests prove nothing: " if self._candidates[1:] else "; "
        raise UnansweredError(
            f"{self.source.repository}: {endpoint} cannot be asked: {last}{mirrors}`make pin` where it can be reached "
            "writes a manifest, and then it need not be asked"
        )

    def _token_for(self, endpoint: str) -> str | None:
        """The token belongs to the endpoint, over https, never to a mirror."""
        return self._token if endpoint == self._candidates[0] and secure(endpoint) else None

    def _translated(self, call: Any, what: str, origin: str) -> Any:
        """Run a client call; its errors become Refused, SourceWrong or Transient."""
        errors = self._client.errors
        try:
            return call()
        except errors.GatedRepoError as error:
            raise Refused(f"{what}: gated at {origin}: accept its terms with the token's account") from error
        except errors.RevisionNotFoundError as error:
            raise SourceWrong(f"{what}: {origin} does not know revision {self._revision}") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 599
            wait = error.response.headers.get("Retry-After") if error.response is not None else None
            raise fault_of(status, origin, what, wait) from error
        except (OSError, _http_library().HTTPError) as error:
            raise Transient(f"{origin}: {type(error).__name__}: {str(error)[:160]}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise SourceWrong(f"{what}: {origin} answers as no hub does ({type(error).__name__})") from error

    def fetch(self, entry: File, sink: Sink) -> None:
        """Fill the sink, by xet where that is wanted, the rest by http."""
        if sink.offset < entry.size and (data := self._xet_data(entry)) is not None:
            self._by_xet(entry, sink, data)
        super().fetch(entry, sink)

    def locate(self, entry: File, group: int) -> Location:
        """Where the endpoint, or in later groups the mirror, sends us for the file."""
        chosen = (self._preferred + group) % len(self._candidates)
        endpoint = self._candidates[chosen]
        metadata, origin = self._metadata(entry, endpoint)
        self._preferred = chosen
        same_host = server_of(metadata.location) == server_of(origin)
        token = self._token_for(endpoint) if same_host else None
        return Location(metadata.location, origin, token, signed=not same_host)

    def _metadata(self, entry: File, endpoint: str) -> tuple[Any, str]:
        """The client's HEAD of a file: where it is, and whether it is the revision's."""
        url = self._client.hf_hub_url(self.source.repository, entry.path, revision=self.revision, endpoint=endpoint)
        origin = origin_of(url)
        metadata = self._translated(
            lambda: self._client.get_hf_file_metadata(
                url, token=self._token_for(endpoint) or False, timeout=CONNECT_TIMEOUT, endpoint=endpoint
            ),
            entry.path,
            origin,
        )
        if metadata.commit_hash and metadata.commit_hash != self.revision:
            raise SourceWrong(
                f"{entry.path}: {origin} answers for commit {metadata.commit_hash}, wanted {self.revision}"
            )
        if metadata.size is not None and metadata.size != entry.size:
            raise SourceWrong(
                f"{entry.path}: {metadata.size} bytes at {origin}, {entry.size} in the manifest: "
                "the manifest is not of this revision"
            )
        return metadata, origin

    def _xet_data(self, entry: File) -> Any:
        """What the chunked transfer needs to know of a file; None where it is not used."""
        if self.source.transfer == "http" or entry.size < XET_FROM or self._xet_failures >= XET_ERRORS:
            return None
        if find_spec("hf_xet") is None:
            return None
        with suppress(Transient):
            return self._metadata(entry, self._candidates[0])[0].xet_file_data
        return None

    def _by_xet(self, entry: File, sink: Sink, data: Any) -> None:
        request = {
            "endpoint": self._candidates[0],
            "token": self._token_for(self._candidates[0]),
            "size": entry.size,
            "offset": sink.offset,
            "file_hash": data.file_hash,
            "refresh_route": data.refresh_route,
        }
        child = own_process("rigctl.checkpoints.xet")
        with builder.sandboxed(child, unit=f"xet-{sink.part.name}", network="any") as command:
            # The token is in no file and no list of processes.
            _, why = children.run(command, self.stop, sink, given=json.dumps(request).encode(), stall=self.order.stall)
        if sink.offset < entry.size:
            self._xet_failures += 1
            why = one_line(why, 200)
            why += ": was the token revoked?" if self._token and any(code in why for code in ("401", "403")) else ""
            self.progress.event(f"{entry.path}: chunked transfer failed ({why}); http takes over", retry=True)


def _file(item: Any) -> dict[str, Any]:
    proof = {"git_sha1": item.blob_id} if item.lfs is None else {"sha256": item.lfs.sha256}
    return {"path": item.path, "size": item.size, **proof}


def _http_library() -> Any:
    """The HTTP library that the installed huggingface_hub uses."""
    return import_module("httpx2" if find_spec("httpx2") else "httpx")
