"""Facts, policy, page, preflight and the GPU-free check on this very machine, through pyinfra's @local connector.

python3 tests/gpu/host_stage.py OUT [--apply]

OUT: a folder; up to eight files are written there. --apply: also run the host stage twice, for a machine that may be
changed: the second time must change nothing. It configures no GPU.
Needs root, Python 3.12 with the packages of requirements/control.txt (pytest and testinfra only for the verification),
and torch for the processes that hold memory. Exit code 0: every step that could run did as it should.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files/hostkit")]

from rig.cli.converge import inventory_hosts, pyinfra
from rig.facts.host import HostFacts, parse_host
from rig.host.all_reduce_speed import verdict
from rig.host.topology import decide
from rig.plan.host_plan import plan_from_facts
from rigctl.errors import RigctlError
from rigctl.services.leftovers import holders
from rigctl.supervisor.prechecks import gpus_free
from rigctl.supervisor.specification import Specification
from tests.unit.serving import limits, specification

HOLD_MIB = 8192
LIMIT_SECONDS = 180
# Says when it has the memory, and keeps it until it is killed.
HOLD = """
import sys, torch
memory = torch.ones(int(sys.argv[2]) << 20, dtype=torch.uint8, device=f"cuda:{sys.argv[1]}")
print("holds", flush=True)
sys.stdin.read()
"""
RECORDED = (
    "uname -a",
    "cat /etc/os-release",
    "nvidia-smi",
    "nvidia-smi -q",
    "nvidia-smi topo -m",
    "nvidia-smi topo -p2p r",
    "nvidia-smi topo -p2p w",
    "nvidia-smi nvlink --status",
    "nvidia-smi --query-gpu=index,name,nosuchfield --format=csv",
    "nvidia-smi -i 99",
    "cat /proc/driver/nvidia/version",
    "cat /proc/driver/nvidia/params",
    "cat /proc/driver/nvidia/gpus/*/information",
    "ls -l /dev/nvidia* /dev/nvidia-caps",
    "lspci -vvv",
    "modinfo nvidia",
    "cat /proc/cmdline",
    "systemd-detect-virt",
    "systemd-detect-virt --container",
    "systemctl is-system-running",
    "ls -l /usr/local",
    "nvcc --version",
    "python3 --version",
    "sysctl kernel.apparmor_restrict_unprivileged_userns",
    "dpkg-query -W needrestart unattended-upgrades netplan.io openssh-server systemd grub-common",
)


class Skipped(Exception):
    """A step that cannot run here, with the reason."""


@dataclass
class Report:
    """What each step came to, written as OUT/summary.json after every step."""

    out: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    def step(self, name: str, action: Callable[[], Any]) -> None:
        """Run one step; a failure is recorded and does not end the run."""
        begin = time.monotonic()
        try:
            result, outcome = action(), "ok"
        except Skipped as reason:
            result, outcome = f"skipped: {reason}", "skipped"
        except Exception as error:  # whatever it is, the other steps still tell something
            result, outcome = f"{type(error).__name__}: {error}", "failed"
        seconds = round(time.monotonic() - begin, 3)
        self.steps.append({"step": name, "outcome": outcome, "seconds": seconds, "result": result})
        print(f"{outcome:<8} {name} ({seconds} s): {json.dumps(result)[:600]}", flush=True)
        self.save("summary.json", json.dumps(self.steps, indent=2))

    def save(self, name: str, text: str) -> None:
        (self.out / name).write_text(text, encoding="utf-8")

    @property
    def failed(self) -> bool:
        return any(step["outcome"] == "failed" for step in self.steps)


def run(*command: str) -> str:
    """Standard output of a command. Raises RuntimeError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=ROOT)
    text = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]}: exit code {done.returncode}: {text[-3000:]}")
    return done.stdout


def inventory(folder: Path, **data: Any) -> str:
    """An inventory of this machine alone; the repository's group data holds for it."""
    folder.mkdir(parents=True)
    (folder / "group_data").symlink_to(ROOT / "inventory/group_data")
    (folder / "gpu.py").write_text(f"gpu = [('@local', {data!r})]\n")
    return str(folder / "gpu.py")


