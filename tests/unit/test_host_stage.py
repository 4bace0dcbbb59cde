"""The host stage through pyinfra itself, on a host that only answers (@fake)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rig.__main__ import main as kimi_rig
from rig.artifacts.checkpoint_orders import expected_bytes, revision
from rig.artifacts.disk import ENVIRONMENT_BYTES, disk
from rig.artifacts.host_checks import findings, fits
from rig.artifacts.units import engine_environment
from rig.catalog.entries import ROOT, load_catalog
from rig.cli.arguments import CONVERGED, WOULD_CHANGE
from rig.cli.converge import plan_of
from rig.facts import remote_script
from rig.facts.host import parse_host
from rig.facts.report import NO_PYTHON, HostReport
from rig.host.cuda_toolkit import toolkit_for
from rig.host.explanation import explain_json
from rig.host.settings import HostSettings
from rig.host.topology import decide
from rig.operations.common import PLAN_LOG
from rig.plan.host_plan import HostPlan, host_plan, plan_from_facts, questions
from tests.support.plans import GROUP_DATA, data
from tests.unit.test_memory import CONFIG

TURIN = ROOT / "rig/facts/turin-direct.json"


def stage(
    tmp_path: Path, document: str, *arguments: str, task: str = "tasks/host.py", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a task for one answering host with the data of tests/support/inventory/group_data."""
    # A refusal is a command that fails on the host.
    responses = {"KIMI_RIG_FACTS": document, "exit 1": {"success": False}}
    answers = {"fake_delay": 0, "fake_delay_jitter": 0, "fake_responses": responses}
    (tmp_path / "gpu.py").write_text(f"gpu = [('@fake/turin', {answers!r})]\n")
    command = [sys.executable, "-m", "pyinfra", "--chdir", str(ROOT), "--group-data", str(GROUP_DATA)]
    environment = os.environ | {"PYINFRA_PROGRESS": "off", "PYTHONPATH": f"{ROOT}:{ROOT}/files/hostkit"} | variables
    return subprocess.run(
        [*command, "-vv", str(tmp_path / "gpu.py"), task, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_a_turin_host_is_staged_and_marked(tmp_path: Path) -> None:
    done = stage(tmp_path, TURIN.read_text(), "-y")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-2000:]
    assert "driver 590.48.01 works and is kept" in output
    for path in (
        "/etc/default/grub.d/90-kimi-rig.cfg",
        "/etc/modprobe.d/kimi-rig.conf",
        "/opt/kimi-rig/libexec/kimi-acs",
    ):
        assert re.search(rf'mv -fT "\$t" {path}', output), path
    assert "systemctl enable -q kimi-acs.service" in output
    assert "printf '%s\\n' 'kernel_argument.iommu = off'" in output
    assert "Reboot" not in output


def test_orders_of_kernels_are_sent_alone(tmp_path: Path) -> None:
    """An operator asks `rigctl kernel plan` what an entry lacks before a deploy builds from it."""
    done = stage(tmp_path, TURIN.read_text(), "-y", task="tasks/kernel_orders.py")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-2000:]
    assert re.search(r'mv -fT "\$t" /etc/kimi-rig/kernels/sglang-0.5.9.json', output), output[-2000:]
    assert "kernel ensure" not in output and "apt-get" not in output and "systemd-run" not in output


def test_warnings_and_notes_of_the_preflight_appear_once_in_plan_and_deploy(tmp_path: Path) -> None:
    expected = [str(one) for one in findings(plan_from_facts(data("gpu"), parse_host(TURIN.read_text())))]
    assert {one.partition(":")[0] for one in expected} == {"warning", "note"}
    log = tmp_path / "log"
    planned = stage(tmp_path, TURIN.read_text(), "--dry", **{PLAN_LOG: str(log)})
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    plan = plan_of(["@fake/turin"], [], entries)
    assert plan.findings == {"@fake/turin": expected}
    assert plan.exit_code(WOULD_CHANGE) == CONVERGED
    for one in expected:
        assert plan.text().splitlines().count(f"  {one}") == 1
        assert one not in planned.stdout + planned.stderr
    done = stage(tmp_path, TURIN.read_text(), "-y")
    assert done.returncode == 0
    for one in expected:
        assert (done.stdout + done.stderr).count(one) == 1


def test_errors_of_the_preflight_end_the_deploy_before_anything_is_written(tmp_path: Path) -> None:
    document = json.loads(TURIN.read_text())
    document["secure_boot"] = True
    document["commands"]["gpus"] = {"rc": None, "out": "", "err": "nvidia-smi: no answer in 20 s", "seconds": 20}
    done = stage(tmp_path, json.dumps(document), "-y")
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "secure boot is on and the nvidia module has no signature" in output
    assert "no answer in 20 s" in output
    assert "mv -fT" not in output


