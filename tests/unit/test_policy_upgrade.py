"""A change of policy stops nothing that was accepted on this boot; a first deploy and correctness still wait."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.artifacts.host_checks import driver_decision, findings, reboot_due, reboot_reasons
from rig.artifacts.units import run_specification, unit_file
from rig.catalog.entries import ROOT, Configuration, Release
from rig.facts import remote_script
from rig.facts.host import Unit, parse_host
from rig.host.explanation import explain_text
from rig.host.live_settings import reboot_needed, reboot_recommended
from rig.host.situation import Workload
from rig.host.topology import decide
from rig.plan import host_plan
from rig.plan.host_plan import HostPlan, plan_from_facts
from rigctl.contract import layout
from rigctl.supervisor import ended
from rigctl.supervisor.live_settings import precheck
from tests.support.plans import data
from tests.unit.serving import specification

ASPM = "kernel_argument.pcie_aspm"


def planned(*accepted: str, tokens: str = "iommu=off amd_iommu=off", **more: Any) -> HostPlan:
    """The recorded host, its IOMMU off, with the rest of the policy's boot-time settings yet to come."""
    document = json.loads((ROOT / "rig/facts/turin-direct.json").read_text())
    document["files"]["/proc/cmdline"] += f" {tokens}"
    if tokens:
        document["iommu"] = {"groups": 0, "types": []}
    document["accepted"] = list(accepted)
    return plan_from_facts(
        data("gpu", configurations=["vllm-base", "sglang-base"], **more), parse_host(json.dumps(document))
    )


def reasons(plan: HostPlan) -> list[str]:
    return reboot_reasons(plan, driver_decision(plan))


def test_a_first_deploy_waits_for_its_reboot() -> None:
    plan = planned()
    assert any(one.startswith(ASPM) for one in reasons(plan))
    assert "pcie_aspm=off" in run_specification(plan, "vllm-base").host_settings.kernel_arguments


def test_policy_alone_never_stops_what_was_accepted_on_this_boot() -> None:
    plan = planned("vllm-base")
    assert reasons(plan) == []
    settings = run_specification(plan, "vllm-base").host_settings
    assert settings.kernel_arguments == ["iommu=off", "amd_iommu=off"]
    assert settings.module_options == {}
    # The files of the next boot are written all the same, and the operator gets a note.
    assert "pcie_aspm=off" in plan.settings.kernel_arguments
    later = {one.code: one.message for one in findings(plan)}["reboot-later"]
    assert ASPM in later and "waited for by nothing" in later
    assert "Recommended at the next reboot" in explain_text("host", plan.facts, plan.decision)
    # What runs is the same: no unit is stale.
    assert unit_file(plan, "vllm-base") == unit_file(planned(), "vllm-base")
    assert run_specification(plan, "vllm-base").digest == run_specification(planned(), "vllm-base").digest


