"""The host stage through pyinfra itself, on a host that only answers (@fake)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rig.catalog import ROOT
from rig.explain import explain_json
from rig.explain_command import main as explain_main
from rig.facts.host import parse_host
from rig.facts.report import NO_PYTHON, HostReport
from rig.hostplan import plan_from_facts
from rig.topology import decide
from tasks.host import findings, fits
from tests.unit.test_engines_and_units import data
from tests.unit.test_memory import CONFIG

TURIN = ROOT / "tests/fixtures/host/turin-direct.json"


def stage(tmp_path: Path, document: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tasks/host.py for one answering host with the data of inventory/group_data."""
    # A refusal is a command that fails on the host.
    responses = {"KIMI_RIG_FACTS": document, "exit 1": {"success": False}}
    answers = {"fake_delay": 0, "fake_delay_jitter": 0, "fake_responses": responses}
    (tmp_path / "gpu.py").write_text(f"gpu = [('@fake/turin', {answers!r})]\n")
    command = [sys.executable, "-m", "pyinfra", "--chdir", str(ROOT), "--group-data", "inventory/group_data"]
    environment = os.environ | {"PYINFRA_PROGRESS": "off", "PYTHONPATH": f"{ROOT}:{ROOT}/files/hostkit"}
    return subprocess.run(
        [*command, "-vv", str(tmp_path / "gpu.py"), "tasks/host.py", *arguments],
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
    command = HostReport().command(paths=["/it's here"], models=[str(tmp_path), "/nowhere"])
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
    assert explain_main(["--facts", str(TURIN), "--format", "json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)
    assert page["host"] == "turin-direct"
    assert explain_main(["--facts", str(TURIN)]) == 0
    assert capsys.readouterr().out.startswith("turin-direct\n")
    (tmp_path / "broken.json").write_text("{}")
    assert explain_main(["--facts", str(tmp_path / "broken.json")]) == 1
    assert "broken.json: facts of schema 1 are needed" in capsys.readouterr().err


def test_explain_refuses_an_inventory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_main(["inventory/nosuch.py"]) == 1
    assert "there is no inventory file inventory/nosuch.py" in capsys.readouterr().err


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
    (fit,) = fits(plan)
    assert (fit.name, fit.fits, fit.context) == ("vllm-base", True, 32768)
    document["models"][0]["bytes"] *= 2
    plan = plan_from_facts(data("gpu", configurations=names), parse_host(json.dumps(document)))
    assert "memory-fit" in {one.code for one in findings(plan)}