def test_a_driver_below_the_minimum_ends_the_deploy_before_anything_is_written(tmp_path: Path) -> None:
    document = TURIN.read_text()
    assert "590.48.01" in document
    done = stage(tmp_path, document.replace("590.48.01", "565.57.01"), "-y")
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "release sglang-0.5.9 needs driver 570, this host has 565.57.01" in output
    assert "set driver_upgrade for this host" in output
    assert "mv -fT" not in output


@pytest.mark.parametrize(("answer", "why"), [(NO_PYTHON, NO_PYTHON), ("Traceback", "JSON"), ("", "JSON")])
def test_a_host_that_cannot_be_read_says_why(answer: str, why: str) -> None:
    facts = HostReport().process(answer.splitlines())
    assert why in facts.unknown["host"]
    assert facts.gpus == ()


def test_the_fact_runs_in_a_plain_shell(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(bytes(100))
    command = HostReport().command({"paths": ["/it's here"], "models": [str(tmp_path), "/nowhere"]})
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    facts = HostReport().process(done.stdout.splitlines())
    assert "host" not in facts.unknown
    assert facts.paths["/it's here"].exists is False
    assert facts.models == {str(tmp_path): ({"hidden_size": 8}, 100)}
    empty = subprocess.run(
        ["/bin/sh", "-c", command], env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=True
    )
    assert empty.stdout.strip() == NO_PYTHON


def test_the_eight_card_example_is_explained() -> None:
    facts = parse_host(TURIN.read_text())
    page = explain_json("turin", facts, decide(facts))
    assert page["facts"]["paths"] == "12 x NODE, 16 x SYS"
    assert page["facts"]["ACS redirect"] == "on 8 of 8 bridges above the cards"
    assert len(page["pending_reboot"]) == 7


def test_explain_prints_recorded_facts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert kimi_rig(["explain", "--facts", str(TURIN), "--format", "json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)
    assert page["host"] == "turin-direct"
    assert kimi_rig(["explain", "--facts", str(TURIN)]) == 0
    assert capsys.readouterr().out.startswith("turin-direct\n")
    (tmp_path / "broken.json").write_text("{}")
    assert kimi_rig(["explain", "--facts", str(tmp_path / "broken.json")]) == 1
    assert "broken.json: facts of schema 1 are needed" in capsys.readouterr().err


def test_explain_refuses_an_inventory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimi_rig(["explain", "inventory/nosuch.py"]) == 1
    assert "there is no inventory file inventory/nosuch.py" in capsys.readouterr().err


NO_DRAFTER = "custom-drafter: no config.json of it was read on the host, and its entry names no `shape`"


def test_configurations_on_the_host_are_accounted_for(tmp_path: Path) -> None:
    config = {"text_config": CONFIG["text_config"]}
    document = json.loads(TURIN.read_text())
    document["models"] = [
        {"path": "/shared/kimi-k2.5-int4", "config": json.dumps(config), "bytes": 595_200_000_000},
        {"path": "/data/eagle3/output_10k/4", "config": "{", "bytes": 5},
        None,
    ]
    names = ["vllm-base", "vllm-eagle3-custom"]
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(json.dumps(document)))
    accounts, unknown = fits(plan)
    assert [(one.name, one.fits, one.context) for one in accounts] == [(name, True, 32768) for name in names]
    assert unknown == {"vllm-eagle3-custom": NO_DRAFTER}
    assert f"the memory account of vllm-eagle3-custom leaves the drafter out: {NO_DRAFTER}" in {
        one.message for one in findings(plan)
    }
    document["models"][0]["bytes"] *= 2
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(json.dumps(document)))
    assert "memory-fit" in {one.code for one in findings(plan)}


def test_a_target_that_does_not_fit_alone_is_a_finding_before_its_drafter_is_known() -> None:
    names = ["vllm-eagle3-custom", "sglang-eagle3-custom"]
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(TURIN.read_text()))
    accounts, unknown = fits(plan)
    assert [(one.name, one.drafter, one.starts) for one in accounts] == [(name, 0, True) for name in names]
    assert unknown == dict.fromkeys(names, NO_DRAFTER)
    halved = {name: one.model_copy(update={"tensor_parallel": 4}) for name, one in plan.serving.items()}
    accounts, unknown = fits(replace(plan, serving=halved))
    assert unknown == {}
    assert [round(one.weights / 1e9) for one in accounts] == [150, 150]
    told = [one for one in findings(replace(plan, serving=halved)) if one.code == "memory-fit"]
    assert [one.severity for one in told] == ["error", "error"]
    assert told[0].message.startswith("vllm-eagle3-custom does not fit: of 97.5 GB a GPU weights 150")
    assert told[0].remedy == "raise tensor_parallel, or take a smaller checkpoint"


