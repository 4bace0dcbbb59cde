"""Of uv's and pip's own settings on a host only those count that say where packages come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rigctl import site_settings

PIP = """[global]
index-url = https://mirror.example/simple
find_links =
    /wheels
    /more
proxy = http://proxy.example:3128
cert = /etc/ssl/site.pem
timeout = 90
target = /elsewhere
[install]
user = true
constraint = /etc/constraints.txt
"""
UV = """
https-proxy = "http://proxy.example:3128"
native-tls = true
resolution = "lowest"
exclude-newer = "2020-01-01T00:00:00Z"
find-links = ["/wheels", "/more"]
[[index]]
name = "site"
url = "https://mirror.example/simple"
default = true
[[index]]
url = "https://second.example/simple"
[pip]
target = "/elsewhere"
extra-index-url = ["https://extra.example/simple"]
"""


def test_pip(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(PIP)
    before = {"PATH": "/bin", "PIP_TARGET": "/x", "PIP_TIMEOUT": "5"}
    found, ignored = site_settings.environment("pip", before, (str(tmp_path / "pip.conf"),))
    assert found == {
        "PATH": "/bin",
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_FIND_LINKS": "/wheels /more",
        "PIP_PROXY": "http://proxy.example:3128",
        "PIP_CERT": "/etc/ssl/site.pem",
        "PIP_TIMEOUT": "5",
        "PIP_CONFIG_FILE": os.devnull,
    }
    assert [line.split(" is ignored")[0].split(": ")[-1] for line in ignored] == [
        "target",
        "user",
        "constraint",
        "PIP_TARGET of the environment",
    ]


def test_uv(tmp_path: Path) -> None:
    (tmp_path / "uv.toml").write_text(UV)
    found, ignored = site_settings.environment("uv", {"UV_OVERRIDE": "x"}, (str(tmp_path / "uv.toml"),))
    assert found == {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "UV_NATIVE_TLS": "true",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "site=https://mirror.example/simple",
        "UV_INDEX": "https://second.example/simple",
        "UV_EXTRA_INDEX_URL": "https://extra.example/simple",
        "UV_NO_CONFIG": "1",
    }
    assert len(ignored) == 4  # resolution, exclude-newer, target, UV_OVERRIDE


def test_the_real_pip_obeys(tmp_path: Path) -> None:
    """As install.sh calls it: what pip says of its own settings afterwards."""
    home = tmp_path / "home"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text(PIP)
    script = f'settings=$("$1" {site_settings.__file__}); eval "$settings"; "$1" -m pip config list'
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PIP_TARGET": "/x"}
    done = subprocess.run(
        ["sh", "-euc", script, "sh", sys.executable], env=environment, capture_output=True, text=True, check=True
    )
    assert "index-url='https://mirror.example/simple'" in done.stdout
    assert not any(word in done.stdout for word in ("target", "user", "constraint"))
    assert "target is ignored" in done.stderr


CUT = st.tuples(st.sampled_from([PIP, UV]), st.integers(0, 500), st.integers(0, 500)).map(
    lambda cut: (cut[0][: cut[1]] + cut[0][cut[2] :]).encode()
)


@pytest.mark.parametrize("tool", ["pip", "uv"])
@settings(deadline=None)
@example(content=b"[global]\nuser\n  more\n")  # configparser itself failed at a key without a value
@given(content=st.binary(max_size=200) | CUT)
def test_no_file_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, tool: str, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "settings"
    file.write_bytes(content)
    found, _ = site_settings.environment(tool, {}, (str(file),))
    allowed = {f"{tool.upper()}_{key.upper().replace('-', '_')}" for key in site_settings.SOURCES[tool].split()}
    assert set(found) <= allowed | set(site_settings.PROXIES.values()) | {"PIP_CONFIG_FILE", "UV_NO_CONFIG"}