def read_facts() -> HostFacts:
    """This machine, read as a deploy reads it, without pyinfra in between."""
    options = json.dumps({"paths": ["/shared", "/data/eagle3", "/opt/kimi-rig/env"]})
    return parse_host(run(sys.executable, str(ROOT / "rig/facts/remote_script.py"), options))


def record(report: Report) -> str:
    """The tools' own words."""
    parts = []
    for command in RECORDED:
        done = subprocess.run(
            ["timeout", "30", "sh", "-c", command], capture_output=True, text=True, check=False, errors="replace"
        )
        parts.append(f"$ {command}\n{done.stdout}{done.stderr}[exit code {done.returncode}]\n")
    report.save("recorded.txt", "\n".join(parts))
    return f"{len(parts)} commands"


def facts(report: Report) -> dict[str, Any]:
    options = json.dumps({"paths": ["/shared", "/data/eagle3", "/opt/kimi-rig/env"]})
    document = run(sys.executable, str(ROOT / "rig/facts/remote_script.py"), options)
    report.save("facts.json", document)
    found = parse_host(document)
    return {
        "system": found.distribution,
        "machine": f"virtualisation {found.virtualisation}, container {found.container}",
        "cards": [f"{gpu.address} {gpu.name}" for gpu in found.gpus],
        "driver": found.driver.version,
        "relations": found.relations,
        "seconds": found.seconds,
        "unknown": dict(found.unknown),
    }


def explain(report: Report, hosts: str) -> dict[str, Any]:
    """`make explain`, both forms: facts, policy and preflight through pyinfra's local connector."""
    command = (sys.executable, "-m", "rig", "explain", hosts)
    report.save("explain.txt", run(*command))
    document = run(*command, "--format", "json")
    report.save("explain.json", document)
    (page,) = json.loads(document)
    return {
        "applied": [one["name"] for one in page["settings"] if one["applied"]],
        "explained": sum(1 for one in page["settings"] if not one["applied"]),
        "pending_reboot": page["pending_reboot"],
        "findings": [f"{one['severity']} {one['code']}" for one in page["findings"]],
    }


def timings(hosts: str) -> dict[str, Any]:
    """The one remote command of the facts through pyinfra, five times, seconds."""
    taken = []
    for _ in range(5):
        begin = time.monotonic()
        run(sys.executable, "-m", "rig", "explain", hosts)
        taken.append(round(time.monotonic() - begin, 3))
    script = [read_facts().seconds for _ in range(5)]
    return {"explain": taken, "facts_script": script}


