"""What a hostile package, engine or build script can do on a host: nothing that outlives it or that root takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rigctl.contract import layout
from tests.breaker import hostile
from tests.sandbox.conftest import DeployBox, bare_box
from tests.unit.wheelhouse import lock_text, wheel

__all__ = ["bare_box"]

HOME = "/srv/breaker"
RUN = f"{layout.HOSTKIT}/current/venv/bin/python -I -c"
START = f"import subprocess, sys; from pathlib import Path; sys.path.insert(0, '{layout.HOSTKIT}/current'); "
START += "from rigctl import builder\n"
WITHOUT_NETWORK, WITH_NETWORK = 1.0, 1.4
"""Exposure by systemd-analyze of systemd 252."""


@pytest.fixture(scope="module")
def box(bare_box: DeployBox) -> DeployBox:
    deploy = bare_box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    place = bare_box.box.root / HOME.lstrip("/")
    place.mkdir()
    (place / "hostile.py").write_text(Path(hostile.__file__).read_text())
    bare_box.ssh(f"echo of-root > /root/secret; mkdir -p {layout.CREDENTIALS}; echo k > {layout.CREDENTIALS}/api-key")
    return bare_box


def rigctl(box: DeployBox, code: str) -> str:
    """What Python says on the host, as root, with `builder` at hand."""
    return box.ssh(f"{RUN} {quoted(START + code)} 2>&1", check=False).stdout


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def nothing_is_left(box: DeployBox) -> None:
    """No process, no file where others look, nothing with the setuid bit."""
    assert not box.ssh(f"pgrep -u {layout.BUILDER} -a", check=False).stdout
    planted = "find / -xdev -name planted -o -xdev -user kimi-build -perm /6000"
    assert not box.ssh(f"{planted} 2>/dev/null; ls /dev/shm", check=False).stdout.strip()
    assert not box.ssh("systemctl list-units --all --plain --no-legend 'kimi-job-builder-*'").stdout


def test_a_hostile_command_gets_nowhere(box: DeployBox) -> None:
    code = f"work = builder.handed_over(Path('{HOME}/work'))\n"
    code += f"hostile = ['/usr/bin/python3', '{HOME}/hostile.py', work]\n"
    code += "with builder.sandboxed(hostile, unit='x', writes=[work]) as command:\n"
    code += "    subprocess.run(command)\n"
    code += "try:\n    builder.publish(work)\nexcept Exception as error:\n    print(error)\n"
    said = rigctl(box, code)
    refused = re.findall(r"^refused: ([^:]+):", said, re.MULTILINE)
    assert refused == list(hostile.TRIES), said
    assert f"user {box.ssh(f'id -u {layout.BUILDER}').stdout.strip()}" in said
    assert f"{HOME}/work/link is a symbolic link out of it, to '/etc/shadow': nothing of what was built there" in said
    nothing_is_left(box)


@pytest.mark.parametrize(("network", "most"), [("none", WITHOUT_NETWORK), ("any", WITH_NETWORK)])
def test_exposure(box: DeployBox, network: str, most: float) -> None:
    code = f"with builder.sandboxed(['sleep', '30'], unit='shown', network='{network}') as command:\n"
    code += "    asleep = subprocess.Popen(command)\n"
    code += "    analyze = 'sleep 2; systemd-analyze security --no-pager kimi-job-builder-shown.service'\n"
    code += "    print(subprocess.run(analyze, shell=True, capture_output=True, text=True).stdout)\n"
    code += "    asleep.kill()\n"
    said = rigctl(box, code)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert found is not None and float(found[1]) <= most, said


def hostile_environment(box: DeployBox, name: str, files: dict[str, str]) -> str:
    """Build an environment of one package as a deploy does; its path."""
    wheels = box.box.root / HOME.lstrip("/") / name
    made = wheel(wheels, "vllm", "1.0", files)
    lock = wheels / "lock.txt"
    lock.write_text(lock_text(made))
    box.ssh(f"chmod -R a+rX {HOME}")
    path = f"/opt/kimi-rig/env/{name}/0123456789ab"
    order = {
        "format": 1,
        "path": path,
        "python": "3.11",
        "lock": f"{HOME}/{name}/lock.txt",
        "patches": None,
        "cache": "/opt/kimi-rig/env/.cache",
        "index": None,
        "wheels": f"{HOME}/{name}",
    }
    built = box.ssh(f"rigctl environment build {quoted(json.dumps(order))}", check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return path


def test_code_of_a_package_does_not_run_as_root_when_it_is_installed(box: DeployBox) -> None:
    """A *.pth file runs with every start of the environment's Python: uv's to compile bytecode was one, as root."""
    mark = "import os; open('/var/tmp/planted', 'w').write(str(os.geteuid()))\n"
    path = hostile_environment(box, "pth", {"vllm/__init__.py": "", "evil.pth": mark})
    nothing_is_left(box)
    there = f"stat -c %U $(find {path} -name evil.pth) {path}; find {path} ! -user root -o ! -type l -perm /022 | wc -l"
    assert box.ssh(there).stdout.split() == ["root", "root", "0"]
    assert box.ssh(f"rm -rf {path}; ls -A $(dirname {path})").stdout


def test_an_engine_that_is_hostile_when_it_is_asked(box: DeployBox) -> None:
    path = hostile_environment(box, "engine", {"vllm/__init__.py": Path(hostile.__file__).read_text() + "\nmain()\n"})
    probe = box.ssh(f"rigctl probe --env {path} --engine vllm", check=False)
    assert probe.returncode == 1 and "vllm does not answer" in probe.stderr and "Traceback (most" not in probe.stdout
    nothing_is_left(box)
    assert box.ssh(f"find {path} ! -user root").stdout == "", "an environment is not written by what it holds"
    box.ssh(f"rm -rf {path}")


def test_a_builder_ends_with_its_job(box: DeployBox) -> None:
    """The job is killed, as by a full memory: what it had started as the builder goes too."""
    code = "with builder.sandboxed(['sleep', '9876'], unit='bound') as command:\n    subprocess.run(command)\n"
    start = f"systemd-run --quiet --collect --unit=kimi-job-breaker {RUN} {quoted(START + code)}"
    wait = "for n in $(seq 100); do pgrep -u kimi-build -x sleep && break; sleep 0.1; done"
    end = "systemctl kill -s KILL kimi-job-breaker; sleep 2"
    assert box.ssh(f"{start}; {wait}; {end}").stdout.strip()
    nothing_is_left(box)
