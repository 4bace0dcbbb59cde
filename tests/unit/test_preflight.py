"""Preflight: every fault is found, all at once, and a sound host has no errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rig.catalog.entries import KnownBad
from rig.facts.host import Disk, Driver, GpuProcess, HostFacts, Unit
from rig.host.disk import FileSystem, Item
from rig.host.memory_fit import Fit
from rig.host.preflight import Needs, Severity, preflight
from rig.host.topology import decide
from tests.support.plans import catalog
from tests.unit import host_archetypes as hosts

CATALOG = catalog()
NAMES = ("vllm-base", "sglang-base-current")
NEEDS = Needs(
    serving={name: CATALOG.serving[name] for name in NAMES},
    releases=CATALOG.releases,
)
SOUND = hosts.TURIN_DIRECT


def codes(
    facts: HostFacts, needs: Needs = NEEDS, overrides: dict[str, str | None] | None = None
) -> dict[str, Severity]:
    return {one.code: one.severity for one in preflight(facts, decide(facts, overrides), needs)}


def with_card(index: int, **change: Any) -> HostFacts:
    cards = list(SOUND.gpus)
    cards[index] = replace(cards[index], **change)
    return replace(SOUND, gpus=tuple(cards))


def test_a_sound_host_needs_its_reboot_and_nothing_else() -> None:
    assert codes(SOUND) == {"reboot": Severity.NOTE}


def test_a_bare_host_is_told_what_will_be_installed() -> None:
    assert codes(hosts.bare(SOUND)) == {"driver-none": Severity.NOTE, "reboot": Severity.NOTE}


@pytest.mark.parametrize(
    ("facts", "code", "severity"),
    [
        (with_card(3, answers=False), "card-silent", Severity.ERROR),
        (with_card(3, answers=False), "cards", Severity.ERROR),
        (replace(SOUND, gpus=SOUND.gpus[:7]), "cards", Severity.ERROR),
        (with_card(2, mig=True), "mig", Severity.ERROR),
        (with_card(2, bound_to="vfio-pci"), "card-taken", Severity.ERROR),
        (with_card(5, link_gen=2), "link-speed", Severity.WARNING),
        (with_card(5, link_gen_max=2), "link-speed", Severity.WARNING),
        (with_card(5, link_width=8), "link-width", Severity.WARNING),
        (with_card(5, bar1_bytes=256 << 20), "bar1", Severity.WARNING),
        (hosts.MIXED, "card-mixed", Severity.WARNING),
        (replace(SOUND, driver=Driver("570.86.15", True)), "driver-old", Severity.ERROR),
        (replace(SOUND, driver=Driver("590.48.01", False)), "driver-proprietary", Severity.ERROR),
        (replace(SOUND, driver=Driver("590.48.01", True, on_disk="595.58.03")), "driver-mismatch", Severity.WARNING),
        (
            replace(SOUND, driver=Driver("590.48.01", True, smi_error="nvidia-smi: no answer in 20 s")),
            "nvidia-smi",
            Severity.ERROR,
        ),
        (replace(SOUND, device_nodes=SOUND.device_nodes[:7]), "device-nodes", Severity.ERROR),
        (replace(SOUND, nvidia_uvm_node=False), "device-nodes", Severity.ERROR),
        (replace(SOUND, secure_boot=True), "secure-boot", Severity.ERROR),
        (replace(hosts.bare(SOUND), secure_boot=True), "secure-boot", Severity.WARNING),
        (replace(SOUND, glibc=(2, 31)), "glibc", Severity.ERROR),
        (replace(SOUND, ports=(22, 8000)), "port", Severity.WARNING),
        (replace(SOUND, probes={"https://models.example": "timed out"}), "source", Severity.WARNING),
        (replace(SOUND, virtualisation="kvm"), "virtual", Severity.NOTE),
        (replace(SOUND, clock_synchronised=False), "clock", Severity.WARNING),
        (replace(SOUND, kernel="6.8.0-79-generic"), "kernel-old", Severity.NOTE),
        (replace(SOUND, units={"gdm.service": Unit(True, True)}), "rival", Severity.WARNING),
        (replace(SOUND, processes=(GpuProcess("GPU-0", 481, 8802, "python3"),)), "gpu-in-use", Severity.NOTE),
        (replace(SOUND, unattended_upgrades=True), "unattended-upgrades", Severity.WARNING),
        (replace(SOUND, container="docker"), "container", Severity.NOTE),
        (replace(SOUND, gcc=(16, 1, 0)), "gcc-new", Severity.WARNING),
    ],
)
def test_a_fault_is_found(facts: HostFacts, code: str, severity: Severity) -> None:
    assert codes(facts)[code] is severity


def test_a_driver_that_may_be_replaced_is_no_error() -> None:
    old = replace(SOUND, driver=Driver("570.86.15", False))
    assert {codes(old)[code] for code in ("driver-old", "driver-proprietary")} == {Severity.ERROR}
    upgrade = codes(old, replace(NEEDS, driver_upgrade=True))
    assert {upgrade[code] for code in ("driver-old", "driver-proprietary")} == {Severity.NOTE}


def test_a_release_known_to_be_bad_is_refused_unless_the_data_takes_it() -> None:
    bad = KnownBad(what="it answers in riddles", thread="vllm#1", refuse=True)
    told = KnownBad(what="only worth knowing", thread="vllm#2")
    releases = {
        **CATALOG.releases,
        "vllm-0.16.0": CATALOG.releases["vllm-0.16.0"].model_copy(update={"known_bad": [bad, told]}),
    }
    needs = replace(NEEDS, releases=releases)
    [finding] = [one for one in preflight(SOUND, decide(SOUND), needs) if one.code == "known-bad"]
    assert finding.severity is Severity.ERROR
    assert "release vllm-0.16.0 is known to be bad: it answers in riddles (vllm#1)" in str(finding)
    assert "accept_known_bad" in str(finding)
    assert codes(SOUND, replace(needs, accept_known_bad=frozenset({"vllm-0.16.0"})))["known-bad"] is Severity.WARNING
    unused = replace(needs, serving={"sglang-base-current": CATALOG.serving["sglang-base-current"]})
    assert "known-bad" not in codes(SOUND, unused)


@pytest.mark.parametrize("of", ["checkpoint", "family"])
@pytest.mark.parametrize("refuse", [False, True])
def test_a_trap_of_some_models_concerns_hosts_that_serve_them(of: str, refuse: bool) -> None:
    """By checkpoint or by family; reported, or refused where the trap says so; other hosts hear nothing of it."""
    name = "glm-5.2-nvfp4" if of == "checkpoint" else "glm-5"
    trap = KnownBad(what="it answers in riddles", thread="vllm#1", refuse=refuse, models=[name, "nobody"])
    changed = CATALOG.releases["vllm-0.16.0"].model_copy(update={"known_bad": [trap]})
    needs = replace(NEEDS, releases={**CATALOG.releases, "vllm-0.16.0": changed})
    assert {"known-trap", "known-bad"}.isdisjoint(codes(SOUND, needs)), "it serves neither"
    served = replace(needs, models={"vllm-0.16.0": frozenset({"glm-5.2-nvfp4", "glm-5"})})
    [finding] = [one for one in preflight(SOUND, decide(SOUND), served) if one.code in ("known-trap", "known-bad")]
    assert "it answers in riddles (vllm#1)" in str(finding)
    assert (finding.code, finding.severity) == (
        ("known-bad", Severity.ERROR) if refuse else ("known-trap", Severity.WARNING)
    )
    assert refuse or f"vllm-0.16.0 with {name}: " in str(finding)
    elsewhere = replace(needs, models={"sglang-0.5.9": frozenset({name})})
    assert {"known-trap", "known-bad"}.isdisjoint(codes(SOUND, elsewhere)), "another release serves it"


def place(path: str, **change: Any) -> HostFacts:
    return replace(SOUND, paths={**SOUND.paths, path: replace(SOUND.paths[path], **change)})


def test_what_does_not_fit_is_refused_in_numbers_with_what_may_go() -> None:
    old = Item("environment of an earlier deploy", "/opt/x", 12_000_000_000, "rigctl prune --drop /opt/x")
    small = Item("log", "/var/log/x", 5, "rm -rf /var/log/x")
    model = Item("checkpoint kimi", "/shared/kimi", 595_200_000_000)
    full = FileSystem("/shared", 4 * 10**12, 90 * 10**9, (small, old), (model,))
    [finding] = [one for one in preflight(SOUND, decide(SOUND), replace(NEEDS, disk=(full,))) if one.code == "space"]
    assert finding.severity is Severity.ERROR
    assert finding.message == (
        "/shared has 90 GB free of 4,000 GB, a deploy needs 595 GB: checkpoint kimi 595 GB in /shared/kimi"
    )
    assert finding.remedy.startswith(
        "make room (environment of an earlier deploy 12 GB: `rigctl prune --drop /opt/x`), or move the path"
    )
    assert "space" not in codes(SOUND, replace(NEEDS, disk=(replace(full, free=600 * 10**9),)))
    unread = replace(full, size=0, free=0)
    assert codes(SOUND, replace(NEEDS, disk=(unread,)))["space"] is Severity.ERROR


@pytest.mark.parametrize(
    ("lent", "kept", "warned"),
    [
        ("32768\t60999", "", False),
        ("1024\t60999", "", True),
        ("1024\t60999", "22,7990-8010", False),
        ("8000 8000", "8001", True),
        (None, None, False),
        ("x", "y", False),
    ],
)
def test_a_port_that_the_host_lends_to_connections(lent: str | None, kept: str | None, warned: bool) -> None:
    sysctls = {"net.ipv4.ip_local_port_range": lent, "net.ipv4.ip_local_reserved_ports": kept}
    found = preflight(replace(SOUND, sysctls={**SOUND.sysctls, **sysctls}), decide(SOUND), NEEDS)
    told = [one for one in found if one.code == "port-lent"]
    assert bool(told) is warned and all(one.severity is Severity.WARNING for one in told)
    if warned:
        assert "port 8000 of vllm-base, sglang-base-current is one that the host gives" in told[0].message
        assert "net.ipv4.ip_local_reserved_ports=8000" in told[0].remedy


@pytest.mark.parametrize(
    ("kernels", "warned"),
    [
        ({"6.8.0-45-generic": True, "6.8.0-110-generic": False}, True),
        ({"6.8.0-45-generic": True, "6.8.0-110-generic": True}, False),
        ({"6.8.0-110-generic": True, "6.8.0-45-generic": False}, False),
        ({}, False),
    ],
)
def test_the_next_boots_kernel_without_a_driver(kernels: dict[str, bool], warned: bool) -> None:
    """The headers were those of the kernel that ran (NVIDIA/ansible-role-nvidia-driver#18)."""
    facts = replace(SOUND, kernel="6.8.0-45-generic", kernels=kernels)
    assert facts.driver.on_disk
    assert ("kernel-no-driver" in codes(facts)) is warned
    assert "kernel-no-driver" not in codes(replace(facts, driver=Driver()))


def test_places_that_do_not_last() -> None:
    assert codes(place("/shared", filesystem="overlay"))["ephemeral"] is Severity.WARNING
    assert codes(place("/shared", filesystem="zfs"))["zfs"] is Severity.WARNING
    lent = Disk("nvme1n1", "none", "Amazon EC2 NVMe Instance Storage")
    assert codes(place("/shared", disks=(lent,)))["ephemeral"] is Severity.WARNING
    assert codes(place("/dev/shm", free=1 << 30))["shm"] is Severity.WARNING


def test_our_own_service_may_hold_its_port() -> None:
    assert "port" not in codes(replace(SOUND, ports=(22, 8000)), replace(NEEDS, own_ports=frozenset({8000})))


def test_held_driver_is_safe_from_unattended_upgrades() -> None:
    facts = replace(SOUND, unattended_upgrades=True, packages={"nvidia-open": "590.48.01-1"})
    assert "unattended-upgrades" in codes(facts)
    assert "unattended-upgrades" not in codes(replace(facts, holds=("nvidia-open",)))
    assert "unattended-upgrades" not in codes(replace(facts, upgrade_blacklist=("nvidia-",)))


def test_memory_that_does_not_suffice() -> None:
    def found(context: int, **changes: Any) -> dict[str, Severity]:
        fit = Fit("vllm-base", 97 * 10**9, 76 * 10**9, 0, 8 * 10**9, 70272 * context, context)
        return codes(SOUND, replace(NEEDS, fits=(replace(fit, **changes),)))

    assert found(262144)["memory-fit"] is Severity.ERROR
    assert found(150_000)["memory-tight"] is Severity.WARNING
    assert found(262144, strict=False)["memory-tight"] is Severity.WARNING
    assert not {"memory-fit", "memory-tight"} & set(found(32768))
    # 13 GB for the cache are 130 blocks: as many requests may have a state, and no more.
    assert not {"memory-fit", "memory-tight"} & set(found(32768, block=10**8, running=130))
    assert found(32768, block=10**8, running=131)["memory-fit"] is Severity.ERROR
    # Of another model the 8 GB are an estimate: 21 GB without them hold 298,000 tokens.
    assert found(262144, estimated=True)["memory-tight"] is Severity.WARNING
    assert found(300_000, estimated=True)["memory-fit"] is Severity.ERROR


def test_what_the_operator_names_must_be_reached() -> None:
    unreachable = replace(SOUND, probes={"https://models.example": "timed out"})
    needs = replace(NEEDS, must_reach=frozenset({"https://models.example"}))
    assert codes(unreachable, needs)["source"] is Severity.ERROR


def test_a_reboot_of_a_rented_machine_is_warned_of() -> None:
    needs = replace(NEEDS, may_reboot=True)
    assert codes(hosts.VIRTUAL, needs)["virtual"] is Severity.WARNING
    assert "virtual" not in codes(replace(hosts.VIRTUAL, container="docker"), needs)


def test_a_kernel_that_comes_by_itself_is_told() -> None:
    facts = replace(SOUND, unattended_upgrades=True, holds=("nvidia-open",), packages={"nvidia-open": "1"})
    assert codes(facts)["unattended-kernel"] is Severity.NOTE
    assert "unattended-kernel" not in codes(replace(facts, upgrade_blacklist=("linux-image-",)))


def test_overrides_are_said_and_checked() -> None:
    found = codes(SOUND, overrides={"power_limit.watts": "700", "kernel_argument.iommu": "pt"})
    assert found["power-limit"] is Severity.ERROR
    assert found["override"] is Severity.NOTE


def test_attention_without_kernels_is_refused() -> None:
    entry = CATALOG.serving["sglang-base"].model_copy(update={"flags": {"attention-backend": "trtllm_mla"}})
    assert codes(SOUND, replace(NEEDS, serving={"sglang-base": entry}))["attention"] is Severity.ERROR


def test_cpu_configurations_ask_for_no_gpu() -> None:
    box = catalog("sandbox.yaml")
    serving = {n: c for n, c in box.serving.items() if box.releases[c.release].accelerator == "cpu"}
    assert serving
    assert codes(hosts.NO_GPU, Needs(serving=serving, releases=box.releases)) == {}


def test_all_findings_come_at_once_errors_first() -> None:
    facts = replace(with_card(5, link_gen=2), ports=(8000,), glibc=(2, 28), unattended_upgrades=True)
    found = preflight(facts, decide(facts), NEEDS)
    assert {"port", "glibc", "link-speed", "unattended-upgrades", "reboot"} <= {one.code for one in found}
    order = [list(Severity).index(one.severity) for one in found]
    assert order == sorted(order)
    assert all(one.message in str(one) and one.code in str(one) for one in found)


# --- Cards and links: what a host reports of itself


LOW: dict[str, Any] = {"power_limit_w": 275.0, "power_default_w": 600.0}
VM = replace(hosts.VIRTUAL, gpus=tuple(replace(card, clique=False) for card in hosts.VIRTUAL.gpus))


@pytest.mark.parametrize(
    ("facts", "code", "severity", "words"),
    [
        (with_card(2, **LOW), "power-low", Severity.WARNING, "275 W of the 600 W"),
        (with_card(2, power_limit_w=200.0), "power-low", Severity.WARNING, "200 W of the 600 W"),
        (replace(SOUND, xids=("Xid 79 (PCI:0000:61:00)",)), "xid", Severity.WARNING, "79"),
        (with_card(2, ecc_errors=4), "ecc", Severity.WARNING, "4 uncorrectable"),
        (with_card(2, aer={"fatal": 1, "nonfatal": 2}), "aer", Severity.WARNING, "1 fatal, 2 nonfatal"),
        (with_card(2, aer={"correctable": 20_000}), "aer", Severity.NOTE, "20000 corrected"),
        (replace(SOUND, preload=("/usr/lib/libvgpu.so",)), "preload", Severity.WARNING, "libvgpu.so"),
        (VM, "clique", Severity.NOTE, "x-nv-gpudirect-clique"),
        (replace(SOUND, boot_loader=None), "boot-loader", Severity.WARNING, "not written"),
        (
            replace(SOUND, gpus=tuple(replace(card, link_gen_max=4, link_gen=4) for card in SOUND.gpus)),
            "link-speed",
            Severity.WARNING,
            "gen 4 at most in this slot, the cards can do 5",
        ),
    ],
)  # fmt: skip
def test_what_cards_and_links_report_is_found(facts: HostFacts, code: str, severity: Severity, words: str) -> None:
    [finding, *_] = [one for one in preflight(facts, decide(facts), NEEDS) if one.code == code]
    assert finding.severity is severity
    assert words in str(finding)


def test_a_limit_that_the_operator_names_and_one_of_a_max_q_are_no_findings() -> None:
    assert "power-low" not in codes(with_card(2, **LOW), overrides={"power_limit.watts": "275"})
    cool = tuple(replace(card, power_limit_w=300.0) for card in hosts.MAX_Q_8.gpus)
    assert "power-low" not in codes(replace(hosts.MAX_Q_8, gpus=cool))


def test_libraries_of_a_container_are_its_own_to_mend() -> None:
    driver = Driver(
        "590.48.01", True, on_disk="580.95.05", library="580.95", smi_error="Driver/library version mismatch"
    )
    facts = replace(SOUND, container="docker", driver=driver)
    [finding] = [one for one in preflight(facts, decide(facts), NEEDS) if one.code == "driver-mismatch"]
    assert finding.severity is Severity.ERROR
    assert "590.48.01" in finding.message and "580.95" in finding.message
    assert "equal the host's" in finding.remedy and "reboot" not in str(finding)
    # What lies on a container's disk is never loaded.
    assert "driver-mismatch" not in codes(replace(facts, driver=replace(driver, smi_error=None)))


@pytest.mark.parametrize(
    ("driver", "code"),
    [
        (Driver("570.86.15", True), "driver-old"),
        (Driver("590.48.01", False), "driver-proprietary"),
        (Driver(), "driver-none"),
    ],
)
@pytest.mark.parametrize("upgrade", [False, True])
def test_a_containers_driver_is_never_refused_nor_replaced(driver: Driver, code: str, upgrade: bool) -> None:
    facts = replace(SOUND, container="docker", driver=driver)
    needs = replace(NEEDS, driver_upgrade=upgrade)
    found = [one for one in preflight(facts, decide(facts), needs) if one.code == code]
    assert found
    for one in found:
        assert one.severity is not Severity.ERROR
        assert "belongs to the host outside this container" in one.remedy


def test_a_container_names_what_its_host_should_have() -> None:
    facts = replace(SOUND, container="docker")
    found = {one.code: one for one in preflight(facts, decide(facts), NEEDS)}
    assert found["container"].severity is Severity.NOTE
    assert "module_option.nvidia_uvm.uvm_disable_hmm = 1" in found["container"].remedy
    assert "vm.swappiness" not in found["container"].remedy
    assert "reboot" not in found


def test_more_cards_than_peers_are_shown_in_their_groups() -> None:
    facts = hosts.machine(hosts.TURIN, hosts.switched(16, 4, numa=(0, 1)))
    [finding] = [one for one in preflight(facts, decide(facts), NEEDS) if one.code == "peers"]
    assert "0, 1, 2, 3, 4, 5, 6, 7; 8, 9, 10, 11, 12, 13, 14, 15" in finding.message
    assert "peers" not in codes(SOUND)


def test_cards_of_a_guest_are_an_error_only_where_they_are_needed() -> None:
    facts = with_card(7, bound_to="vfio-pci", answers=False)
    found = codes(facts)
    assert (found["card-taken"], found["cards"]) == (Severity.ERROR, Severity.ERROR)
    assert "card-silent" not in found and "card-mixed" not in found
    assert codes(facts, Needs())["card-taken"] is Severity.WARNING


def test_a_file_that_wins_over_ours_is_a_finding() -> None:
    wins = {"/etc/modprobe.d/uvm.conf": "options nvidia-uvm uvm_disable_hmm=0\n"}
    assert codes(replace(SOUND, boot_files={**SOUND.boot_files, **wins}))["setting-blocked"] is Severity.WARNING


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, True),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}, False),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, False),
        ({"NCCL_P2P_DISABLE": "1"}, False),
    ],
)
def test_variables_of_nccl_that_contradict_each_other_are_found(variables: dict[str, str], found: bool) -> None:
    needs = replace(NEEDS, variables={"vllm-base": variables})
    contradictions = [one for one in preflight(SOUND, decide(SOUND), needs) if one.code == "p2p-contradiction"]
    assert bool(contradictions) is found
    assert all("vllm-base gets NCCL_P2P_DISABLE=1 and NCCL_P2P_LEVEL=SYS" in one.message for one in contradictions)


