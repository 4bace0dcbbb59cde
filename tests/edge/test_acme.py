"""A certificate by ACME: the unit's own command line with lego, against an authority of the test's (pebble)."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.artifacts.edge import ACME, ACME_ROOTS, CONFIGURATION, RENEWAL, certificate_path, edge_files
from rigctl.contract import layout
from tests.edge.conftest import free_port
from tests.support.plans import gpu_plan

NAME = "kimi-1.example.com"


@dataclass(frozen=True)
class Authority:
    """An ACME authority that believes whoever answers at a port of this machine."""

    directory: str
    roots: Path
    challenge_port: int


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    key, roots = tmp_path / "pebble.key", tmp_path / "pebble.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = f"-addext subjectAltName=DNS:localhost -keyout {key} -out {roots}"
    subprocess.run(["openssl", "req", *options.split(), *names.split()], check=True, capture_output=True)
    port, challenge, dns, management = (free_port() for _ in range(4))
    config = {
        "listenAddress": f"127.0.0.1:{port}",
        "managementListenAddress": f"127.0.0.1:{management}",
        "certificate": str(roots),
        "privateKey": str(key),
        "httpPort": challenge,
        "tlsPort": free_port(),
        "ocspResponderURL": "",
    }
    (tmp_path / "pebble.json").write_text(json.dumps({"pebble": config}))
    names_server = [
        "pebble-challtestsrv",
        "-defaultIPv4",
        "127.0.0.1",
        "-defaultIPv6",
        "",
        "-dns01",
        f"127.0.0.1:{dns}",
    ]
    off = [word for kind in ("http01", "https01", "tlsalpn01") for word in (f"-{kind}", "")]
    commands = [
        [*names_server, *off, "-management", f"127.0.0.1:{free_port()}"],
        ["pebble", "-config", str(tmp_path / "pebble.json"), "-dnsserver", f"127.0.0.1:{dns}"],
    ]
    quick = {**os.environ, "PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0"}
    running = [
        subprocess.Popen(one, env=quick, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for one in commands
    ]
    end = time.monotonic() + 20
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < end and not any(one.poll() for one in running)
        time.sleep(0.05)
    yield Authority(f"https://localhost:{port}/dir", roots, challenge)
    for one in running:
        one.kill()
        one.wait()


def test_the_unit_gets_a_certificate_and_keeps_a_good_one(tmp_path: Path, authority: Authority) -> None:
    acme = {"names": [NAME], "email": "me@example.com", "directory": authority.directory, "roots": "~/roots.pem"}
    plan = gpu_plan(edge={"address": "0.0.0.0", "tls": {"acme": acme}, "keys": {"a": "~/a"}})
    assert plan.edge is not None and plan.edge.tls is not None
    assert f" ssl crt {certificate_path(plan.edge.tls)} " in edge_files(plan)[CONFIGURATION]
    unit = edge_files(plan)[f"{layout.UNITS}/{RENEWAL}"]
    [line] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    # As systemd reads it.
    words = shlex.split(line.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%"))
    places = {
        ACME: str(tmp_path / "state"),
        ACME_ROOTS: str(authority.roots),
        "port=:80": f"port=:{authority.challenge_port}",
    }
    for old, new in places.items():
        words = [word.replace(old, new) for word in words]
    certificate = Path(certificate_path(plan.edge.tls).replace(ACME, places[ACME]))
    for _ in range(2):  # asked for, then kept
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "no renewal" in done.stderr + done.stdout
    text = subprocess.run(
        ["openssl", "x509", "-in", str(certificate), "-noout", "-checkhost", NAME],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "does match" in text and "PRIVATE KEY" in certificate.read_text()
    assert certificate.stat().st_mode & 0o077 == 0
