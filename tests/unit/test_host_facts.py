"""The facts script and the parsers, on recordings and on the faults a host has shown."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rig.facts import remote_script
from rig.facts.document import Answer
from rig.facts.host import (
    FactsError,
    Gpu,
    count_ranges,
    parse_command_line,
    parse_compute_apps,
    parse_gpu_query,
    parse_host,
    parse_matrix,
    parse_packages,
    parse_units,
    relations_by_path,
)
from rig.facts.report import SCRIPT, carried
from rig.host.topology import decide
from rigctl import guarded, reached

FIXTURES = Path(__file__).parent.parent / "fixtures" / "host"
H200 = FIXTURES / "h200"


def recorded(name: str = "idle") -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((H200 / f"facts-{name}.json").read_text())
    return raw


def published(name: str) -> tuple[tuple[str, ...], ...]:
    return parse_matrix((FIXTURES / "published" / f"topo-{name}.txt").read_text())


def test_recorded_h200_is_read_whole() -> None:
    facts = parse_host(json.dumps(recorded()))
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.address, gpu.compute_capability) == ("NVIDIA H200", "0000:00:06.0", (9, 0))
    assert (gpu.memory_mib, gpu.bar1_bytes, gpu.link_gen, gpu.link_width) == (143771, 256 << 30, 5, 16)
    assert (gpu.power_limit_w, gpu.power_min_w, gpu.mig) == (700, 200, False)
    assert facts.driver.version == "580.159.04"
    assert facts.driver.open_module is True
    assert facts.driver.hmm_disabled is False
    assert facts.parameter("nvidia", "NVreg_DynamicPowerManagement") == "3"
    assert facts.parameter("nvidia", "NVreg_RegistryDwords") == ""
    assert (facts.virtualisation, facts.container, facts.bare_metal) == ("vm", "docker", False)
    assert (facts.os_id, facts.os_version, facts.glibc) == ("ubuntu", "24.04", (2, 39))
    assert facts.relations == (("X",),)
    assert facts.unattended_upgrades is False
    assert facts.paths["/tmp/models"].disks[0].scheduler == "mq-deadline"
    assert facts.paths["/tmp/models"].exists is False


def test_a_recorded_ubuntu_with_a_toolkit_is_read_and_decided() -> None:
    facts = parse_host(json.dumps(recorded("toolkit")))
    assert facts.toolkits == {"/usr/local/cuda-13.0": (13, 0, 88)}
    assert (facts.gcc, facts.distribution) == ((13, 3, 0), "ubuntu-24.04")
    assert "systemctl: No such file" in facts.unknown["command:units"]
    decision = decide(facts)
    assert decision.host.kernel_arguments == () and decision.host.boot_units == ()
    assert decision.host.environment["vllm"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_process_that_holds_gpu_memory_is_seen_and_seen_gone() -> None:
    held = parse_host(json.dumps(recorded("held"))).processes
    assert held is not None
    assert [(one.memory_mib, one.name) for one in held] == [(8802, "python3")]
    assert parse_compute_apps(Answer(rc=0, out=(H200 / "apps-after.txt").read_text())) == ()
    assert parse_compute_apps(Answer(rc=9, out="Unable to determine the device handle")) is None
    odd = "gpu_uuid, pid\nGPU-0, \u00b2, 8, x\nGPU-1, 7, 8, y\n"
    assert [one.pid for one in parse_compute_apps(Answer(rc=0, out=odd)) or ()] == [7]


def test_a_bare_host_shows_the_same_card_as_one_with_its_driver() -> None:
    raw = recorded()
    for answer in raw["commands"].values():
        answer.update(rc=None, out="", err="nvidia-smi: No such file or directory")
    raw["files"] = {}
    facts = parse_host(json.dumps(raw))
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.compute_capability, gpu.memory_mib) == ("NVIDIA H200", (9, 0), 143771)
    assert (gpu.answers, facts.driver.version, facts.driver.smi_error) == (None, None, None)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"rc": None, "out": "", "err": "nvidia-smi: no answer in 20 s"}, "no answer in 20 s"),
        ({"rc": 6, "out": (H200 / "smi-badid.txt").read_text(), "err": ""}, "exit code 6"),
        ({"rc": 2, "out": (H200 / "smi-bad.txt").read_text(), "err": ""}, "exit code 2"),
        (
            {"rc": 18, "out": "Failed to initialize NVML: Driver/library version mismatch\n", "err": ""},
            "version mismatch",
        ),
        (
            {
                "rc": 15,
                "out": "Unable to determine the device handle for GPU0000:00:06.0: GPU is lost.\n",
                "err": "",
            },
            "GPU is lost",
        ),
    ],
)
def test_nvidia_smi_that_fails_is_said_and_costs_no_other_fact(answer: dict[str, Any], why: str) -> None:
    raw = recorded()
    raw["commands"]["gpus"] = answer | {"seconds": 0}
    facts = parse_host(json.dumps(raw))
    assert why in (facts.driver.smi_error or "")
    assert facts.driver.mismatch is ("mismatch" in why)
    assert facts.gpus[0].memory_mib == 143771
    assert facts.gpus[0].power_limit_w is None


def test_one_of_two_cards_fell_off_the_bus() -> None:
    raw = recorded()
    raw["pci"].append(raw["pci"][0] | {"address": "0000:00:07.0"})
    facts = parse_host(json.dumps(raw))
    assert [gpu.answers for gpu in facts.gpus] == [True, False]
    assert facts.driver.smi_error == "0000:00:07.0 is on the bus and does not answer"


def test_cells_without_a_value_are_unknown() -> None:
    text = "index, pci.bus_id, power.limit [W]\n0, 00000000:41:00.0, [N/A]\nGPU is lost\n"
    text += "1, 00000000:C1:00.0, 600.00\n"
    rows = parse_gpu_query(text)
    assert rows["0000:41:00.0"]["power.limit"] is None
    assert rows["0000:c1:00.0"]["power.limit"] == "600.00"


def test_a_document_that_is_none_is_refused() -> None:
    for text in ("", "sh: python3: not found", "{}", "[1]", '{"schema": 99}', '{"schema": 1}', "[" * 9000, '"\\ud800"'):
        with pytest.raises(FactsError):
            parse_host(text)
    for key, value, words in (
        ("pci", None, "pci: "),
        ("cpu", {"count": "many"}, "cpu.count: "),
        ("pci", [{"address": 1}], "pci.0.address: "),
        ("commands", {"gpus": {"rc": "x"}}, "commands.gpus.rc: "),
    ):
        with pytest.raises(FactsError, match=re.escape(words)):
            parse_host(json.dumps(recorded() | {key: value}))


@pytest.mark.parametrize("text", ["-", ",", "0-", "-3", "0,,1", "\u00b2", "0-x", "9" * 5000])
def test_a_list_that_is_none_is_unknown_and_said(text: str) -> None:
    raw = recorded()
    raw["files"]["/sys/devices/system/node/online"] = f"{text}\n"
    facts = parse_host(json.dumps(raw))
    assert facts.numa_nodes is None
    assert "is no list of numbers" in facts.unknown["/sys/devices/system/node/online"]


def test_matrices_as_recorded_and_published() -> None:
    assert parse_matrix((H200 / "smi-topo.txt").read_text()) == (("X",),)
    two = H200.with_name("h200-x2") / "smi-topo.txt"
    assert parse_matrix(two.read_text()) == (("X", "NV18"), ("NV18", "X"))
    assert published("core-ultra") == (("X", "PHB"), ("PHB", "X"))
    assert published("esc8000a")[0] == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert len(published("wrx90")) == 8
    p2p = " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tCNS\n GPU1\tOK\tX\n\nLegend:\n"
    assert parse_matrix(p2p) == (("X", "CNS"), ("OK", "X"))
    assert parse_matrix("No devices were found\n") == ()


def gpu(index: int, path: str, numa: int | None) -> Gpu:
    bridge, *bridges = path.split("/")
    return Gpu(
        index,
        f"0000:{index:02x}:00.0",
        "10de:2bb5",
        None,
        "",
        numa_node=numa,
        host_bridge=bridge,
        bridges=tuple(bridges),
    )


def test_the_pci_tree_says_what_nvidia_smi_says() -> None:
    # Bus numbers of the two published hosts: root port, switch upstream port, one downstream port a card.
    roots = ["10:01.1", "10:01.1", "70:01.1", "70:01.1", "80:01.1", "80:01.1", "f0:01.1", "f0:01.1"]
    esc = [gpu(i, f"pci0000:{r[:2]}/{r}/{r[0]}1:00.0/{r[0]}2:0{i}.0", i // 4) for i, r in enumerate(roots)]
    assert relations_by_path(esc) == published("esc8000a")
    wrx = [
        gpu(i, f"pci0000:{b}/{b}:01.1/{b[0]}1:00.0/{b[0]}2:0{i}.0", 0) for i, b in enumerate(["20"] * 4 + ["40"] * 4)
    ]
    assert relations_by_path(wrx) == published("wrx90")
    ultra = [gpu(0, "pci0000:00/00:01.0", None), gpu(1, "pci0000:00/00:06.0", None)]
    assert relations_by_path(ultra) == published("core-ultra")
    chain = [gpu(i, f"pci0000:20/20:01.1/21:00.0/22:0{i}.0/3{i}:00.0/4{i}:00.0", 0) for i in range(2)]
    assert relations_by_path(chain)[0] == ("X", "PXB")


def test_small_parsers() -> None:
    assert parse_command_line('root=/dev/sda1 x="a b" iommu=pt -- init') == (
        "root=/dev/sda1",
        'x="a b"',
        "iommu=pt",
    )
    assert parse_command_line(None) is None
    assert parse_packages("nvidia-open 590.48.01-1 ii \npciutils  un \nold 1 rc \nkept 2 hi \n") == {
        "nvidia-open": "590.48.01-1",
        "kept": "2",
    }
    shown = (
        "Id=docker.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
        "Id=gdm.service\nLoadState=not-found\nActiveState=inactive\nUnitFileState=\n"
    )
    units = parse_units(shown)
    assert list(units) == ["docker.service"]
    assert (units["docker.service"].active, units["docker.service"].enabled) == (True, True)
    assert [count_ranges(text) for text in ("0-3,8\n", "0", "", None, "x")] == [5, 1, None, None, None]


def config_space(control: int) -> bytes:
    """Extended space as on an EPYC root port: AER at 100h, then ACS at 2a0h."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x2A0 << 20).to_bytes(4, "little")
    space[0x2A0:0x2A4] = (0x000D | 1 << 16).to_bytes(4, "little")
    space[0x2A4:0x2A8] = (0x001F | control << 16).to_bytes(4, "little")
    return bytes(space)


