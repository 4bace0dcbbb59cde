"""A host of the previous version that listens beyond loopback with a key: its clients are served on. In this order.

After test_upgrade.py, on the same box, from which all is removed first.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from rig.sandbox import Box
from rigctl.contract import layout
from tests.support.box import PORT
from tests.upgrade.conftest import INVENTORY, Previous, Tree, succeeded, with_data_of
from tests.upgrade.test_upgrade import START_SECONDS, UNIT, Host

OVERLAY = "overlays/sandbox.yaml"
PLACE = f"0.0.0.0:{PORT}"
URL = f"http://127.0.0.1:{PORT}"
CHAT = {
    "model": "/shared/kimi-k2.5-int4",
    "messages": [{"role": "user", "content": "What is a token?"}],
    "max_tokens": 8,
}


class Client:
    """A client that knows one address and one key, and never changes. It asks twice a second and notes each answer."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.found: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            self.found.append(self.models())

    def models(self, key: str | None = None) -> int:
        """Status of one question; 0 where nobody answers."""
        try:
            headers = {"Authorization": f"Bearer {self._key if key is None else key}"}
            return requests.get(f"{URL}/v1/models", headers=headers, timeout=10).status_code
        except requests.RequestException:
            return 0

    def chat(self) -> str:
        """A real answer."""
        headers = {"Authorization": f"Bearer {self._key}"}
        answer = requests.post(f"{URL}/v1/chat/completions", headers=headers, json=CHAT, timeout=60).json()
        message = answer["choices"][0]["message"]
        return str(message["content"] or message.get("reasoning") or "")

    def until_served(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self.models() != 200:
            assert time.monotonic() < end, self.found[-20:]
            time.sleep(0.5)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture(scope="module")
def host(box: Box) -> Host:
    return Host(box)


@pytest.fixture(scope="module")
def key(short_directory: Path) -> Path:
    file = short_directory / "key"
    file.touch(0o600)
    file.write_text(secrets.token_urlsafe(32))
    return file


@pytest.fixture(scope="module")
def tree(host: Host, previous_tree: Previous, this_tree: Tree, key: Path, short_directory: Path) -> Tree:
    """This version, with the inventory of an operator whose engine listens beyond loopback and serves."""
    succeeded(this_tree.run("rig.cli.uninstall", INVENTORY, "--yes"))
    inventory = previous_tree.directory / "inventory"
    overlay = (inventory / OVERLAY).read_text()
    listen = f"listen: {{port: {PORT}}}"
    assert listen in overlay
    (inventory / OVERLAY).write_text(overlay.replace(listen, f"listen: {{host: 0.0.0.0, port: {PORT}}}"))
    with (inventory / "group_data/sandbox.py").open("a") as data:
        data.write(f"\napi_key_file = {str(key)!r}\n")
    succeeded(previous_tree.make("deploy"))
    host.ssh(f"systemctl start {UNIT}")
    return with_data_of(previous_tree, this_tree, short_directory / "edge", OVERLAY)


@pytest.fixture(scope="module")
def client(tree: Tree, key: Path) -> Iterator[Client]:
    found = Client(key.read_text())
    yield found
    found.end()


def listening(host: Host) -> str:
    """Who listens where: addresses with the processes' names."""
    return host.ssh(f"ss -Hltnp 'sport = :{PORT} or sport = :{PORT + 10000}' | awk '{{print $4, $6}}'")


def test_the_plan_shows_what_is_taken_over(host: Host, client: Client, tree: Tree) -> None:
    serving = host.serving()
    plan = tree.plan()
    assert plan.returncode == 2, plan.stdout + plan.stderr
    assert f"{layout.EDGE_UNIT} takes {PLACE} over from" in plan.stdout and f"127.0.0.1:{PORT + 10000}" in plan.stdout
    assert (host.serving(), client.models()) == (serving, 200)


def test_a_deploy_interrupts_no_client(host: Host, client: Client, tree: Tree) -> None:
    serving = host.serving()
    client.found.clear()
    deploy = succeeded(tree.deploy())
    assert f"{layout.EDGE_UNIT} waits for {UNIT}" in deploy.stdout + deploy.stderr
    assert host.serving() == serving and host.row()["stale"]
    assert set(client.found) == {200} and client.chat()
    assert "haproxy" not in listening(host)
    host.answers()
    assert succeeded(tree.plan()).stdout.splitlines()[0] == "sandbox: nothing to do"


def test_a_restart_puts_the_edge_in_front(host: Host, client: Client, tree: Tree) -> None:
    """The client keeps address, port and key; while the engine loads it gets 503."""
    client.found.clear()
    host.ssh(f"systemctl restart {UNIT}")
    client.until_served()
    assert {200, 503} <= set(client.found) <= {0, 200, 503}, client.found
    assert client.chat() and client.models("wrong") == 401
    assert requests.get(f"{URL}/metrics", timeout=10).status_code == 404
    found = listening(host)
    assert f'{PLACE} users:(("haproxy"' in found and f"127.0.0.1:{PORT + 10000} " in found, found
    host.healthy()
    succeeded(tree.verify())


def test_the_next_deploy_changes_nothing(host: Host, client: Client, tree: Tree) -> None:
    succeeded(tree.deploy())
    assert not tree.changes()
    assert client.models() == 200


def test_a_rollback_and_a_restart_bring_the_former_way_back(host: Host, client: Client, tree: Tree) -> None:
    succeeded(tree.run("rig.cli.rollback", INVENTORY))
    host.ssh(f"systemctl restart {UNIT}")
    client.until_served()
    assert client.chat() and "haproxy" not in listening(host)