def test_a_guest_that_loses_the_iommu_by_an_override_is_said() -> None:
    facts = with_card(7, bound_to="vfio-pci", answers=False)
    for overrides, words in (({}, "the IOMMU is left as it is"), ({"kernel_argument.iommu": "off"}, "no guest has it")):
        [taken] = [one for one in preflight(facts, decide(facts, overrides), Needs()) if one.code == "card-taken"]
        assert words in taken.remedy


def test_a_driver_that_a_reboot_loads_is_not_installed() -> None:
    facts = replace(hosts.bare(SOUND), driver=Driver(on_disk="595.58.03"))
    [none] = [one for one in preflight(facts, decide(facts), NEEDS) if one.code == "driver-none"]
    assert none.remedy == "a reboot loads 595.58.03"


def test_what_is_so_of_several_cards_is_said_once() -> None:
    old = replace(SOUND, gpus=tuple(replace(card, link_gen_max=4, link_gen=4) for card in SOUND.gpus))
    [found] = [one for one in preflight(old, decide(old), NEEDS) if one.code == "link-speed"]
    assert found.message.startswith("each of cards 0, 1, 2, 3, 4, 5, 6, 7 has PCIe gen 4 at most")
    hurt = with_card(2, ecc_errors=4)
    [one] = [one for one in preflight(hurt, decide(hurt), NEEDS) if one.code == "ecc"]
    assert one.message == f"card 2 ({SOUND.gpus[2].address}) has 4 uncorrectable memory errors"


def test_a_hypervisor_is_not_promised_a_driver() -> None:
    taken = tuple(replace(card, bound_to="vfio-pci") for card in hosts.bare(SOUND).gpus)
    facts = replace(hosts.bare(SOUND), gpus=taken)
    assert "driver-none" not in codes(facts, Needs())


def test_registry_keys_that_reports_blame_are_named() -> None:
    live = {"RegistryDwords": "ForceP2P=0x11;RMForceP2PType=1"}
    facts = replace(SOUND, driver=replace(SOUND.driver, parameters=live))
    [found] = [one for one in preflight(facts, decide(facts), NEEDS) if one.code == "registry-keys"]
    assert found.message.startswith("RMForceP2PType")
