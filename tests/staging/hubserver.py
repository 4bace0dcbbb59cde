"""The smallest hub that the real client accepts, on loopback, with faults on demand.

Two servers: the hub (API, `resolve` with redirects and X-Linked-* headers) and its storage (ranges, ETag,
If-Range). The hub also serves the files plainly below /plain/, with a manifest, for the http source.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.certificates import server_context

COMMIT = "c0ffee" + "0" * 34
REPOSITORY = "lab/tiny"
TOKEN = "hf_secret"
LFS = (".safetensors", ".model")


@dataclass
class Fault:
    """What to do to requests of a path: answer `status`, or cut after `cut` bytes; `times` requests long.

    `only_after` bytes of the whole run were sent."""

    status: int | None = None
    cut: int | None = None
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    only_after: int = 0


class Hub:
    """Serve one directory as REPOSITORY at COMMIT. `sent` counts body bytes by path."""

    def __init__(
        self, root: Path, *, token: str | None = None, send_buffer: int | None = None, tls: bool = True
    ) -> None:
        self.root = root
        self.tls = tls
        self.send_buffer = send_buffer
        self.token = token
        self.commit = COMMIT
        self.ranges = True
        self.xet = False
        self.xet_hashes: dict[str, str] = {}
        self.xet_storage: str | None = None
        self.faults: dict[str, Fault] = {}
        self.replaced: dict[str, Path] = {}
        self.listed_sizes: dict[str, int] = {}
        self.extra_listed: list[dict[str, Any]] = []
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.sending = 0
        self.storage = _serve(_Storage, self)
        self.hub = _serve(_Front, self)
        scheme = "https" if tls else "http"
        self.address = f"{scheme}://127.0.0.1:{self.hub.server_port}"
        self.storage_address = f"{scheme}://127.0.0.1:{self.storage.server_port}"

    def close(self) -> None:
        """Stop both servers."""
        for server in (self.hub, self.storage):
            server.shutdown()
            server.server_close()

    def paths(self) -> list[str]:
        """All files, relative."""
        return sorted(place.relative_to(self.root).as_posix() for place in self.root.rglob("*") if place.is_file())

    def place(self, path: str) -> Path:
        """The file that is sent for a path."""
        return self.replaced.get(path, self.root / path)

    def digest(self, path: str, kind: str) -> str:
        """sha256 or git blob id of the listed file (not of a replaced one)."""
        place = self.root / path
        status = place.stat()
        return file_digest(place, kind, status.st_size, status.st_mtime_ns)

    @contextlib.contextmanager
    def body_on_its_way(self) -> Iterator[None]:
        """Held while a body is sent and counted."""
        with self.lock:
            self.sending += 1
        try:
            yield
        finally:
            with self.lock:
                self.sending -= 1

    def sent_so_far(self) -> int:
        """Body bytes of files, all paths, while bodies are still on their way."""
        return sum(self.sent.values())

    def settled(self) -> Counter[str]:
        """`sent` once no body is on its way: a client has the last bytes before its server has counted them.

        Raises TimeoutError after 30 s.
        """
        until = time.monotonic() + 30
        while True:
            with self.lock:
                if not self.sending:
                    return self.sent.copy()
            if time.monotonic() > until:
                raise TimeoutError("a file is still being sent")
            time.sleep(0.01)

    def total_sent(self) -> int:
        """Body bytes of files, all paths, once no body is on its way."""
        return self.settled().total()

    def forget_sent(self) -> None:
        """Count from zero again."""
        self.settled()
        self.sent.clear()

    def take_fault(self, path: str) -> Fault | None:
        """The fault that applies to this request, used up by one."""
        with self.lock:
            fault = self.faults.get(path) or self.faults.get("*")
            if fault is None or fault.times <= 0 or sum(self.sent.values()) < fault.only_after:
                return None
            fault.times -= 1
            return fault

    def tree(self) -> list[dict[str, Any]]:
        """The API's listing."""
        listed = []
        for path in self.paths():
            size = self.listed_sizes.get(path, (self.root / path).stat().st_size)
            item: dict[str, Any] = {
                "type": "file",
                "path": path,
                "size": size,
                "oid": self.digest(path, "git"),
            }
            if path.endswith(LFS):
                item["lfs"] = {"oid": self.digest(path, "sha256"), "size": size, "pointerSize": 134}
            else:
                item["oid"] = self.digest(path, "git")
            listed.append(item)
        return listed + self.extra_listed

    def manifest(self) -> dict[str, Any]:
        """The manifest of the plain directory."""
        files = [
            {"path": path, "size": (self.root / path).stat().st_size, "sha256": self.digest(path, "sha256")}
            for path in self.paths()
        ]
        return {"format": 1, "source": "plain", "revision": None, "files": files}


