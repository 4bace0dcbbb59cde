"""What each unit of ours is exposed to, by `systemd-analyze security` of systemd 252; lower is better, 10 the most.

Limits are what was reached. A unit that nobody looked at fails `test_every_unit_is_in_a_table`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rig.artifacts.edge import RENEWAL, edge_files
from rig.catalog.entries import ROOT
from rig.operations import jobs
from rig.operations.system import restarted_when_idle
from rigctl import builder
from rigctl.contract import layout
from rigctl.contract.confinement import confined
from rigctl.training import commands
from tests.support.plans import gpu_plan
from tests.unit.test_edge import EDGE

GOLDEN = ROOT / "tests" / "unit"
ON_DISK = [(path.parent, path) for path in sorted(GOLDEN.glob("golden*/**/*.service"))]
CERTIFICATES: dict[str, Any] = {
    "authority": ["kimi-1.example.com"],
    "acme": {"names": ["kimi-1.example.com"], "email": "me@example.com"},
}
LIMITS = {
    "kimi-builder-none": 1.0,
    "kimi-builder-loopback": 1.3,
    "kimi-builder-any": 1.4,
    "kimi-fallback@": 0.7,
    "kimi-edge-certificate-authority": 1.5,
    "kimi-edge-certificate-acme": 1.9,
    "kimi-edge": 1.4,
    "": 1.3,  # what serves
}
"""Pattern of a unit's name -> limit; the first counts."""
JOBS = {
    ("benchmark.py", "generator"): 1.4,
    ("benchmark.py", "measured"): 2.8,
    ("checkpoints.py", "checkpoint"): 2.5,
    ("engine_environments.py", "environment"): 1.4,
    ("hostkit.py", "installed"): 2.3,
    ("kernel_wheels.py", "kernel"): 3.1,
    ("system.py", "restarted_when_idle"): 2.8,
    ("commands.py", "options"): 2.9,
}
"""(file, function) in rig/operations, and rigctl/training/commands.py: limit. Root, so that the builder's units are
started and their work taken."""


def properties(options: Sequence[str]) -> list[str]:
    told = [one.removeprefix("--property=") for one in options if one.startswith("--property=")]
    return ["[Service]", "ExecStart=/bin/true", *told]


def confinements() -> Iterator[tuple[tuple[str, str], list[str]]]:
    """(place, options of systemd-run) of every unit that an operation starts as root."""
    operations = [path for path in (ROOT / "rig" / "operations").glob("*.py") if path.name != "jobs.py"]
    for path in [*sorted(operations), Path(str(commands.__file__))]:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                if isinstance(call, ast.Call) and name == "jobs.LongJob":
                    given = {one.arg: one.value for one in call.keywords}
                    writes = None if ast.unparse(given["writes"]) == "None" else ["/srv/x"]
                    network = ast.literal_eval(given["network"]) if "network" in given else "none"
                    watches = "watches" in given
                    job = jobs.LongJob("x", ["true"], "true", writes, network, watches)
                    yield (path.name, function.name), job.options()
                elif isinstance(call, ast.Call) and name == "confined":
                    writes, network = map(ast.literal_eval, call.args[1:3])
                    watches = any(one.arg == "watches" for one in call.keywords)
                    yield (path.name, function.name), confined("x", writes, network, watches=watches)


@pytest.fixture(scope="module")
def exposures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Unit -> exposure, of every unit that is rendered or started."""
    units = {f"kimi-{folder.name}-{path.name.replace('@.', '@x.')}": path.read_text() for folder, path in ON_DISK}
    for name, tls in CERTIFICATES.items():
        host = gpu_plan(edge={**EDGE, "tls": {name: tls}}, configurations=["vllm-base"])
        units[f"kimi-edge-certificate-{name}.service"] = edge_files(host)[f"{layout.UNITS}/{RENEWAL}"]
    for place, options in confinements():
        units[f"kimi-root-{'-'.join(place)}.service"] = "\n".join(properties(options))
    directory = tmp_path_factory.mktemp("units")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_confined", True)
        patch.setattr(builder, "user", lambda: builder.User(4711, 4711))
        patch.setattr(builder, "RUN", directory)
        patch.setattr(builder, "_end", lambda _: None)
        for network in builder.NETWORKS:
            with builder.sandboxed(["true"], unit="x", network=network) as command:
                units[f"kimi-builder-{network}.service"] = "\n".join(properties(command))
    for name, text in units.items():
        (directory / name).write_text(text)
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        *(str(directory / name) for name in units),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"Overall exposure level for (\S+): ([\d.]+)", said))
    assert found.keys() == units.keys()
    return {name: float(level) for name, level in found.items()}


def test_no_unit_is_exposed_more_than_it_was(exposures: dict[str, float]) -> None:
    def limit(name: str) -> float:
        if name.startswith("kimi-root-"):
            return JOBS[(name.split("-")[2], name.split("-")[3].removesuffix(".service"))]
        return next(limit for pattern, limit in LIMITS.items() if re.search(pattern, name))

    found = [f"{name}: {level}, limit {limit(name)}" for name, level in exposures.items() if level > limit(name)]
    assert not found, "\n".join(found)


def test_every_unit_is_in_a_table() -> None:
    assert dict(confinements()).keys() == JOBS.keys()
    starts = {
        path.name
        for folder in ("rig/operations", "rig/cli", "tasks", "files/hostkit/rigctl")
        for path in (ROOT / folder).rglob("*.py")
        if "systemd-run" in path.read_text()
    }
    # host_settings.py: a timer that runs `systemctl reboot`. confinement.py starts nothing.
    assert starts == {"jobs.py", "system.py", "host_settings.py", "builder.py", "commands.py", "confinement.py"}
    assert restarted_when_idle("x")[:2] == ["systemd-run", "--collect"]
