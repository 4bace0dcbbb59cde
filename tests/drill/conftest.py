"""The fault drill's box: a deployed one, with a stand-in engine in two units of their own.

KIMI_RIG_DRILL_TABLE=FILE writes the table of results as measured.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rig.artifacts.units import unit_files
from rig.catalog.entries import ROOT, Checkpoint, Configuration, Listen, Release, Speculation
from rig.host.settings import HostSettings
from rig.operations.hostkit import hostkit_path
from rig.plan.host_plan import Environment, HostPlan, host_plan
from rig.sandbox import Box
from rigctl.contract import layout
from rigctl.contract.limits import Limits
from rigctl.contract.sources import GeneratorSource
from tests.sandbox.conftest import DeployBox, bare_box, engine_port
from tests.unit.serving import checkpoint, drafter

__all__ = ["bare_box", "engine_port"]

PORT = int(os.environ.get("KIMI_RIG_DRILL_PORT", "18100"))
HOME = "/opt/kimi-rig-drill"
QUICK = Limits(
    sample_seconds=0.2,
    watch_seconds=0.5,
    watch_answer_seconds=0.5,
    frozen_minutes=0.05,
    no_progress_minutes=0.05,
    busy_share=0.5,
    restarts=2,
    restart_delay_seconds=0.5,
    drain_seconds=5,
    stop_seconds=5,
    minimum_disk_mib=0,
)


def host_data(*groups: str) -> dict[str, Any]:
    """Host data of these groups, as pyinfra merges it."""
    found: dict[str, Any] = {}
    for group in groups:
        found |= runpy.run_path(str(ROOT / "inventory" / "group_data" / f"{group}.py"))
    return {key: value for key, value in found.items() if not key.startswith("_")}


class DrillBox:
    """A box, and units with a stand-in engine in it."""

    def __init__(self) -> None:
        self.box = Box()
        self.rows: list[tuple[str, str, str, float]] = []

    def ssh(self, command: str, *, check: bool = True) -> str:
        """Standard output of a command in the box."""
        done = subprocess.run(self.box.ssh_command(command), capture_output=True, text=True, check=False, timeout=300)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def path(self, inside: str) -> Path:
        """The box's file, seen from here."""
        return self.box.root / inside.lstrip("/")

    def prepare(self) -> None:
        """Install the stand-in engine and its checkpoints."""
        home = self.path(HOME)
        shutil.rmtree(home, ignore_errors=True)
        (home / "env" / "bin").mkdir(parents=True)
        (home / "env" / "bin" / "python").symlink_to("/usr/bin/python3")
        shutil.copy(ROOT / "tests" / "standin.py", home / "standin.py")
        checkpoint(home / "target")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (home / "target" / name).write_text("{}")
        drafter(home / "drafter")
        self.proved()

    def proved(self) -> None:
        """Have both checkpoints recorded, as a deploy does."""
        for name in ("target", "drafter"):
            spec: dict[str, Any] = {"format": 1, "name": name, "role": name, "destination": f"{HOME}/{name}"}
            spec["source"] = {"kind": "directory"}
            self.path(f"{HOME}/{name}.json").write_text(json.dumps(spec))
            command = f"{layout.RIGCTL} checkpoints adopt {name} --spec {HOME}/{name}.json"
            self.ssh(command)

    def plan(self, supervision: Limits = QUICK, **configurations: dict[str, Any]) -> HostPlan:
        """Units drill-a, drill-b, ... keys of `configurations`: what each has beside the defaults."""
        data = host_data("all")
        key = any(more.pop("key", False) for more in configurations.values())
        data |= {"api_key_file": "/nonexistent" if key else None}
        release = Release(
            engine="vllm",
            version="0.33.0",
            package="stand-in",
            accelerator="cpu",
            launch=[f"{HOME}/standin.py"],
            lock="files/locks/stand-in.txt",
            python=["3.11"],
            drain="flag",
        )
        serving = {f"drill-{name}": self._configuration(name, more) for name, more in configurations.items()}
        source = GeneratorSource(kind="generator", generator="none")
        base = host_plan(data | {"configurations": []}, "debian-12", HostSettings())
        return HostPlan(
            data=base.data.model_copy(update={"supervision": supervision}),
            distribution="debian-12",
            settings=HostSettings(),
            serving=serving,
            environments={"stand-in": Environment("stand-in", release, "3.11", release.lock, f"{HOME}/env")},
            checkpoints={n: Checkpoint(role=n, path=f"{HOME}/{n}", source=source) for n in ("target", "drafter")},
            checkpoint_paths={name: f"{HOME}/{name}" for name in ("target", "drafter")},
        )

    def _configuration(self, name: str, more: dict[str, Any]) -> Configuration:
        flags = {"plan": more.pop("plan", {}), "faults": self.faults(name)}
        content: dict[str, Any] = {
            "release": "stand-in",
            "target": "target",
            "gpus": [],
            "listen": Listen(port=more.pop("port", PORT)),
            "tool_call_parser": "kimi_k2",
            "reasoning_parser": "kimi_k2",
            "speculation": Speculation(drafter="drafter"),
            "flags": {**flags, **more.pop("flags", {})},
        }
        return Configuration(**{**content, **more})

    @staticmethod
    def faults(name: str) -> str:
        return f"{HOME}/faults-{name}.json"

    def set_faults(self, name: str, **what: Any) -> None:
        """The stand-in of drill-<name> reads them with its next request."""
        self.path(self.faults(name)).write_text(json.dumps(what))

    def install(self, supervision: Limits = QUICK, **configurations: dict[str, Any]) -> HostPlan:
        """Write the units and let systemd read them; nothing of an earlier test is left."""
        self.clear()
        return self.change(supervision, **configurations)

    def change(self, supervision: Limits = QUICK, **configurations: dict[str, Any]) -> HostPlan:
        """The same beside what runs, as a deploy does."""
        plan = self.plan(supervision, **configurations)
        for path, text in unit_files(plan).items():
            self.path(path).write_text(text)
        self.ssh("systemctl daemon-reload")
        return plan

    def operation(self, call: str) -> str:
        """Run one operation of `rig.operations.system` on the box through pyinfra; what pyinfra says."""
        with tempfile.NamedTemporaryFile("w", suffix=".py", dir=ROOT, prefix=".drill-") as file:
            file.write(f"from rig.operations import system\nsystem.{call}\n")
            file.flush()
            command = [sys.executable, "-m", "pyinfra", "-y", "inventory/sandbox.py", file.name]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def clear(self) -> None:
        """Stop and remove all units of the drill."""
        self.ssh(
            "systemctl stop 'kimi-drill-*' 'kimi-fallback@*'; systemctl disable -q kimi-drill-a 2>/dev/null; "
            "systemctl reset-failed 'kimi-drill-*' 2>/dev/null; rm -rf "
            f"{layout.UNITS}/kimi-drill-* {layout.CONFIGURATIONS}/drill-* /var/lib/kimi-rig/serving/drill-* "
            f"/var/lib/kimi-rig/serving/fallback.json /var/log/kimi-rig/drill-* /run/kimi-rig/drill-* "
            f"{layout.CREDENTIALS}/api-key; "
            "systemctl daemon-reload",
            check=False,
        )
        for path in self.path(HOME).glob("faults-*"):
            path.unlink()

    def start(self, name: str, *, check: bool = True) -> str:
        """What `systemctl start` of drill-<name> says."""
        return self.ssh(f"systemctl start kimi-drill-{name} 2>&1", check=check)

    def state(self, name: str, prefix: str = "drill-") -> dict[str, Any]:
        """drill-<name> as `rigctl status` shows it."""
        rows = json.loads(self.ssh("rigctl status --json"))
        [row] = [row for row in rows if row["name"] == f"{prefix}{name}"]
        found: dict[str, Any] = row
        return found

    def until(self, name: str, seconds: float = 30, prefix: str = "drill-", **wanted: Any) -> dict[str, Any]:
        """The state once it has these values."""
        end = time.monotonic() + seconds
        while True:
            row = self.state(name, prefix)
            if all(row[key] == value for key, value in wanted.items()):
                return row
            assert time.monotonic() < end, f"not {wanted}: {row}\n" + self.ssh(
                f"journalctl --no-pager -n 40 -u kimi-{prefix}{name}"
            )
            time.sleep(0.2)

    def pid(self, name: str, pattern: str, prefix: str = "drill-") -> int:
        """The process of drill-<name> whose command line has `pattern`."""
        group = f"/sys/fs/cgroup/systemd/system.slice/kimi-{prefix}{name}.service/cgroup.procs"
        unified = f"/sys/fs/cgroup/unified/system.slice/kimi-{prefix}{name}.service/cgroup.procs"
        plain = f"/sys/fs/cgroup/system.slice/kimi-{prefix}{name}.service/cgroup.procs"
        script = f"for p in $(cat {plain} {unified} {group} 2>/dev/null | sort -un); do "
        script += "echo $p $(tr '\\0' ' ' < /proc/$p/cmdline); done"
        lines = [line for line in self.ssh(script).splitlines() if re.match(rf"\d+ {pattern}", line)]
        assert lines, f"no process of drill-{name} is {pattern}"
        return int(lines[0].split()[0])

    def told(self, fault: str, ends_in: str, message: str, begun: float) -> None:
        """One row of the table of results."""
        self.rows.append((fault, ends_in, message, time.monotonic() - begun))

    def table(self) -> str:
        head = "| fault | ends in | `rigctl status` says | seconds |\n|---|---|---|---|\n"
        return head + "".join(f"| {a} | {b} | {c.replace('|', '/')} | {d:.1f} |\n" for a, b, c, d in self.rows)