def test_acs_control_word_from_configuration_space() -> None:
    # 001dh: what the bridges of NVIDIA/nccl#2079 held when their host dead-locked.
    assert remote_script.acs(config_space(0x001D)) == [0x1F, 0x1D]
    assert remote_script.acs(bytes(4096)) is None
    assert remote_script.acs(bytes(256)) is None
    loop = bytearray(4096)
    loop[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert remote_script.acs(bytes(loop)) is None


@pytest.mark.parametrize(
    ("acs", "readable", "redirects"),
    [([0x1F, 0x1D], True, True), ([0x1F, 0x11], True, False), (None, True, False), (None, False, None)],
)
def test_a_bridge_redirects_when_bit_2_or_3_is_set(acs: Any, readable: bool, redirects: bool | None) -> None:
    raw = recorded()
    bridge = raw["pci"][0] | {
        "address": "0000:00:01.0",
        "class": "0x060400",
        "acs": acs,
        "acs_readable": readable,
    }
    raw["pci"].insert(0, bridge)
    assert parse_host(json.dumps(raw)).bridges["0000:00:01.0"].redirects is redirects


def test_the_script_runs_from_standard_input_and_outlives_a_hanging_tool(tmp_path: Path) -> None:
    slow = tmp_path / "nvidia-smi"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    script = carried(SCRIPT, guarded, reached).encode()
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-", json.dumps({"paths": [str(tmp_path / "not" / "there")], "timeout": 1})],
        input=script,
        capture_output=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
    )
    assert time.monotonic() - begin < 20
    facts = parse_host(done.stdout.decode())
    assert facts.driver.smi_error == "nvidia-smi: no answer in 1 s"
    assert json.loads(done.stdout)["commands"]["topology"]["seconds"] == 0.0
    assert facts.paths[str(tmp_path / "not" / "there")].free > 0
    assert facts.cpu.threads
    assert facts.glibc


