"""A host that serves by hand: ten interrupted first deploys, a whole one and an uninstall leave all of it as it was."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rig.catalog.entries import ROOT
from rigctl.contract import layout
from rigctl.tiny_models.checkpoints import checkpoint_files
from tests.drill.interruptions import Point, interrupt
from tests.sandbox.conftest import DeployBox
from tests.support.box import OVERLAY

PORT = int(os.environ.get("KIMI_RIG_TEST_ENGINE_PORT", "18071"))
TREES = "/root/ml-env /shared /data/eagle3"
SNAPSHOT = (
    f"find {TREES} -printf '%p %y %U %G %m %s %T@ %l\\n' | LC_ALL=C sort; "
    f"find {TREES} -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"
)
# Everything else on the host, but for what any use of apt, ldconfig, systemd or Python leaves.
REST = (
    "find / /run -xdev \\( -path /proc -o -path /sys -o -path /run/systemd -o -path '/tmp/systemd-private-*' "
    "-o -path '/var/tmp/systemd-private-*' -o -path /run/user -o -path /run/log -o -path /var/log/journal "
    "-o -path /var/log/apt -o -path /var/log/dpkg.log "
    "-o -path /var/cache/apt -o -path /var/lib/apt -o -path /var/cache/ldconfig -o -path /var/lib/dpkg "
    "-o -path /var/cache/debconf -o -path /var/lib/systemd -o -name __pycache__ \\) -prune -o "
    "-printf '%p %y %U %G %m %l\\n' | LC_ALL=C sort"
)
PACKAGES = "dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n' | sort"

SERVER = f"""
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"data": [{{"id": "kimi-by-hand"}}]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), Handler).serve_forever()
"""

POINTS = [
    Point("deploy killed", "Connected"),
    Point("deploy killed", "Look for servers"),
    Point("apt killed on the host", "Install packages"),
    Point("deploy killed", "Install packages", 1.0),
    Point("connection killed", "Make directories", 0.2),
    Point("deploy killed", "Create user"),
    Point("job killed on the host", "Install rigctl"),
    Point("connection killed", "Build the environment", 3.0),
    Point("job killed on the host", "Build the environment", 5.0),
    Point("deploy killed", "Build the environment", 8.0),
]


class Poller(threading.Thread):
    """Asks the hand-started server five times a second. failures: when and why it did not answer."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.answers = 0
        self.failures: list[str] = []
        self.done = threading.Event()

    def run(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self.done.wait(0.2):
            try:
                with opener.open(f"http://127.0.0.1:{PORT}/v1/models", timeout=10) as response:
                    assert json.load(response)["data"][0]["id"] == "kimi-by-hand"
                self.answers += 1
            except (OSError, urllib.error.URLError, AssertionError) as error:
                self.failures.append(f"{time.strftime('%X')}: {error}")


def handmade(box: DeployBox) -> None:
    """The first operator's host: his trees, with owners, modes and times of their own, and his server."""
    root = box.box.root
    for name, path in {
        "target": "shared/kimi-k2.5-int4",
        "drafter-never": "data/eagle3/aq-medai-k2-drafter",
        "drafter-always": "data/eagle3/output_10k/4",
    }.items():
        for file, content in checkpoint_files(name).items():
            put(root / path / file, content)
    put(root / "data/eagle3/synth_10k/train.jsonl", b'{"sample": 1}\n')
    put(root / "data/eagle3/synth_10k/nohup.log", b"\xff not utf-8\n")
    put(root / "data/eagle3/hidden states/0.pt", os.urandom(4096))
    put(root / "shared/README of ours", b"do not touch\n")
    put(root / "root/ml-env/serve.py", SERVER.encode())
    put(root / "root/ml-env/lib/python3.11/site-packages/vllm/__init__.py", b"")
    (root / "root/ml-env/bin").mkdir()
    (root / "root/ml-env/bin/python").symlink_to("/usr/bin/python3")
    box.ssh(
        "chown -R 1234:1234 /data/eagle3/synth_10k; chmod 0700 '/data/eagle3/hidden states'; "
        f"chmod -R o+rX /shared /data; find {TREES} -exec touch -h -d '2026-02-11 03:04:05.678' {{}} +; "
        "setsid nohup /root/ml-env/bin/python /root/ml-env/serve.py >/dev/null 2>&1 </dev/null &"
    )


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def adopting(bare_box: DeployBox, tmp_path: Path) -> Iterator[DeployBox]:
    """The hand-made host and an inventory that takes its checkpoints as they lie and wants its port."""
    overlay = yaml.safe_load(OVERLAY.read_text())
    # Taken as they lie. The model keeps the catalogue's source: a pinned revision of a hub that no host can reach.
    for entry in overlay["checkpoints"].values():
        entry["source"] = {"kind": "directory"}
    overlay["checkpoints"]["kimi-k2.5-int4"]["source"] = {"endpoint": "http://127.0.0.1:9"}
    overlay["serving"]["vllm-*"]["listen"] = {"port": PORT}
    (tmp_path / "adopt.yaml").write_text(yaml.safe_dump(overlay))
    (tmp_path / "group_data").symlink_to(ROOT / "inventory/group_data")
    relative = os.path.relpath(tmp_path / "adopt.yaml", OVERLAY.parent)
    (tmp_path / "adopt.py").write_text(
        "from rig.sandbox import Box as _Box\n"
        f'sandbox = [("sandbox", {{**_Box().host_data(), "catalogue_overlay": {relative!r}}})]\n'
    )
    handmade(bare_box)
    box = DeployBox(inventory=str(tmp_path / "adopt.py"))
    yield box
    box.ssh(f"pkill -f '[m]l-env/serve.py'; rm -rf {TREES}; rmdir /data", check=False)


def test_a_host_that_serves_is_left_as_it_is(adopting: DeployBox) -> None:
    box = adopting
    before, rest, packages = (box.ssh(command).stdout for command in (SNAPSHOT, REST, PACKAGES))
    assert len(before.splitlines()) > 30
    poller = Poller()
    poller.start()
    plan = box.plan()
    assert plan.returncode == 2, plan.stdout + plan.stderr
    for part in (
        f"listens on 127.0.0.1:{PORT} and is not ours: a deploy leaves it alone",
        "/root/ml-env/bin/python /root/ml-env/serve.py; user root",
        f"address 127.0.0.1:{PORT} (this host only); no API key is asked for; "
        "model /shared/kimi-k2.5-int4 (now: kimi-by-hand)",
    ):
        assert part in plan.stdout, plan.stdout
    for point in POINTS:
        assert interrupt(box, point) != 0, f"said it converged: {point}"
        assert box.ssh(SNAPSHOT).stdout == before, point
    deploy = box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert "is not ours: a deploy leaves it alone" in deploy.stdout
    assert box.ssh(SNAPSHOT).stdout == before
    receipt = json.loads(box.ssh(f"cat {layout.RECEIPT}").stdout)
    assert receipt["items"]["checkpoint/kimi-k2.5-int4"]["path"] == "/shared/kimi-k2.5-int4"
    # A start that fails, since the port is taken, leaves state, caches and a log of ours.
    assert box.ssh("systemctl start kimi-vllm-base", check=False).returncode != 0
    assert f"127.0.0.1:{PORT} cannot be listened on" in box.ssh("rigctl logs vllm-base").stdout
    for path in (layout.LOGS, layout.CACHE, f"{layout.STATE}/serving"):
        box.ssh(f"touch {path}/vllm-base/something")
    asked = box.run("rig", "uninstall", box.inventory)
    assert asked.returncode == 1 and "say YES=1" in asked.stderr
    assert "/shared" not in asked.stdout, "it would touch what is the operator's"
    record = {line.split(" ", 1)[1] for line in box.ssh(f"cat {layout.CREATED}").stdout.splitlines()}
    gone = set(re.findall(r"^  - (/\S+) is removed", asked.stdout, re.MULTILINE))
    assert len(gone) > 10 and gone <= record | {layout.STATE, layout.RUNTIME}, gone - record
    uninstall = box.run("rig", "uninstall", box.inventory, "--yes")
    assert uninstall.returncode == 0, uninstall.stdout + uninstall.stderr
    poller.done.set()
    poller.join()
    assert box.ssh(SNAPSHOT).stdout == before
    assert box.ssh(PACKAGES).stdout == packages
    left = set(box.ssh(REST).stdout.splitlines()) ^ set(rest.splitlines())
    assert not left, sorted(left)[:40]
    verify = box.verify()
    assert verify.returncode == 1 and "no deploy has come to its end here" in verify.stdout, verify.stdout
    assert "Traceback" not in verify.stdout + verify.stderr and "1 failed in" in verify.stdout
    assert not poller.failures, poller.failures[:5]
    assert poller.answers > 100


def test_an_uninstall_after_an_interrupted_first_deploy_leaves_nothing(bare_box: DeployBox) -> None:
    rest, packages = (bare_box.ssh(command).stdout for command in (REST, PACKAGES))
    interrupt(bare_box, Point("deploy killed", "Install rigctl", 2.0))
    uninstall = bare_box.run("rig", "uninstall", bare_box.inventory, "--yes")
    assert uninstall.returncode == 0, uninstall.stdout + uninstall.stderr
    left = set(bare_box.ssh(REST).stdout.splitlines()) ^ set(rest.splitlines())
    assert not left, sorted(left)[:40]
    assert bare_box.ssh(PACKAGES).stdout == packages
    again = bare_box.run("rig", "uninstall", bare_box.inventory, "--yes")
    assert (again.returncode, again.stdout) == (0, "sandbox: nothing of ours is there\n")