def listens(port: int) -> str:
    """A shell command that waits until somebody listens at 127.0.0.1:<port>."""
    return f"timeout 30 sh -c \"until grep -q ':{port:04X} 00000000:0000 0A' /proc/net/tcp; do sleep 0.1; done\""


ENGINE = rf"{HOME}/env/bin/python {HOME}/standin.py"
WORKER = ".*VLLM::Worker"
SUPERVISOR = r".* -I -X utf8 -c import sys.* serve "


@pytest.fixture(scope="session")
def session_box(bare_box: DeployBox, request: pytest.FixtureRequest) -> Iterator[DrillBox]:
    """A box of the tests' own with this version of rigctl."""
    drill = DrillBox()
    wanted = hostkit_path(host_plan(host_data("all", "sandbox"), "debian-12", HostSettings()))
    if drill.ssh(f"readlink {layout.HOSTKIT}/current", check=False).strip() != wanted:
        if request.config.getoption("--real"):
            request.getfixturevalue("engine_port")
        deploy = bare_box.deploy()
        assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    yield drill
    drill.clear()
    drill.ssh(f"rm -rf {HOME}")
    if table := os.environ.get("KIMI_RIG_DRILL_TABLE"):
        Path(table).write_text(drill.table())


@pytest.fixture(scope="module")
def box(session_box: DrillBox) -> Iterator[DrillBox]:
    """The same, with the stand-in engine: what ran before may have uninstalled everything. A deploy may follow."""
    session_box.prepare()
    yield session_box
    session_box.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", action="store_true", help="drill the deployed engine as well")


