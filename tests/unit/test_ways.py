"""One way to a host for every verb: pyinfra (plan, deploy), testinfra (verify) and OpenSSH (status)."""

from __future__ import annotations

import ast
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.catalog.entries import ROOT
from rig.cli import ssh, status
from tests.host.conftest import connect
from tests.support.plans import data as host_data

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed")]


@dataclass(frozen=True)
class Server:
    """An sshd of this user's on 127.0.0.1 and ::1."""

    port: int
    key: Path
    folder: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ways with a space")
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    port = free_port()
    lines = [f"Port {port}", "ListenAddress 127.0.0.1", "ListenAddress ::1", f'HostKey "{folder}/host_key"']
    lines += [f'AuthorizedKeysFile "{folder}/authorized_keys"', "StrictModes no", "UsePAM no", "PidFile none"]
    lines += ["SetEnv LANG=C.UTF-8 LANGUAGE=de:tr"]  # as /etc/default/locale would, by PAM
    config = folder / "sshd_config"
    config.write_text("\n".join(lines) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([str(SSHD), "-D", "-q", "-f", config])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    kind, key, *_ = (folder / "host_key.pub").read_text().split()
    known = "".join(f"[{address}]:{port} {kind} {key}\n" for address in ("127.0.0.1", "::1"))
    for place in (folder / "known", folder.parent / "known"):
        place.write_text(known)
    yield Server(port, folder / "key", folder)
    process.terminate()
    process.wait()


def operators_config(server: Server, folder: Path) -> Path:
    """An ssh_config as operators have them: the jump host stands in a file that a Host block includes."""
    folder.mkdir(exist_ok=True)
    common = f'  Port {server.port}\n  IdentityFile "{server.key}"\n  UserKnownHostsFile {server.folder.parent}/known\n'
    common += "  StrictHostKeyChecking accept-new\n"
    (folder / "hops").write_text(f"Host jump\n  HostName 127.0.0.1\n{common}")
    proxy = f"  ProxyCommand '{sys.executable}' '{folder}/pipe.py' %h %p 50%%\n"
    (folder / "pipe.py").write_text(PIPE)
    config = folder / "config"
    config.write_text(
        f'Include "{folder}/hops"\n'
        f"Host behind-jump\n  HostName 127.0.0.1\n  ProxyJump jump\n{common}"
        f"Host behind-two\n  HostName ::1\n  ProxyJump jump,jump\n{common}"
        f"Host behind-command\n  HostName 127.0.0.1\n{proxy}{common}"
        f'Host in-block behind-included\n  Include "{folder}/block"\n'
        f"Host ::1 plain\n{common}"
    )
    (folder / "block").write_text(f"HostName 127.0.0.1\nProxyJump jump\n{common}")
    return config


WORDS = "stat -c %F / #"
"""Translated by coreutils; the comment keeps what a test appends out."""

PIPE = """
import os, select, socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    for one in select.select([0, s], [], [])[0]:
        data = os.read(0, 65536) if one == 0 else s.recv(65536)
        if not data:
            sys.exit()
        s.sendall(data) if one == 0 else os.write(1, data)
"""

WAYS: dict[str, dict[str, Any]] = {
    "behind-jump": {"ssh_config_file": True},
    "behind-two": {"ssh_config_file": True},
    "behind-command": {"ssh_config_file": True},
    "behind-included": {"ssh_config_file": True},
    "::1": {"ssh_config_file": True},
    "by-data": {"ssh_hostname": "127.0.0.1", "ssh_port": True, "ssh_key": True, "ssh_known_hosts_file": True},
    "ipv6-by-data": {"ssh_hostname": "::1", "ssh_port": True, "ssh_key": True, "ssh_known_hosts_file": True},
}


@pytest.mark.parametrize("name", WAYS)
def test_every_verb_reaches_it(server: Server, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "of the operator"
    config = operators_config(server, folder)
    values = {
        "ssh_config_file": str(config),
        "ssh_port": server.port,
        "ssh_key": str(server.key),
        "ssh_known_hosts_file": str(server.folder / "known"),
    }
    data = {key: values[key] if value is True else value for key, value in WAYS[name].items()}
    data["ssh_user"] = getpass.getuser()
    flat = ssh.config_of([{"name": name, "data": data}])
    status = subprocess.run(
        [*ssh.words(flat, name), "echo there"], capture_output=True, text=True, timeout=30, check=False
    )
    assert status.stdout == "there\n", status.stderr
    assert connect(name, data, flat).run(WORDS).stdout == "directory\n"
    inventory = tmp_path / "hosts.py"
    inventory.write_text(f"hosts = [({name!r}, {data!r})]\n")
    plan = [sys.executable, "-m", "pyinfra", "--chdir", str(ROOT), "--data", f"ssh_config_file={flat}"]
    said = pyinfra(*plan[3:], str(inventory), "exec", "--", WORDS)
    assert f"[{name}] directory" in said.stderr + said.stdout, said.stderr
    if Path("/usr/share/locale/de/LC_MESSAGES/coreutils.mo").exists():
        translated = subprocess.run([*ssh.words(flat, name), WORDS], capture_output=True, text=True, check=True)
        assert translated.stdout == "Verzeichnis\n"  # what the two above would have read


def test_a_long_temporary_directory_leaves_room_for_a_socket(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(ssh, "_scratch", cache(ssh._scratch.__wrapped__))
    data = {"ssh_hostname": "127.0.0.1", "ssh_port": server.port, "ssh_key": str(server.key)}
    data |= {"ssh_user": getpass.getuser(), "ssh_known_hosts_file": str(tmp_path / "known")}
    data |= {"ssh_strict_host_key_checking": "accept-new"}
    flat = ssh.config_of([{"name": "plain", "data": data}])
    host = connect("plain", data, flat)
    assert host.run(WORDS).stdout == "directory\n"
    assert list(flat.parent.glob("cm-*")), "its connection is not shared"


def pyinfra(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", "-v", *words, "-y"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


def test_pyinfra_itself_gets_through_a_proxy_command(server: Server, tmp_path: Path) -> None:
    """Started as a module, as every verb does, and without the flat file."""
    config = operators_config(server, tmp_path)
    data = {"ssh_config_file": str(config), "ssh_user": getpass.getuser()}
    (tmp_path / "hosts.py").write_text(f"hosts = [('behind-command', {data!r})]\n")
    said = pyinfra("--chdir", str(ROOT), str(tmp_path / "hosts.py"), "exec", "--", r"printf 'odd-\377-byte\n'")
    assert "odd-\ufffd-byte" in said.stderr + said.stdout, said.stderr


@pytest.mark.parametrize("proxy", ["sleep 1000", "echo the jump host is down >&2; exit 1"])
def test_a_proxy_that_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path, proxy: str) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host gone\n  ProxyCommand {proxy}\n")
    data = {"ssh_config_file": str(config)}
    flat = ssh.config_of([{"name": "gone", "data": data}])
    (tmp_path / "hosts.py").write_text(f"hosts = [('gone', {data!r})]\n")
    said = pyinfra(
        "--chdir", str(ROOT), "--data", f"ssh_config_file={flat}", str(tmp_path / "hosts.py"), "exec", "--", "true"
    )
    assert said.returncode != 0
    assert "gone" in said.stderr
    assert "jump host is down" in said.stderr or proxy.startswith("sleep")


def test_an_ssh_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ssh.WayError, match=r"box: .*nowhere"):
        ssh.config_of([{"name": "box", "data": {"ssh_config_file": str(tmp_path / "nowhere")}}])


@given(st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), min_size=1, max_size=30))
def test_a_jump_host_in_any_words_ends_in_no_traceback(jump: str) -> None:
    assert ssh._hop(jump)


