"""A proof comes by another channel than the bytes: whom digests come from, who gets the token, what a mirror may do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rigctl.contract.manifest import Manifest
from rigctl.errors import RigctlError
from tests.staging.conftest import Bench, http_source, hub_source, same_files
from tests.staging.hubserver import TOKEN, Hub
from tests.support.certificates import server_context

NOWHERE = "https://127.0.0.1:9"


@pytest.fixture
def mirror(checkpoint: Path, tmp_path: Path) -> Iterator[Hub]:
    """A hub of somebody else's, that sends and lists code of his own."""
    root = tmp_path / "mirrored"
    shutil.copytree(checkpoint, root)
    (root / "tool_declaration.py").write_text("import os; os.system('id')\n")
    made = Hub(root)
    yield made
    made.close()


@pytest.fixture
def plain(checkpoint: Path) -> Iterator[Hub]:
    """The right files without TLS."""
    made = Hub(checkpoint, tls=False)
    yield made
    made.close()


@pytest.fixture
def token(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    return {"file": str(tmp_path / "token")}


def carried(hub: Hub) -> list[str]:
    """Paths that were asked for with the token."""
    return [path for _, path, headers in hub.requests if TOKEN in json.dumps(headers)]


def test_a_mirror_tells_no_digests(bench: Bench, mirror: Hub) -> None:
    with pytest.raises(RigctlError, match=r":9 cannot be asked: .*a mirror sends files, but its digests prove"):
        bench.stage(hub_source(NOWHERE, mirror=mirror.address), retries=0)
    assert mirror.requests == [] and not bench.destination.exists()


def test_a_mirror_names_no_revision(bench: Bench, mirror: Hub) -> None:
    with pytest.raises(RigctlError, match="cannot be asked"):
        bench.stage(hub_source(NOWHERE, mirror=mirror.address, revision=None, allow_unpinned=True), retries=1)
    assert mirror.requests == []


def test_the_code_of_a_hostile_mirror_is_not_taken(bench: Bench, hub: Hub, mirror: Hub, token: dict[str, str]) -> None:
    pinned = bench.pin(hub)
    with pytest.raises(RigctlError, match=r"tool_declaration.py"):
        bench.stage(hub_source(NOWHERE, mirror=mirror.address), manifest=pinned, token=token, retries=3)
    assert not bench.destination.exists() and carried(mirror) == []
    assert all("tree" not in path and "api" not in path for _, path, _ in mirror.requests)


def test_hf_endpoint_is_a_mirror(bench: Bench, hub: Hub, mirror: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What /etc/environment of the host sets sends files, but names no revision and tells no digest."""
    monkeypatch.setattr("rigctl.checkpoints.hub.HUGGING_FACE", hub.address)
    monkeypatch.setenv("HF_ENDPOINT", mirror.address)
    source = {key: value for key, value in hub_source("").items() if key != "endpoint"}
    assert bench.stage(source).state == "staged"
    assert mirror.requests == []


@pytest.mark.parametrize("source", [hub_source, http_source])
def test_a_list_that_did_not_come_over_https_proves_nothing(bench: Bench, plain: Hub, source: Any) -> None:
    with pytest.raises(RigctlError, match=r"is not https, so the digests that it lists prove nothing"):
        bench.stage(source(plain.address))
    assert plain.requests == []


@pytest.mark.parametrize("source", [hub_source, http_source])
def test_files_that_a_manifest_proves_come_by_any_line_without_the_token(
    bench: Bench, hub: Hub, plain: Hub, token: dict[str, str], source: Any
) -> None:
    pinned = bench.pin(hub)
    assert bench.stage(source(plain.address), manifest=pinned, token=token).state == "staged"
    assert same_files(bench.destination, plain.root)
    assert plain.requests and carried(plain) == []
    assert bench.state.require("tiny").digests_from == "manifest"


class Redirect(BaseHTTPRequestHandler):
    """Sends whoever asks elsewhere."""

    to = ""

    def do_GET(self) -> None:
        self.send_response(307)
        self.send_header("Location", f"{self.to}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def redirect() -> Iterator[tuple[str, type[Redirect]]]:
    handler = type("To", (Redirect,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = server_context().wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("source", [hub_source, http_source])
def test_a_redirect_to_plain_http_lists_nothing(
    bench: Bench, plain: Hub, redirect: tuple[str, type[Redirect]], source: Any
) -> None:
    address, handler = redirect
    handler.to = plain.address
    with pytest.raises(RigctlError, match=r"is not https, so the digests"):
        bench.stage(source(address), retries=0)
    assert not bench.destination.exists()


@pytest.mark.parametrize("source", [hub_source, http_source])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_redirect_to_another_server_carries_no_token(
    bench: Bench, hub: Hub, redirect: tuple[str, type[Redirect]], source: Any, scheme: str
) -> None:
    """Nor a password out of root's ~/.netrc."""
    for name, text in (("token", TOKEN), (".netrc", f"machine 127.0.0.1 login root password {TOKEN}\n")):
        (bench.root / name).write_text(text)
        (bench.root / name).chmod(0o600)
    token = {"file": str(bench.root / "token")}
    address, handler = redirect
    elsewhere = hub if scheme == "https" else Hub(hub.root, tls=False)
    handler.to = elsewhere.address
    pinned = bench.pin(hub)
    hub.requests.clear()
    # The hub's client takes another server for a storage, whose link is the file itself.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(bench.root))
        bench.stage(source(address), manifest=pinned, token=token, retries=1)
    sent = [headers.get("Authorization") for _, _, headers in elsewhere.requests]
    elsewhere.close()
    assert sent and set(sent) == {None}


def test_the_token_goes_to_the_endpoint_alone(bench: Bench, hub: Hub, mirror: Hub, token: dict[str, str]) -> None:
    hub.token = TOKEN
    assert bench.stage(hub_source(hub.address, mirror=mirror.address), token=token).state == "staged"
    assert carried(hub) and carried(mirror) == []


def of_version_0_2_0(bench: Bench, address: str, mirror: Hub) -> dict[str, Any]:
    """A checkpoint as 0.2.0 left it: nothing says whom its digests came from."""
    bench.stage(hub_source(address))
    place = bench.state.record_path("tiny")
    kept = json.loads(place.read_text())
    del kept["digests_from"]
    place.write_text(json.dumps(kept))
    return hub_source(address, mirror=mirror.address)


def test_a_record_of_the_endpoints_digests_stays_valid(bench: Bench, hub: Hub, mirror: Hub) -> None:
    source = of_version_0_2_0(bench, hub.address, mirror)
    sent = hub.total_sent()
    assert bench.stage(source).state == "present"
    assert bench.state.require("tiny").digests_from == "source" and hub.total_sent() == sent
    hub.requests.clear()
    assert bench.stage(source).state == "present" and hub.requests == []


def test_a_record_without_a_mirror_is_not_asked_about(bench: Bench, hub: Hub, mirror: Hub) -> None:
    of_version_0_2_0(bench, hub.address, mirror)
    hub.requests.clear()
    assert bench.stage(hub_source(hub.address)).state == "present" and hub.requests == []


def test_a_record_of_a_mirrors_digests_is_refused(bench: Bench, hub: Hub, mirror: Hub) -> None:
    """Also where it lists other kinds of digest, which contradict none of the endpoint's."""
    source = of_version_0_2_0(bench, mirror.address, mirror) | {"endpoint": hub.address}
    with pytest.raises(RigctlError, match=r"(?s)that its mirror .* told, and they are wrong:.*tool_declaration"):
        bench.stage(source)
    record = bench.state.require("tiny")
    listed = [
        file.model_copy(update={"sha256": "0" * 64, "git_sha1": None}) if file.path.endswith(".py") else file
        for file in record.manifest.files
    ]
    record.manifest = Manifest.listed(record.manifest.source, record.manifest.revision, listed)
    bench.state.save(record)
    with pytest.raises(RigctlError, match=r"(?s)and they are wrong:.*tool_declaration"):
        bench.stage(source)


def test_a_pinned_manifest_takes_the_endpoints_place(bench: Bench, hub: Hub, mirror: Hub) -> None:
    source = of_version_0_2_0(bench, hub.address, mirror) | {"endpoint": NOWHERE}
    with pytest.raises(RigctlError, match="`make pin` where it can be reached writes a manifest"):
        bench.stage(source, retries=0)
    assert bench.stage(source, manifest=bench.pin(hub)).state == "present"
    assert bench.state.require("tiny").digests_from == "manifest"