@contextmanager
def memory_group(drill: DrillBox, pid: int | None = None) -> Iterator[Callable[[int], None]]:
    """Put the whole box, or one process of it, into a memory cgroup of the computer: the box's own limits may not hold.

    Yields what sets the limit: so many MiB above what cannot be given back. Memory counts from the entry on.
    """
    parent = Path("/sys/fs/cgroup/memory")
    if not (parent / "memory.limit_in_bytes").exists() or not os.access(parent, os.W_OK):
        pytest.skip("this computer has no memory controller of cgroup v1 that we may use")
    group = parent / f"kimi-rig-drill-{os.getpid()}"
    group.mkdir()

    def limit(spare_mib: int) -> None:
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(counts["total_inactive_file"]) + int(counts["total_active_file"])
        used = int((group / "memory.usage_in_bytes").read_text()) - files
        (group / "memory.limit_in_bytes").write_text(str(used + (spare_mib << 20)))

    try:
        for found in _processes(drill, pid):
            with suppress(OSError):
                (group / "cgroup.procs").write_text(str(found))
        yield limit
    finally:
        (group / "memory.limit_in_bytes").write_text("-1")
        while left := (group / "cgroup.procs").read_text().split():
            for number in left:
                with suppress(OSError):
                    (parent / "cgroup.procs").write_text(number)
        time.sleep(0.5)
        group.rmdir()


def _processes(drill: DrillBox, pid: int | None) -> list[int]:
    """The box's processes by their numbers outside; `pid`: only the one that has this number inside."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            numbers = re.search(r"^NSpid:\s+(.*)$", (process / "status").read_text(), re.MULTILINE)
            inside = int(numbers[1].split()[-1]) if numbers else None
            if (process / "root").samefile(drill.box.root) and pid in (None, inside):
                found.append(int(process.name))
    return found


def slower(**more: Any) -> Limits:
    """The drill's thresholds but those given."""
    return Limits(**{**QUICK.model_dump(), **more})