def test_a_source_that_speaks_no_http_costs_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"

        def answer() -> None:
            connection = server.accept()[0]
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        found = remote_script.probes([url, "http://no such host/", "http://127.0.0.1:1/"])
    assert all(found.values()), "each is said to be out of reach"


def test_a_staging_that_ends_meanwhile_costs_no_fact(tmp_path: Path) -> None:
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "moved on").symlink_to(tmp_path / "nowhere")
    assert remote_script.model(str(tmp_path / "model"))["config"] is None
    assert remote_script.allocated(str(tmp_path / "gone")) == 0


def test_health_is_asked_apart_and_joins_its_card() -> None:
    document = json.loads((ROOT / "rig/facts/turin-direct.json").read_text())
    plain = parse_host(json.dumps(document)).gpus
    assert {(card.ecc_errors, card.clique) for card in plain} == {(None, None)}
    address = plain[2].address
    head = "index, pci.bus_id, power.default_limit [W], ecc.errors.uncorrected.volatile.total\n"
    rows = f"2, 0000{address.upper()}, 600.00, 4\n3, 00000000:99:00.0, [N/A], [N/A]\n"
    document["commands"]["health"] = {"rc": 0, "out": head + rows, "err": "", "seconds": 0.1}
    document["commands"]["xid"] = {
        "rc": 0,
        "out": "NVRM: Xid (PCI:0000:61:00): 79, pid=7, name=\x1b[2J\n",
        "err": "",
        "seconds": 0.1,
    }
    document["files"]["/etc/ld.so.preload"] = "/usr/lib/a.so /usr/lib/b.so\n"
    [pci] = [one for one in document["pci"] if one["address"] == address]
    pci.update(aer={"fatal": 0, "nonfatal": 3, "correctable": 9}, clique=False)
    facts = parse_host(json.dumps(document))
    card = facts.gpus[2]
    assert (card.power_default_w, card.ecc_errors, card.aer["nonfatal"], card.clique) == (600.0, 4, 3, False)
    assert facts.xids == ("Xid 79 (PCI:0000:61:00)",)
    assert facts.preload == ("/usr/lib/a.so", "/usr/lib/b.so")
    # A driver that does not know a field answers nothing, and costs nothing but this.
    refused = 'Field "ecc.errors" is not a valid field to query.\n'
    document["commands"]["health"] = {"rc": 2, "out": refused, "err": "", "seconds": 0.1}
    again = parse_host(json.dumps(document))
    assert again.driver.smi_error is None
    assert [card.answers for card in again.gpus] == [True] * 8