@functools.cache
def file_digest(place: Path, kind: str, size: int, mtime_ns: int) -> str:
    """sha256 or git blob id; a file is hashed once a version, whatever hub serves it."""
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % size)
    with place.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _serve(handler: type[BaseHTTPRequestHandler], hub: Hub) -> ThreadingHTTPServer:
    bound = type(handler.__name__, (handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = True
    if hub.tls:  # a handshake belongs to its connection's thread
        server.socket = server_context().wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """`sent` counts what the kernel takes: a small buffer, so that little of it has not left yet."""
        super().setup()
        if self.hub.send_buffer is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.hub.send_buffer)

    def handle(self) -> None:
        """A client that goes away between two requests is no news."""
        self.quietly(super().handle)

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """A small answer."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        """A JSON answer."""
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def note(self) -> None:
        """Remember the request."""
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path, dict(self.headers.items())))

    def failed(self, path: str) -> Fault | None:
        """Apply a status fault; a cut is given back for `send_file`."""
        fault = self.hub.take_fault(path)
        if fault is not None and fault.status is not None:
            self.answer(fault.status, b"fault", fault.headers)
        return fault

    def send_file(self, path: str, etag: str, fault: Fault | None) -> None:
        """The body with ranges and If-Range, cut where the fault says."""
        place = self.hub.place(path)
        size = place.stat().st_size
        first = 0
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        wanted = self.headers.get("If-Range")
        last = size - 1
        if match and self.hub.ranges and (wanted is None or wanted == f'"{etag}"'):
            first = int(match[1])
            last = min(int(match[2]), last) if match[2] else last
            if first >= size:
                self.answer(416, headers={"Content-Range": f"bytes */{size}"})
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.flush()
        stop = last + 1 if fault is None or fault.cut is None else min(first + fault.cut, last + 1)
        with place.open("rb") as handle, self.hub.body_on_its_way():
            while first < stop:
                if self.hub.tls:
                    handle.seek(first)
                    self.connection.sendall(block := handle.read(min(stop - first, 1 << 16)))
                    sent = len(block)
                else:
                    sent = os.sendfile(self.connection.fileno(), handle.fileno(), first, min(stop - first, 1 << 20))
                if not sent:
                    break
                first += sent
                with self.hub.lock:
                    self.hub.sent[path] += sent
        if stop <= last:
            self.close_connection = True

    def etag(self, path: str) -> str:
        """Changes with the content that is really sent."""
        place = self.hub.place(path)
        return f"{place.stat().st_mtime_ns:x}-{place.stat().st_size:x}-{len(str(place))}"

    def quietly(self, work: Callable[[], None]) -> None:
        """A client that hangs up is no error of the server."""
        try:
            work()
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.close_connection = True

    def do_GET(self) -> None:
        self.note()
        self.quietly(self.serve)

    do_HEAD = do_GET

    def serve(self) -> None:
        raise NotImplementedError


class _Storage(_Handler):
    def serve(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/blob/")
        if "Authorization" in self.headers:
            self.answer(400, b"a signed link must not come with a token")
            return
        fault = self.failed(path)
        if fault is None or fault.status is None:
            self.send_file(path, self.etag(path), fault)


class _Front(_Handler):
    def serve(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer(401, b"no")
            return
        resolve = f"/{REPOSITORY}/resolve/"
        if path.startswith(f"/api/models/{REPOSITORY}"):
            self.api(path.removeprefix(f"/api/models/{REPOSITORY}"))
        elif path.startswith(resolve):
            self.resolve(*path.removeprefix(resolve).split("/", 1))
        elif path == "/api/xet-read-token" and hub.xet_storage:
            words = {"Cas-Url": hub.xet_storage, "Access-Token": "t", "Token-Expiration": str(2**40)}
            self.answer(200, b"", {f"X-Xet-{name}": value for name, value in words.items()})
        elif path == "/plain/manifest.json":
            self.json(hub.manifest())
        elif path.startswith("/plain/") and (hub.root / path.removeprefix("/plain/")).is_file():
            name = path.removeprefix("/plain/")
            fault = self.failed(name)
            if fault is None or fault.status is None:
                self.send_file(name, self.etag(name), fault)
        else:
            self.answer(404, b"nothing here")

    def api(self, rest: str) -> None:
        fault = self.failed("api")
        if fault is not None:
            return
        hub = self.hub
        if rest.startswith("/tree/"):
            if rest.split("/")[2] != hub.commit:
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            self.json(hub.tree())
        elif rest in ("", f"/revision/{hub.commit}", "/revision/main"):
            self.json({"id": REPOSITORY, "sha": hub.commit, "siblings": [], "tags": []})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    def resolve(self, revision: str, path: str) -> None:
        hub = self.hub
        if revision not in (hub.commit, COMMIT):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        if path not in hub.paths():
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        fault = self.failed(f"resolve:{path}")
        if fault is not None:
            return
        headers = {"X-Repo-Commit": hub.commit}
        if path.endswith(LFS):
            size = hub.listed_sizes.get(path, hub.place(path).stat().st_size)
            headers["X-Linked-Size"] = str(size)
            headers["X-Linked-ETag"] = f'"{hub.digest(path, "sha256")}"'
            headers["Location"] = f"{hub.storage_address}/blob/{path}?X-Signature=s3cr3t"
            if hub.xet or path in hub.xet_hashes:
                headers["X-Xet-Hash"] = hub.xet_hashes.get(path) or hub.digest(path, "sha256")
                headers["Link"] = f'<{hub.address}/api/xet-read-token>; rel="xet-auth"'
            self.answer(302, b"", headers)
            return
        if self.command == "HEAD":
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("ETag", f'"{hub.digest(path, "git")}"')
            self.send_header("Content-Length", str(hub.place(path).stat().st_size))
            self.end_headers()
            return
        small = self.failed(path)
        if small is None or small.status is None:
            self.send_file(path, hub.digest(path, "git"), small)


def main() -> None:
    """Serve a directory until stdin closes; the address goes to stdout, and `sent` on each input line."""
    hub = Hub(Path(sys.argv[1]), send_buffer=int(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(json.dumps({"hub": hub.address, "port": hub.hub.server_port}), flush=True)
    for line in sys.stdin:
        if line.strip() == "reset":
            hub.forget_sent()
        print(json.dumps({"sent": hub.total_sent()}), flush=True)
    hub.close()


if __name__ == "__main__":
    main()