def test_an_entry_without_a_fraction_is_accounted_with_what_its_engine_takes() -> None:
    names = ["vllm-base", "sglang-base"]
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(TURIN.read_text()))
    unsaid = {name: one.model_copy(update={"memory_fraction": None}) for name, one in plan.serving.items()}
    (fit,), unknown = fits(replace(plan, serving=unsaid))
    assert (fit.name, fit.budget) == ("vllm-base", int(0.9 * 97887 * 2**20)), "of vLLM 0.16.0"
    assert unknown.keys() == {"sglang-base"}, "which decides by itself"


def adds(plan: HostPlan) -> dict[str, list[int | None]]:
    return {one.mount: [item.bytes for item in one.adds] for one in disk(plan)}


def test_a_bare_host_is_asked_for_the_space_of_what_it_has_yet_to_get() -> None:
    document = json.loads(TURIN.read_text())
    plan = plan_from_facts(data("gpu", configurations=["vllm-base"]), parse_host(json.dumps(document)))
    (environment,) = plan.environments.values()
    reserve = 1 << 30
    assert adds(plan) == {"/": [ENVIRONMENT_BYTES["cuda"]], "/shared": [595_200_000_000, reserve]}
    # By the catalogue's shape, before there is a config on the host.
    assert [one.name for one in fits(plan)[0]] == ["vllm-base"]
    model = plan.checkpoint_paths["kimi-k2.5-int4"]
    document["models"] = [{"path": model, "config": None, "bytes": None, "partial": 500_000_000_000}]
    document["environments"] = [environment.path]
    plan = plan_from_facts(data("gpu", configurations=["vllm-base"]), parse_host(json.dumps(document)))
    assert adds(plan) == {"/shared": [95_200_000_000, reserve]}
    full = next(one for one in document["paths"] if one["path"] == "/shared")
    full["free"] = 90_000_000_000
    plan = plan_from_facts(data("gpu", configurations=["vllm-base"]), parse_host(json.dumps(document)))
    found = {one.code: one.message for one in findings(plan)}["space"]
    assert found.startswith("/shared has 90 GB free of ") and "a deploy needs 96 GB: checkpoint kimi-k2.5-int4" in found


def test_a_host_that_could_not_be_read_is_not_refused_for_what_is_not_known() -> None:
    plan = replace(host_plan(data("sandbox"), "debian-12", HostSettings()), facts=HostReport().process([NO_PYTHON]))
    assert {one.severity for one in findings(plan)} == {"warning"}


def test_a_manifest_says_better_than_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load_catalog().checkpoints["kimi-k2.5-int4"]
    custom = load_catalog().checkpoints["custom-drafter"]
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(tmp_path))
    assert expected_bytes("kimi-k2.5-int4", entry) == 595_200_000_000
    (tmp_path / "manifests").mkdir()
    files = [{"path": path, "size": size, "sha256": "0" * 64} for path, size in (("a", 7), ("b", 5))]
    listed = {"format": 1, "source": "x", "revision": revision(entry), "files": files}
    (tmp_path / "manifests/kimi-k2.5-int4.json").write_text(json.dumps(listed))
    assert expected_bytes("kimi-k2.5-int4", entry) == 12
    assert expected_bytes("custom-drafter", custom) is None


def test_the_sandbox_needs_the_space_of_its_environment_alone() -> None:
    document = json.loads(TURIN.read_text())
    document["files"]["/etc/os-release"] = "ID=debian\nVERSION_ID=12\n"
    plan = plan_from_facts(data("sandbox"), parse_host(json.dumps(document)))
    assert adds(plan) == {"/": [ENVIRONMENT_BYTES["cpu"]]}


def test_a_checkpoint_of_a_place_of_its_own_is_asked_after() -> None:
    asked = questions(data("gpu", models="/elsewhere"))
    assert asked["paths"][:3] == ["/opt/kimi-rig/env", "/elsewhere", "/data/eagle3"]
    assert "/elsewhere/kimi-k2.5-int4" in asked["models"]
    assert asked["toolkits"] == []