def test_the_precheck_of_a_crashed_engine_passes_and_a_first_one_refuses(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("ro iommu=off amd_iommu=off")
    for plan, stops in ((planned("vllm-base"), False), (planned(), True)):
        found = run_specification(plan, "vllm-base").host_settings.model_dump()
        wanted = specification(host_settings={**found, "sysctls": {}, "governor": None, "disk_scheduler": {}})
        if stops:
            with pytest.raises(Exception, match="pcie_aspm=off"):
                precheck(wanted, tmp_path)
        else:
            assert precheck(wanted, tmp_path) == "2 settings are live"


def test_correctness_and_the_operators_wish_are_waited_for_all_the_same() -> None:
    translating = planned("vllm-base", tokens="")
    assert [one.split(" ")[0] for one in reasons(translating)] == ["kernel_argument.iommu", "kernel_argument.amd_iommu"]
    asked = planned("vllm-base", host_overrides={"kernel_argument.nohz": "on"})
    assert reasons(asked) == ["kernel_argument.nohz = on"]


def test_what_a_configuration_needs_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank starts again under an IOMMU that translates; eight wait for the reboot, and the host with them."""

    def ranks(configuration: Configuration, release: Release, nccl: str | None) -> Workload:
        return Workload((0,), 1, nccl) if release.engine == "vllm" else Workload(None, 8, nccl)

    monkeypatch.setattr(host_plan, "workload_of", ranks)
    plan = planned("vllm-base", tokens="")
    assert run_specification(plan, "vllm-base").host_settings.kernel_arguments == []
    assert run_specification(plan, "sglang-base").host_settings.kernel_arguments == ["iommu=off", "amd_iommu=off"]
    assert len(reasons(plan)) == 2
    monkeypatch.setattr(host_plan, "workload_of", lambda *_: Workload((0,), 1))
    assert reasons(planned("vllm-base", tokens="")) == []


def test_variables_of_the_catalogue_reach_the_policy_and_contradictions_the_operator() -> None:
    plan = planned(host_overrides={"environment.NCCL_P2P_LEVEL": "SYS", "environment.NCCL_P2P_DISABLE": "1"})
    assert "p2p-contradiction" in {one.code for one in findings(plan)}
    entry = plan.serving["vllm-base"].model_copy(update={"environment": {"NCCL_P2P_DISABLE": "1"}})
    assert planned().decision_of(entry).find("environment.NCCL_P2P_LEVEL") is None
    assert planned().decision_of(plan.serving["vllm-base"]).find("environment.NCCL_P2P_LEVEL") is not None


def test_a_reboot_for_what_is_recommended_waits_until_nothing_serves() -> None:
    plan = planned("vllm-base")
    assert reboot_due(plan, driver_decision(plan))
    running = replace(plan, facts=replace(plan.facts, units={layout.unit_name("vllm-base"): Unit(True, True)}))
    assert not reboot_due(running, driver_decision(running))
    needed = planned()
    serving = replace(needed, facts=replace(needed.facts, units={layout.unit_name("vllm-base"): Unit(True, True)}))
    assert reboot_due(serving, driver_decision(serving))


def test_needed_and_recommended_are_all_that_is_pending() -> None:
    for plan in (planned(), planned("x"), planned("x", tokens="")):
        decision = decide(plan.facts)
        needed, later = (asked(decision.settings, plan.facts) for asked in (reboot_needed, reboot_recommended))
        assert not {one.key for one in needed} & {one.key for one in later}


class Places:
    """/run and /var/lib of a host, as the facts script looks for them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        records = {f"{root}{place}": record for place, record in remote_script.RECORDS.items()}
        monkeypatch.setattr(remote_script, "RECORDS", records)

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def test_the_facts_know_who_was_accepted_on_this_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, boot = Places(tmp_path, monkeypatch), ended.boot_id()
    states = "var/lib/kimi-rig/serving"
    places.write("run/kimi-rig/runs/started.json", json.dumps({"accepted_at": 1}))
    places.write("run/kimi-rig/loads/started.json", json.dumps({"accepted_at": None}))
    places.write(f"{states}/crashed/ended.json", json.dumps({"accepted_boot": boot}))
    places.write(f"{states}/other-boot/ended.json", json.dumps({"accepted_boot": "x"}))
    # It worked once on this boot; its last start failed.
    failed = {"accepted": False, "since_boot": [boot, 9.0], "accepted_boot": boot}
    places.write(f"{states}/failed-since/ended.json", json.dumps(failed))
    for number, text in enumerate(("", "[]", "{", "null", '{"since_boot": 3}', '{"accepted": 1, "since_boot": []}')):
        places.write(f"{states}/odd-{number}/ended.json", text)
    assert remote_script.accepted() == ["crashed", "failed-since", "runs"]


@given(st.binary(max_size=300))
def test_foreign_configuration_space_says_yes_no_or_nothing(content: bytes) -> None:
    assert remote_script.clique(content) in (True, False, None)


def test_a_hypervisors_clique_is_read_from_configuration_space() -> None:
    space = bytearray(256)
    space[0x34] = 0x60
    space[0x60:0x62] = bytes((0x10, 0xC8))
    assert remote_script.clique(bytes(space)) is False
    space[0xC8:0xD0] = bytes((9, 0, 8)) + b"P2P" + bytes((1 << 3, 0))
    assert remote_script.clique(bytes(space)) is True
    assert remote_script.clique(bytes(space[:64])) is None
