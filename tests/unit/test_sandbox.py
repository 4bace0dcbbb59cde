"""The pure parts of the box's tool, and what it says to wrong inputs."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rig.__main__ import main as kimi_rig
from rig.sandbox import Box, SandboxError, boot, build, machine
from rig.sandbox.box import REPOSITORY, State, port_from
from rig.sandbox.build import claim
from rig.sandbox.limits import not_enforced

BARE = machine.Machine({}, {}, "", (), (), ())


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box("testbox", tmp_path)


def test_data_for_pyinfra_are_absolute_and_strict_without_a_box(box: Box) -> None:
    data = box.host_data()
    assert (data["ssh_port"], data["ssh_user"]) == (2222, "root")
    assert data["ssh_strict_host_key_checking"] == "yes"
    assert all(Path(str(data[key])).is_absolute() for key in ("ssh_key", "ssh_known_hosts_file", "ssh_config_file"))


def test_inventory_loads_without_a_box_and_follows_its_state(tmp_path: Path) -> None:
    Box(base=tmp_path).save(State(port=2345, login="ubuntu"))
    command = [sys.executable, "-m", "pyinfra", "inventory/sandbox.py", "debug-inventory", "--json"]
    found = []
    for base in (tmp_path / "none", tmp_path):
        environment = os.environ | {"KIMI_RIG_SANDBOX_DIR": str(base)}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        found += json.loads(done.stdout[done.stdout.index("[{") :].splitlines()[0])
    assert [(host["name"], host["groups"]) for host in found] == [("sandbox", ["sandbox"])] * 2
    assert [host["data"]["ssh_port"] for host in found] == [2222, 2345]


def test_ssh_config_checks_the_host_key_and_names_the_port(box: Box) -> None:
    box.directory.mkdir()
    build.make_keys(box)
    settings = box.ssh_settings(State(port=2345))
    public = box.host_key.with_suffix(".pub").read_text().split()[1]
    assert settings[box.known_hosts] == f"[127.0.0.1]:2345 ssh-ed25519 {public}\n"
    for path, text in settings.items():
        path.write_text(text)
    # OpenSSH's own reading, through the file that includes every box's
    command = ["ssh", "-G", "-F", str(box.base / "ssh_config"), box.name]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"port 2345", "stricthostkeychecking true", f"userknownhostsfile {box.known_hosts}"} <= set(read)


@pytest.mark.parametrize("text", ["", "ssh", "0", "65536", "-1", "²"])
def test_wrong_port(text: str) -> None:
    with pytest.raises(SandboxError, match="KIMI_RIG_SANDBOX_PORT"):
        port_from(text)


@pytest.mark.parametrize("name", ["", "../x", "A", "1a", "a b", "a" * 40])
def test_wrong_name(name: str) -> None:
    with pytest.raises(SandboxError, match="--name"):
        Box(name)


def test_recorded_port_stays_until_another_is_asked_for(box: Box) -> None:
    box.save(State(port=2300))
    assert box.planned({}).port == 2300
    assert box.planned({"KIMI_RIG_SANDBOX_PORT": "2301"}).port == 2301


def test_login_of_a_made_box_cannot_change(box: Box) -> None:
    box.save(State(login="root"))
    assert box.planned({}, "ubuntu").login == "ubuntu"
    box.stamp.touch()
    with pytest.raises(SandboxError, match="was made for root"):
        box.planned({}, "ubuntu")


def test_damaged_state_is_named(box: Box) -> None:
    box.save(State())
    (box.directory / "state.json").write_text("{")
    with pytest.raises(SandboxError, match=r"state\.json cannot be read"):
        box.state()


@pytest.mark.parametrize(
    ("system", "cpu", "euid", "message"),
    [
        ("Darwin", "x86_64", 0, "Darwin"),
        ("Linux", "aarch64", 0, "aarch64"),
        ("Linux", "x86_64", 1000, "sudo"),
    ],
)
def test_machine_that_cannot_have_a_box(system: str, cpu: str, euid: int, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        machine.check_supported(system, cpu, euid)


def test_packages_are_named_when_there_is_no_apt(box: Box, tmp_path: Path) -> None:
    missing = build.missing_packages(tool=lambda _: None, keyring=tmp_path / "none")
    assert missing == ["systemd-container", "openssh-client", "mmdebstrap", "debian-archive-keyring"]
    with pytest.raises(SandboxError, match=r"systemd-container.*no apt"):
        build.install_packages(box, missing, tool=lambda _: None)


@pytest.mark.parametrize("name", ["mmdebstrap", "debootstrap"])
def test_what_makes_the_root_leaves_no_mount_when_it_is_killed(box: Box, name: str) -> None:
    tools = {name: f"/usr/bin/{name}"}
    assert "mmdebstrap" not in build.missing_packages(tool=tools.get), "either will do"
    command = build.bootstrap_command(box.root, BARE, tool=tools.get)
    assert command[:3] == ["unshare", "--mount", f"/usr/bin/{name}"]
    assert command[command.index("bookworm") + 1] == str(box.root)


def test_too_little_disk(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="KIMI_RIG_SANDBOX_DIR"):
        build.check_free(tmp_path, least=10**18)


def test_unreachable_mirror_is_told_from_other_trouble(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("I: running\nE: Failed to fetch x  Temporary failure resolving 'mirror'\nI: cleaning\n")
    assert "E: Failed to fetch" in build.last_trouble(log)
    assert "mirror was not reached" in build.last_trouble(log)
    log.write_text("E: Unable to locate package foo\n")
    assert build.last_trouble(log) == f"E: Unable to locate package foo (all of it in {log})"


def test_port_of_a_stranger_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        owner = boot.port_owner(stranger.getsockname()[1])
        assert owner is not None
        assert f"pid {os.getpid()} " in owner
        assert not boot.answers(State(port=stranger.getsockname()[1]), timeout=0.1)
        port = stranger.getsockname()[1]
    assert boot.port_owner(port) is None


def test_foreign_directory_is_neither_used_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIMI_RIG_SANDBOX_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    kept = tmp_path / "testbox" / "precious"
    kept.parent.mkdir()
    kept.touch()
    (tmp_path / "linked").symlink_to(kept.parent)
    for name in ("testbox", "linked"):
        with pytest.raises(SandboxError):
            claim(Box(name, tmp_path))
        assert kimi_rig(["sandbox", "--name", name, "rm"]) == 1
        assert "nothing was deleted" in capsys.readouterr().err
    assert kept.exists()


def test_mounted_directory_is_not_deleted(tmp_path: Path) -> None:
    info = f"1 2 8:1 / / rw - ext4 x rw\n3 1 8:2 / {tmp_path}/root/with\\040space rw - ext4 y rw\n"
    assert build.mounts_below(tmp_path, info) == [f"{tmp_path}/root/with space"]
    with pytest.raises(SandboxError, match="is mounted"):
        build.remove_tree(Path("/proc"))


def test_ssh_without_a_box_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIMI_RIG_SANDBOX_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert kimi_rig(["sandbox", "ssh", "true"]) == 1
    assert capsys.readouterr().err == "failed: box sandbox is not running; start it: `make sandbox`\n"


def test_other_processes_are_never_taken_for_the_box(box: Box) -> None:
    """A record that names a living process that is no box of ours: a PID used again."""
    box.root.mkdir(parents=True)
    argument = f"--directory={box.root}"
    bystander = subprocess.Popen(["sleep", "60"])
    lookalike = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", argument])
    try:
        for process in (bystander, lookalike):
            box.save(State(pid=process.pid, started=boot.start_time(process.pid)))
            assert boot.keeper(box) is None
            assert boot.stop(box) is False
            assert process.poll() is None
    finally:
        for process in (bystander, lookalike):
            process.kill()
            process.wait()


def test_recorded_start_time_must_match(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = boot.start_time(os.getpid())
    monkeypatch.setattr(boot, "_is_keeper", lambda _box, pid: pid == os.getpid())
    box.save(State(pid=os.getpid(), started=mine))
    assert boot.keeper(box) == boot.Process(os.getpid(), mine)
    box.save(State(pid=os.getpid(), started=mine - 1))
    assert boot.keeper(box) is None


def test_box_is_never_given_the_clock_and_bpf_only_when_we_have_it(box: Box) -> None:
    for bpf in (True, False):
        command = boot.nspawn_arguments(box, ("/opt/a:b",), bpf)
        assert not any("TIME" in word or word == "--capability=all" for word in command)
        assert ("--capability=CAP_BPF" in command) is bpf
        assert "--bind-ro=/opt/a\\:b" in command
    assert boot.can_grant_bpf("CapBnd:\t000000ffffffffff\n")
    assert not boot.can_grant_bpf("CapBnd:\t0000007fffffffff\n")


def test_wheel_directories_reach_pip_and_uv(tmp_path: Path) -> None:
    first, second, index = tmp_path / "a", tmp_path / "b", tmp_path / "mirror"
    for path in (first, second, index / "simple"):
        path.mkdir(parents=True)
    environ = {"PIP_FIND_LINKS": f"{first} https://wheels.example/x", "UV_FIND_LINKS": f"{second},{first}"}
    pip = {"find-links": str(tmp_path / "gone"), "extra-index-url": f"file://{index}/simple"}
    links = machine.find_links(environ, pip)
    passed = machine.passed_environment(environ, links, pip)
    assert passed["PIP_FIND_LINKS"].split() == links
    assert passed["UV_FIND_LINKS"].split(",") == links
    assert {str(first), str(second), "https://wheels.example/x"} <= set(links)
    bound = machine.bound_paths(passed, links, pip)
    assert {first, second, index} <= set(bound)
    assert tmp_path / "gone" not in bound


def test_proxies_reach_both_spellings_and_spare_loopback() -> None:
    passed = machine.passed_environment({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "intra"}, [], {})
    assert passed["https_proxy"] == passed["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert passed["no_proxy"].split(",") == ["intra", "localhost", "127.0.0.1", "::1"]
    assert machine.proxy_options(passed) == ['Acquire::https::Proxy "http://proxy.example:3128";']


def test_values_with_a_password_stay_out_of_what_every_user_can_read() -> None:
    environment = {"PIP_INDEX_URL": "https://me:secret@mirror.example/simple", "UV_HTTP_TIMEOUT": "9"}
    files = build.machine_files(dataclasses.replace(BARE, environment=environment))
    assert "secret" in files["etc/environment"]  # written with mode 0600
    assert "secret" not in files["etc/systemd/system.conf.d/50-kimi-rig.conf"]
    assert '"UV_HTTP_TIMEOUT=9"' in files["etc/systemd/system.conf.d/50-kimi-rig.conf"]


def test_remote_mirror_of_pip_serves_uv_too() -> None:
    pip = machine.pip_settings([("/etc/pip.conf", "[global]\nindex_url = https://mirror.example/simple\n")])
    assert machine.passed_environment({}, [], pip)["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    own = machine.passed_environment({"UV_DEFAULT_INDEX": "https://uv.example"}, [], pip)
    assert own["UV_DEFAULT_INDEX"] == "https://uv.example"


def test_broken_pip_settings_are_named() -> None:
    with pytest.raises(SandboxError, match=r"/etc/pip\.conf"):
        machine.pip_settings([("/etc/pip.conf", "no section")])


def test_only_this_releases_own_apt_sources_are_copied() -> None:
    text = """\
# mirror of ours
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates trixie
Components: main contrib
Signed-By: /usr/share/keyrings/ours.gpg

Types: deb
URIs: http://other.example/repo
Suites: bookworm
Components: stable

Types: deb
Enabled: no
URIs: http://off.example
Suites: bookworm
Components: main
"""
    signed = "deb [signed-by=/usr/share/keyrings/ours.gpg] http://mirror.example/debian"
    assert machine.deb822_sources(text) == [
        f"{signed} bookworm main contrib",
        f"{signed} bookworm-updates main contrib",
    ]
    listed = "deb http://m.example/d bookworm main # x\ndeb http://v.example cloud-bookworm main\n"
    assert machine.one_line_sources(listed) == ["deb http://m.example/d bookworm main"]


def test_limits_that_do_not_hold_are_listed() -> None:
    found = {"A": True, "B": False, "C": None}
    document = {"limits": {name: {"enforced": value, "note": ""} for name, value in found.items()}}
    assert not_enforced(document) == ["B", "C?"]