def apply_twice(report: Report, hosts: str) -> str:
    """The host stage for real; the second run changes nothing."""
    done = subprocess.run(pyinfra(hosts, "tasks/host.py", "-y"), capture_output=True, text=True, check=False, cwd=ROOT)
    report.save("apply.txt", done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
    plan = json.loads(run(*pyinfra(hosts, "tasks/host.py", "--dry", "--json")))["plan"]
    if left := [one["name"] for one in plan if one["hosts_with_change"] or one["hosts_with_conditional_change"]]:
        raise RuntimeError(f"a second run would change: {left}")
    return f"{len(plan)} operations, none would change anything the second time"


def verify(report: Report, hosts: str) -> dict[str, str]:
    """The verification of settings by live values (tests/host/test_settings.py), on a machine without a deploy."""
    missing = [name for name in ("pytest", "testinfra") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{', '.join(missing)} not carried")
    conftest, tests = (importlib.import_module(f"tests.host.{name}") for name in ("conftest", "test_settings"))
    (entry,) = inventory_hosts(hosts)
    host = importlib.import_module("testinfra").get_host("local://")
    target = conftest.Target("@local", host, plan_from_facts(entry["data"], read_facts()), {}, {})
    checks = [tests.test_host_files, tests.test_settings_are_live, tests.test_preflight_has_no_errors]
    on_cards = [
        tests.test_cards_have_their_memory_on_the_bus,
        tests.test_no_bridge_redirects_peer_traffic,
        tests.test_the_driver_allows_p2p,
    ]
    outcome = {check.__name__: "skipped: no GPU" for check in on_cards}
    for check in checks + (on_cards if target.plan.facts.gpus else []):
        try:
            check(target)
            outcome[check.__name__] = "passed"
        except importlib.import_module("pytest").skip.Exception as reason:
            outcome[check.__name__] = f"skipped: {reason}"
        except AssertionError as error:
            outcome[check.__name__] = f"failed: {str(error)[:1000]}"
    report.save("verify.txt", json.dumps(outcome, indent=2))
    if any(one.startswith("failed") for one in outcome.values()):
        raise RuntimeError(json.dumps(outcome))
    return outcome


def claim(gpus: list[int], wait: float) -> Specification:
    """A configuration that claims these cards, as far as the check looks at it."""
    return specification(gpus=gpus, limits=limits(gpu_wait_seconds=wait))


def gpu_free_check() -> dict[str, Any]:
    """The check before an engine's start sees a process that holds memory, names it, and sees it gone after a kill."""
    cards = [gpu.index for gpu in read_facts().gpus]
    if not cards:
        raise Skipped("no GPU")
    if importlib.util.find_spec("torch") is None:
        raise Skipped("no torch")
    free = gpus_free(claim(cards, 5))
    command = [sys.executable, "-c", HOLD, str(cards[-1]), str(HOLD_MIB)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        line = child.stdout.readline() if child.stdout else b""
        if line.strip() != b"holds":
            raise RuntimeError(f"torch could not take {HOLD_MIB} MiB")
        try:
            raise RuntimeError(f"the check found nothing: {gpus_free(claim(cards, 1))}")
        except RigctlError as error:
            refused = str(error)
        seen = [(one.pid, one.memory_mib, one.name) for one in read_facts().processes or ()]
        named = [(one.pid, one.command[:80], one.holds) for one in holders() if one.pid == child.pid]
    finally:
        child.kill()
        child.wait()
    begin = time.monotonic()
    after = gpus_free(claim(cards, 60))
    gone = round(time.monotonic() - begin, 2)
    left = read_facts().processes
    if left:
        raise RuntimeError(f"still listed after the kill: {left}")
    return {
        "before": free, "pid": child.pid, "refused": refused, "facts saw": seen, "rigctl free names": named,
        "after the kill": after, "seconds until free": gone,
    }  # fmt: skip


def all_reduce() -> str:
    """The short all-reduce of the verification, with the policy's environment and a hard time limit."""
    found = read_facts()
    if len(found.gpus) < 2:
        raise Skipped(f"{len(found.gpus)} GPU")
    if importlib.util.find_spec("torch") is None:
        raise Skipped("no torch")
    environment = os.environ | dict(decide(found).host.environment.get("vllm", {}))
    begin = time.monotonic()
    done = subprocess.run(
        ["timeout", "-k", "5", str(LIMIT_SECONDS), sys.executable, "-", str(len(found.gpus)), "nccl"],
        input=(ROOT / "files/host/all_reduce.py").read_text(), capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    if "sum ok" not in done.stdout:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return f"{verdict(done.stdout, found, found.gpus, p2p=True)[1]}, after {time.monotonic() - begin:.1f} s"


def main() -> int:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--apply", action="store_true", help="run the host stage too; for a machine that may be changed"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out)
    os.environ["PYINFRA_PROGRESS"] = "off"
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with tempfile.TemporaryDirectory(prefix="kimi-rig-host-") as folder:
        here = inventory(Path(folder) / "explain")
        # No configuration, or its eight cards would be missed; and the cards' persistence mode is not ours to set here.
        overrides = {"boot_unit.nvidia-persistenced.service": None}
        plain = inventory(Path(folder) / "apply", configurations=[], host_overrides=overrides)
        report.step("record", lambda: record(report))
        report.step("facts", lambda: facts(report))
        report.step("explain", lambda: explain(report, here))
        report.step("gpu-free", gpu_free_check)
        report.step("all-reduce", all_reduce)
        report.step("timings", lambda: timings(here))
        if arguments.apply:
            report.step("apply", lambda: apply_twice(report, plain))
        report.step("verify", lambda: verify(report, plain))
    counts = {name: sum(1 for step in report.steps if step["outcome"] == name) for name in ("ok", "skipped", "failed")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
