"""Where settings stand on a running host, and the page that shows it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rig.catalog.entries import ROOT
from rig.cli.explain import recorded_page
from rig.facts.host import Bridge, Driver, HostFacts, Unit
from rig.host.explanation import explain_json, explain_text
from rig.host.live_settings import Standing, reboot_pending, standing
from rig.host.rules import FORCE_P2P
from rig.host.settings import ACS_UNIT, PERSISTENCE_UNIT
from rig.host.situation import Workload
from rig.host.system_files import MODPROBE, host_files
from rig.host.topology import decide
from rigctl.contract.comparison import same_value
from tests.unit import host_archetypes as hosts


def tuned() -> HostFacts:
    """TURIN_DIRECT after deploy and reboot."""
    facts = hosts.TURIN_DIRECT
    chosen = decide(facts).host
    disk = replace(hosts.NVME, scheduler="none")
    driver = {"RegistryDwords": FORCE_P2P, "DynamicPowerManagement": "0"}
    return replace(
        facts,
        command_line=(*(facts.command_line or ()), *chosen.kernel_arguments),
        iommu_groups=0,
        driver=Driver("590.48.01", True, driver, True, "590.48.01"),
        boot_files={one.path: one.text for one in host_files(chosen, facts) if one.path == MODPROBE},
        bridges={address: replace(bridge, redirects=False) for address, bridge in facts.bridges.items()},
        units={name: Unit(active=True, enabled=True) for name in (ACS_UNIT, PERSISTENCE_UNIT)},
        cpu=replace(facts.cpu, governors=("performance",)),
        paths={name: replace(path, disks=tuple(disk for _ in path.disks)) for name, path in facts.paths.items()},
        sysctls={"vm.swappiness": "60", "kernel.numa_balancing": "0"},
    )


def standings(facts: HostFacts) -> dict[str, Standing]:
    return {one.key: standing(one, facts) for one in decide(facts).settings}


def test_a_tuned_host_is_all_live() -> None:
    facts = tuned()
    left = {key: at for key, at in standings(facts).items() if at not in (Standing.LIVE, Standing.AT_START)}
    assert set(left.values()) == {Standing.EXPLAINED}
    assert reboot_pending(decide(facts).settings, facts) == []
    assert "PENDING" not in explain_text("host", facts, decide(facts))


def test_an_untuned_host_waits_for_its_reboot() -> None:
    facts = hosts.TURIN_DIRECT
    assert len(reboot_pending(decide(facts).settings, facts)) == 7
    assert standings(facts)["kernel_argument.iommu"] is Standing.PENDING
    staged = {
        "/etc/default/grub.d/90-kimi-rig.cfg": "# iommu=off\nX=amd_iommu=off\n",
        "/etc/default/grub": "# amd_iommu=on",
    }
    at = standings(replace(facts, boot_files=staged))
    assert at["kernel_argument.amd_iommu"] is Standing.STAGED
    assert at["kernel_argument.pcie_aspm"] is Standing.PENDING


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"command_line": ("ro",)}, "kernel_argument.pcie_aspm"),
        (
            {"driver": Driver("590.48.01", True, {"RegistryDwords": FORCE_P2P}, False)},
            "module_option.nvidia_uvm.uvm_disable_hmm",
        ),
        ({"sysctls": {"kernel.numa_balancing": "1"}}, "sysctl.kernel.numa_balancing"),
        ({"bridges": {"0000:00:01.1": Bridge("0000:00:01.1", "1022:153b", True)}}, f"boot_unit.{ACS_UNIT}"),
        ({"paths": hosts.TURIN_DIRECT.paths}, "disk_scheduler.nvme"),
        ({"cpu": replace(hosts.TURIN, governors=("performance", "powersave"))}, "governor.cpu"),
    ],
)
def test_drift_is_seen(change: dict[str, object], key: str) -> None:
    facts = replace(tuned(), **change)  # type: ignore[arg-type]
    # The file is there, whatever the driver was loaded with.
    wanted = Standing.STAGED if key.startswith("module_option") else Standing.PENDING
    assert standings(facts)[key] is wanted


def test_a_driver_that_is_not_loaded_is_not_waited_for() -> None:
    facts = replace(tuned(), driver=Driver())
    assert standings(facts)["module_option.nvidia_uvm.uvm_disable_hmm"] is Standing.UNKNOWN
    assert reboot_pending(decide(facts).settings, facts) == []


def test_numbers_are_equal_in_any_notation() -> None:
    assert same_value("0", "0x00")
    assert same_value("abc", "abc")
    assert not same_value("3", "0x00")
    assert not same_value(None, "0")


def test_page_names_override_pending_and_unknown() -> None:
    facts = replace(hosts.TURIN_DIRECT, unknown={"command:topology": "nvidia-smi: no answer in 20 s"})
    page = explain_text("gpu1", facts, decide(facts, {"sysctl.vm.swappiness": "10"}))
    assert "PENDING REBOOT" in page
    assert "8 x NVIDIA RTX PRO 6000 Blackwell Server Edition (97887 MiB, BAR1 128 GiB, PCIe gen 5 x16)" in page
    assert "vm.swappiness = 10  [to be applied]  1 for, 0 against\n    OVERRIDE: the policy has left alone" in page
    assert "kernel.numa_balancing = 0  [to be applied]" in page
    assert "mitigations=off" in page
    whole = explain_text("gpu1", facts, decide(facts, None, Workload(nccl="2.27.5")), everything=True)
    assert "published: Kimi-K2.5 decode 40 -> 65 to 68 tok/s" in whole
    assert "mitigations = off  [kernel_argument]" in whole
    assert "command:topology: nvidia-smi: no answer in 20 s" in page


def test_the_page_of_a_recorded_host_is_three_screens() -> None:
    page = recorded_page(ROOT / "rig/facts/turin-direct.json")
    assert len(page["text"].splitlines()) <= 3 * 50
    assert max(len(line) for line in page["text"].splitlines()) <= 120
    for words in ("3 against", "against: ", "NCCL 2.27.5, 8 ranks", "environment.NCCL_PROTO = LL", "Left alone too"):
        assert words in page["text"], words
    assert len(page["all"].splitlines()) > len(page["text"].splitlines())


def test_the_page_of_a_container_says_what_its_host_should_have() -> None:
    facts = replace(hosts.TURIN_DIRECT, container="docker")
    page = explain_text("box", facts, decide(facts))
    assert "PENDING" not in page
    assert "nvidia-persistenced.service = enabled  [boot_unit]" in page.partition("Left alone too")[0]
    assert "for the host outside this container: with heterogeneous memory" in page


def test_json_has_every_setting_with_its_grounds() -> None:
    facts = hosts.GENOA_SWITCHED
    decision = decide(facts)
    page = json.loads(json.dumps(explain_json("gpu1", facts, decision)))
    assert len(page["settings"]) == len(decision.settings)
    level = next(one for one in page["settings"] if one["name"] == "NCCL_P2P_LEVEL")
    assert (level["value"], level["applied"]) == ("PHB", True)
    assert all(one[key] for one in page["settings"] for key in ("kind", "reason", "source", "confidence", "standing"))


def test_a_host_without_gpus_says_so() -> None:
    assert "No NVIDIA GPU: nothing is chosen" in explain_text("cpu1", hosts.NO_GPU, decide(hosts.NO_GPU))