@pytest.mark.parametrize(
    ("jump", "words"),
    [
        ("a", ["a"]),
        ("me@a:22", ["-l", "me", "-p", "22", "a"]),
        ("ssh://me@a:22/", ["-l", "me", "-p", "22", "a"]),
        ("me@[::1]:22", ["-l", "me", "-p", "22", "::1"]),
        ("::1", ["::1"]),
        ("you@corp@a", ["-l", "you@corp", "a"]),
    ],
)
def test_a_jump_host_in_openssh_words(jump: str, words: list[str]) -> None:
    assert ssh._hop(jump) == words


def test_aliases_have_no_word_that_a_program_reads() -> None:
    assert re.fullmatch(r"[\w.-]+", ssh.alias("user@[::1]/x"))


@pytest.mark.parametrize("name", ["conftest.py", "test_host.py", "test_settings.py"])
def test_verification_takes_a_path_with_a_space(name: str) -> None:
    """A path of the operator's goes to a shell as an argument that testinfra quotes, never inside the command."""
    tree = ast.parse(Path(ROOT, "tests", "host", name).read_text(encoding="utf-8"))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) != "run":
            continue
        parts = [part for each in call.args[:2] if isinstance(each, ast.JoinedStr) for part in each.values]
        words = {ast.unparse(part.value) for part in parts if isinstance(part, ast.FormattedValue)}
        assert not words & {"path", "entry.path"}, f"{name}:{call.lineno}"