def test_an_engine_compiles_with_the_toolkit_of_its_own_version() -> None:
    document = json.loads(TURIN.read_text())
    document["toolkits"] = {f"/usr/local/cuda-{v}": f"release {v}, V{v}.61" for v in ("12.8", "12.9", "13.0")}
    names = ["vllm-base", "sglang-base"]
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(json.dumps(document)))
    assert {env.cuda_home for env in plan.environments.values()} == {"/usr/local/cuda-12.9"}
    assert engine_environment(plan, plan.serving["vllm-base"])["CUDA_HOME"] == "/usr/local/cuda-12.9"
    assert not {"cuda-none", "cuda-old", "cuda-home"} & {one.code for one in findings(plan)}
    named = data("gpu", configurations=names, cuda_home="/opt/cuda")
    document["toolkits"] = {"/opt/cuda": "release 12.8, V12.8.93"}
    plan = plan_from_facts(named, parse_host(json.dumps(document)))
    assert engine_environment(plan, plan.serving["vllm-base"])["CUDA_HOME"] == "/opt/cuda"
    assert {one.code: one.severity for one in findings(plan)}["cuda-old"] == "warning"
    document["toolkits"] = {}
    plan = plan_from_facts(named, parse_host(json.dumps(document)))
    assert "/opt/cuda/bin/nvcc is not there" in {one.code: one.message for one in findings(plan)}["cuda-home"]
    document["toolkits"] = {"/usr/local/cuda-13.0": "release 13.0, V13.0.88"}
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(json.dumps(document)))
    assert "CUDA_HOME" not in engine_environment(plan, plan.serving["vllm-base"])
    assert (
        "this host has /usr/local/cuda-13.0 (13.0.88)" in {one.code: one.message for one in findings(plan)}["cuda-none"]
    )


@pytest.mark.parametrize(("version", "severity"), [("11.8", "error"), ("12.8", "warning"), ("12.9", None)])
def test_a_toolkit_that_is_too_old_is_said(version: str, severity: str | None) -> None:
    document = json.loads(TURIN.read_text())
    document["toolkits"] = {"/opt/cuda": f"Cuda compilation tools, release {version}, V{version}.61"}
    plan = plan_from_facts(data("gpu", cuda_home="/opt/cuda"), parse_host(json.dumps(document)))
    assert {one.code: one.severity for one in findings(plan)}.get("cuda-old") == severity


def test_a_release_that_brings_its_compiler_uses_that() -> None:
    release = load_catalog().releases["vllm-0.33.0"]
    there = {"/usr/local/cuda-13.0": (13, 0, 88)}
    assert toolkit_for(release, there, None, carries_nvcc=True) is None
    assert toolkit_for(release, there, None, carries_nvcc=False) == "/usr/local/cuda-13.0"
    assert toolkit_for(release, there, "/opt/cuda", carries_nvcc=True) == "/opt/cuda"
    assert toolkit_for(release, {"/usr/local/cuda-13.0": None}, None, carries_nvcc=False) is None


def test_the_script_finds_toolkits_and_what_staging_has_begun(tmp_path: Path) -> None:
    (tmp_path / "cuda/bin").mkdir(parents=True)
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial/a.safetensors").write_bytes(b"x" * 100_000)
    (tmp_path / "env/vllm/abc").mkdir(parents=True)
    (tmp_path / "env/vllm/abc/kimi-rig.json").write_text("{}")
    wanted = {
        "models": [f"{tmp_path}/model"], "environments": f"{tmp_path}/env",
        "toolkits": [f"{tmp_path}/cuda", "/nowhere"],
    }  # fmt: skip
    done = subprocess.run(["/bin/sh", "-c", HostReport().command(wanted)], capture_output=True, text=True, check=True)
    facts = HostReport().process(done.stdout.splitlines())
    assert facts.toolkits[f"{tmp_path}/cuda"] == (12, 9, 86)
    assert "/nowhere" not in facts.toolkits
    assert facts.environments == (f"{tmp_path}/env/vllm/abc",)
    assert 90_000 < facts.partial[f"{tmp_path}/model"] < 120_000


def test_sources_are_probed_only_while_something_is_to_come_from_there(tmp_path: Path) -> None:
    asked = questions(data("gpu"))
    assert asked["hubs"] == {"https://huggingface.co": ["/shared/kimi-k2.5-int4"]}
    assert asked["driver_source"].startswith("https://developer.download.nvidia.com/")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/a.safetensors").touch()
    hubs = {"http://a": [f"{tmp_path}/here"], "http://b": [f"{tmp_path}/here", f"{tmp_path}/not"]}
    options = {"probes": ["http://c"], "hubs": hubs, "driver_source": "http://d"}
    card = {"class": "0x030200"}
    assert remote_script.sources(options, []) == ["http://c", "http://b"]
    assert remote_script.sources(options, [card])[-1] == "http://d"