@pytest.mark.parametrize(("hypervisor", "machine"), [(False, "none"), (True, "vm")])
def test_a_container_is_not_taken_for_the_machine_below_it(hypervisor: bool, machine: str) -> None:
    """In a container systemd-detect-virt names the container; whether a hypervisor is below it the processor says."""
    document = json.loads((ROOT / "rig/facts/turin-direct.json").read_text())
    for command in ("virtualisation", "container"):
        document["commands"][command] = {"rc": 0, "out": "docker\n", "err": "", "seconds": 0.1}
    document["cpu"]["hypervisor"] = hypervisor
    facts = parse_host(json.dumps(document))
    assert (facts.virtualisation, facts.container) == (machine, "docker")


def test_a_virtual_function_is_no_card_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SR-IOV on, a card shows up to 48 more devices of its own id (bigstack-oss/cubecos#312)."""
    for address in ("0000:42:00.0", "0000:42:00.4"):
        (tmp_path / address).mkdir()
        for name, text in (("vendor", "0x10de"), ("class", "0x030200")):
            (tmp_path / address / name).write_text(text)
    (tmp_path / "0000:42:00.4" / "physfn").symlink_to(tmp_path / "0000:42:00.0")
    monkeypatch.setattr(remote_script.glob, "glob", lambda _: sorted(map(str, tmp_path.iterdir())))
    monkeypatch.setattr(remote_script, "pci_device", lambda address: {"address": address, "path": []})
    assert [one["address"] for one in remote_script.pci()] == ["0000:42:00.0"]
