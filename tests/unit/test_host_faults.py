"""Every fault that a host has shown, from the tools' own words to what the operator is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rig.artifacts.host_checks import driver_decision, findings, reboot_reasons
from rig.catalog.entries import ROOT
from rig.catalog.yaml_source import CatalogError
from rig.facts.host import parse_host
from rig.host.preflight import Severity
from rig.host.system_files import host_files
from rig.plan.host_plan import HostPlan, plan_from_facts
from tests.support.plans import data

Document = dict[str, Any]
NAMES = ["vllm-base", "sglang-base"]


def turin() -> Document:
    document: Document = json.loads((ROOT / "rig/facts/turin-direct.json").read_text())
    return document


def plan_of(document: Document, **more: Any) -> HostPlan:
    return plan_from_facts(data("gpu", configurations=NAMES, **more), parse_host(json.dumps(document)))


def rows(document: Document, keep: Callable[[int], bool]) -> None:
    lines = document["commands"]["gpus"]["out"].splitlines(keepends=True)
    document["commands"]["gpus"]["out"] = lines[0] + "".join(lines[1 + at] for at in range(8) if keep(at))


def hangs(document: Document) -> None:
    for name, answer in document["commands"].items():
        if name in ("gpus", "compute_apps", "topology", "p2p_read", "p2p_write"):
            answer.update(rc=None, out="", err="nvidia-smi: no answer in 20 s")


def prints_an_error(document: Document) -> None:
    out = "Unable to determine the device handle for GPU3: 0000:61:00.0: Unknown Error\n"
    document["commands"]["gpus"] = {"rc": 255, "out": out, "err": "", "seconds": 0.1}


def fell_off_the_bus(document: Document) -> None:
    rows(document, lambda at: at != 3)
    document["commands"]["gpus"].update(rc=15, err="")
    document["commands"]["gpus"]["out"] += "Unable to determine the device handle: GPU is lost.\n"


def seven_of_eight(document: Document) -> None:
    gone = [one for one in document["pci"] if one["class"].startswith("0x03")][7]
    document["pci"].remove(gone)
    rows(document, lambda at: at != 7)


def gen2(document: Document) -> None:
    lines = document["commands"]["gpus"]["out"].splitlines(keepends=True)
    lines[4] = lines[4].replace(", 5, 5, 16, 16,", ", 2, 5, 16, 16,")
    document["commands"]["gpus"]["out"] = "".join(lines)


def small_window(document: Document) -> None:
    card = [one for one in document["pci"] if one["class"].startswith("0x03")][5]
    card["bars"] = [67108864, 268435456, 0]


def older_driver(document: Document) -> None:
    document["files"]["/sys/module/nvidia/version"] = "570.86.15\n"
    document["commands"]["modinfo"]["out"] = "version: 570.86.15\nlicense: Dual MIT/GPL\n"


def other_on_disk(document: Document) -> None:
    document["commands"]["modinfo"]["out"] = "version: 595.58.03\nlicense: Dual MIT/GPL\n"


def other_library(document: Document) -> None:
    out = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.58\n"
    document["commands"]["gpus"] = {"rc": 18, "out": out, "err": "", "seconds": 0.1}


FAULTS = [
    (hangs, "nvidia-smi", Severity.ERROR, "no answer in 20 s"),
    (prints_an_error, "nvidia-smi", Severity.ERROR, "Unable to determine the device handle for GPU3"),
    (fell_off_the_bus, "card-silent", Severity.ERROR, "is on the bus and does not answer"),
    (fell_off_the_bus, "cards", Severity.ERROR, "7 usable of 8 on the bus"),
    (seven_of_eight, "cards", Severity.ERROR, "need card 7, and this host has 7 usable of 7 on the bus"),
    (gen2, "link-speed", Severity.WARNING, "card 3 (0000:61:00.0) runs at PCIe gen 2 and others at 5"),
    (small_window, "bar1", Severity.WARNING, "shows 0.25 GiB of its memory on the bus (BAR1): no P2P"),
    (older_driver, "driver-old", Severity.ERROR, "needs driver 575, this host has 570.86.15"),
    (other_on_disk, "driver-mismatch", Severity.WARNING, "driver 590.48.01 is loaded, 595.58.03 is installed"),
    (other_library, "driver-mismatch", Severity.WARNING, "driver 590.48.01 is loaded"),
]


@pytest.mark.parametrize(
    ("spoil", "code", "severity", "words"), FAULTS, ids=[f"{one[0].__name__}-{one[1]}" for one in FAULTS]
)
def test_a_fault_is_told(spoil: Callable[[Document], None], code: str, severity: Severity, words: str) -> None:
    document = turin()
    assert code not in {one.code for one in findings(plan_of(document))}
    spoil(document)
    told = [one for one in findings(plan_of(document)) if one.code == code]
    assert told, {one.code for one in findings(plan_of(document))}
    assert told[0].severity is severity
    assert words in str(told[0])


def test_memory_management_that_is_still_on_waits_for_the_reboot_that_turns_it_off() -> None:
    document = turin()
    plan = plan_of(document)
    assert "module_option.nvidia_uvm.uvm_disable_hmm = 1" in reboot_reasons(plan, driver_decision(plan))
    document["files"]["/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"] = "Y\n"
    plan = plan_of(document)
    assert not any("hmm" in reason for reason in reboot_reasons(plan, driver_decision(plan)))


def test_a_reboot_that_waits_is_told_and_ends_with_the_arguments_of_the_next_boot() -> None:
    document = turin()
    note = {one.code: one.message for one in findings(plan_of(document))}["reboot"]
    assert "kernel_argument.amd_iommu" in note
    document["files"]["/proc/cmdline"] += " " + " ".join(plan_of(document).settings.kernel_arguments)
    live = plan_of(document)
    assert not any("kernel_argument" in reason for reason in reboot_reasons(live, driver_decision(live)))


def test_an_override_that_contradicts_the_policy_wins_and_is_shown() -> None:
    plan = plan_of(turin(), host_overrides={"kernel_argument.iommu": "pt", "environment.NCCL_P2P_LEVEL": "PHB"})
    notes = [str(one) for one in findings(plan) if one.code == "override"]
    assert any("kernel_argument.iommu = pt by override; the policy has off" in one for one in notes)
    assert any("environment.NCCL_P2P_LEVEL = PHB by override; the policy has SYS" in one for one in notes)
    (grub,) = [one.text for one in host_files(plan.settings, plan.facts) if "grub.d" in one.path]
    assert "iommu=pt" in grub and "amd_iommu=off" not in grub
    assert plan.settings.environment["vllm"]["NCCL_P2P_LEVEL"] == "PHB"


def test_a_driver_that_was_replaced_is_judged_after_the_reboot() -> None:
    document = turin()
    older_driver(document)
    other_on_disk(document)
    plan = plan_of(document)
    assert not [str(one) for one in findings(plan) if one.severity is Severity.ERROR]
    assert reboot_reasons(plan, driver_decision(plan))[0] == "driver 570.86.15 is loaded, 595.58.03 is installed"


def test_all_faults_of_a_host_come_in_one_list() -> None:
    document = turin()
    for spoil in (fell_off_the_bus, gen2, small_window, other_on_disk):
        spoil(document)
    document["secure_boot"] = True
    assert {"card-silent", "cards", "link-speed", "bar1", "driver-mismatch", "secure-boot"} <= {
        one.code for one in findings(plan_of(document))
    }


@pytest.mark.parametrize("key", ["sysctl.vm.swappiness", "governor.cpu", "disk_scheduler.nvme"])
def test_a_value_that_would_break_out_of_its_file_is_refused_with_the_plan(key: str) -> None:
    with pytest.raises(CatalogError, match=r"host data host_overrides: .*must not stand in a system file"):
        plan_of(turin(), host_overrides={key: "1; reboot"})