@pytest.mark.parametrize("checking", [None, "ask", "no", "off", "yes"])
@pytest.mark.parametrize("flat", [True, False], ids=["by a verb", "by pyinfra alone"])
def test_a_host_whose_key_is_not_known_gets_nothing(
    server: Server, tmp_path: Path, checking: str | None, flat: bool
) -> None:
    """Whatever the operator's ssh_config accepts: secrets travel."""
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", server.folder / "host_key.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    config = tmp_path / "config"
    lines = f'Port {server.port}\nIdentityFile "{server.key}"\nUserKnownHostsFile {tmp_path}/known\nHostName 127.0.0.1'
    config.write_text(f"Host new\n{lines}\nStrictHostKeyChecking {checking or 'accept-new'}\n")
    data = {"ssh_config_file": str(config), "ssh_user": getpass.getuser()}
    data |= {"ssh_strict_host_key_checking": checking} if checking else {}
    resolved = ssh.config_of([{"name": "new", "data": data}])
    (tmp_path / "hosts.py").write_text(f"hosts = [('new', {data!r})]\n")
    more = ["--data", f"ssh_config_file={resolved}"] if flat else []
    said = pyinfra("--chdir", str(ROOT), *more, str(tmp_path / "hosts.py"), "exec", "--", f"touch {tmp_path}/was-there")
    assert said.returncode != 0 and not (tmp_path / "was-there").exists()
    assert fingerprint in said.stderr and "is not known, so nothing was sent to it" in said.stderr
    assert not (tmp_path / "known").exists() or (tmp_path / "known").read_text() == ""
    if flat:
        seen = status.ask("new", host_data() | data, resolved)
        assert not seen.reached and fingerprint in seen.trouble and f"then run `ssh -F {config} new`" in seen.trouble
        # The command of pyinfra's message accepts it.
        accept = re.search(r"then run `(echo .*?)`", said.stderr.replace("\n", ""))
        assert accept is not None, said.stderr
        subprocess.run(accept[1], shell=True, check=True)
        assert (
            "there"
            in pyinfra("--chdir", str(ROOT), *more, str(tmp_path / "hosts.py"), "exec", "--", "echo there").stderr
        )


def test_the_inventory_may_accept_new_keys_in_as_many_words(server: Server, tmp_path: Path) -> None:
    data = {
        "ssh_hostname": "127.0.0.1",
        "ssh_port": server.port,
        "ssh_key": str(server.key),
        "ssh_user": getpass.getuser(),
        "ssh_known_hosts_file": str(tmp_path / "known"),
        "ssh_strict_host_key_checking": "accept-new",
    }
    (tmp_path / "hosts.py").write_text(f"hosts = [('new', {data!r})]\n")
    assert "there" in pyinfra("--chdir", str(ROOT), str(tmp_path / "hosts.py"), "exec", "--", "echo there").stderr
