"""The files of the host stage, to the letter, and the ACS script on a made-up PCI tree."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rig.host import system_files
from rig.host.settings import HostSettings
from rig.host.system_files import HostFileError, host_files, merge_command_line, unwanted_files
from rig.host.topology import decide
from rigctl.contract import layout
from tests.unit import host_archetypes as hosts


def texts(overrides: dict[str, str | None] | None = None) -> dict[str, str]:
    facts = hosts.TURIN_DIRECT
    return {one.path: one.text for one in host_files(decide(facts, overrides).host, facts)}


def body(text: str) -> str:
    assert text.startswith("# kimi-rig, host stage.")
    assert layout.UNIT_MARK not in text
    return text.split("\n", 1)[1]


def test_files_of_a_direct_attach_host() -> None:
    files = texts()
    assert body(files["/etc/default/grub.d/90-kimi-rig.cfg"]) == (
        'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT '
        'iommu=off amd_iommu=off pcie_aspm=off pcie_port_pm=off"\n'
    )
    assert body(files["/etc/modprobe.d/kimi-rig.conf"]) == (
        "options nvidia_uvm uvm_disable_hmm=1\n"
        "options nvidia NVreg_DynamicPowerManagement=0x00\n"
        'options nvidia NVreg_RegistryDwords="ForceP2P=0x11;'
        'GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"\n'
    )
    assert body(files["/etc/sysctl.d/90-kimi-rig.conf"]) == "kernel.numa_balancing = 0\n"
    assert body(files["/etc/tmpfiles.d/kimi-rig.conf"]) == (
        "w /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor - - - - performance\n"
    )
    assert body(files["/etc/udev/rules.d/60-kimi-rig.rules"]) == (
        'ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", KERNEL=="nvme[0-9]*", '
        'ATTR{queue/scheduler}="none"\n'
    )
    assert "ExecStart=/opt/kimi-rig/libexec/kimi-acs\n" in body(files["/etc/systemd/system/kimi-acs.service"])
    assert not any("power" in path for path in files)


def test_what_is_no_longer_wanted_is_named() -> None:
    wanted = host_files(decide(hosts.VIRTUAL).host, hosts.VIRTUAL)
    assert [one.path for one in wanted] == [system_files.MODPROBE, system_files.UDEV]
    assert system_files.GRUB_DROP_IN in unwanted_files(wanted)
    assert system_files.MODPROBE not in unwanted_files(wanted)
    assert host_files(HostSettings(), hosts.NO_GPU) == []


def test_power_limit_is_a_unit_of_its_own() -> None:
    text = texts({"power_limit.watts": "450"})[f"{layout.UNITS}/kimi-power-limit.service"]
    assert "ExecStart=/usr/bin/nvidia-smi --power-limit=450\n" in text


def test_systemd_boot_keeps_what_stands_there() -> None:
    facts = replace(
        hosts.TURIN_DIRECT, boot_loader="systemd-boot", boot_files={"/etc/kernel/cmdline": 'root=UUID=1 rw "x=a b"\n'}
    )
    settings = decide(facts).host
    (first,) = [one for one in host_files(settings, facts) if one.path == "/etc/kernel/cmdline"]
    assert first.text == 'root=UUID=1 rw "x=a b" iommu=off amd_iommu=off pcie_aspm=off pcie_port_pm=off\n'
    again = replace(facts, boot_files={"/etc/kernel/cmdline": first.text})
    (second,) = [one for one in host_files(settings, again) if one.path == "/etc/kernel/cmdline"]
    assert second.text == first.text
    gone = host_files(HostSettings(), replace(again, our_arguments=settings.kernel_arguments))
    assert [one.text for one in gone] == ['root=UUID=1 rw "x=a b"\n', "\n"]
    absent = replace(facts, boot_files={})
    (fresh,) = [one for one in host_files(settings, absent) if one.path == "/etc/kernel/cmdline"]
    assert fresh.text.startswith("root=UUID=1 ro quiet iommu=off")


def test_an_operators_argument_stays_and_ours_comes_later() -> None:
    assert merge_command_line("ro iommu=pt quiet", ["iommu=off"]) == "ro iommu=pt quiet iommu=off\n"


@pytest.mark.parametrize("value", ['off" evil="', "off\nX=1", "$(reboot)", "a b", ""])
def test_a_value_that_breaks_out_of_its_line_is_refused(value: str) -> None:
    settings = decide(hosts.TURIN_DIRECT, {"kernel_argument.x": "1", "sysctl.vm.swappiness": value}).host
    with pytest.raises(HostFileError, match="must not stand"):
        host_files(settings, hosts.TURIN_DIRECT)


SETPCI = """#!/bin/sh
# setpci -s ADDRESS ECAP_ACS+6.w[=VALUE:MASK] on files named after the bridges.
file=$CONTROL/$2
[ -e "$file" ] || exit 1
case "$3" in
*=0000:000c) [ -e "$file.stuck" ] || printf '%04x\\n' $((0x$(cat "$file") & ~0xc)) > "$file" ;;
*) cat "$file" ;;
esac
"""


def acs(tmp_path: Path, controls: dict[str, str], stuck: str = "") -> subprocess.CompletedProcess[str]:
    root = tmp_path / "sys"
    nodes = {
        "0000:10:01.1": ("0x1022", "0x060400"),
        "0000:10:01.1/0000:11:00.0": ("0x1000", "0x060400"),
        "0000:10:01.1/0000:11:00.0/0000:12:00.0": ("0x10de", "0x030200"),
        "0000:20:01.1": ("0x1022", "0x060400"),
        "0000:20:01.1/0000:21:00.0": ("0x144d", "0x010802"),
    }
    (root / "bus/pci/devices").mkdir(parents=True)
    for path, (vendor, kind) in nodes.items():
        folder = root / "devices/pci0000:10" / path
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
        (root / "bus/pci/devices" / folder.name).symlink_to(folder)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "setpci").write_text(SETPCI)
    (tools / "setpci").chmod(0o755)
    control = tmp_path / "control"
    control.mkdir()
    for address, word in controls.items():
        (control / address).write_text(word + "\n")
    if stuck:
        (control / f"{stuck}.stuck").touch()
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "KIMI_ACS_SYSFS": str(root), "CONTROL": str(control)}
    return subprocess.run(
        [str(ROOT / "files/host/kimi-acs")], env=environment, capture_output=True, text=True, check=False
    )


def test_acs_script_clears_two_bits_above_gpus_and_nothing_else(tmp_path: Path) -> None:
    done = acs(tmp_path, {"0000:10:01.1": "001d", "0000:20:01.1": "001d"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "control/0000:10:01.1").read_text() == "0011\n"
    assert (tmp_path / "control/0000:20:01.1").read_text() == "001d\n"
    assert "1 bridges without redirect, 0 with" in done.stdout


def test_acs_script_fails_where_a_bridge_keeps_redirecting(tmp_path: Path) -> None:
    done = acs(tmp_path, {"0000:10:01.1": "001d", "0000:11:00.0": "001d"}, stuck="0000:11:00.0")
    assert done.returncode == 1
    assert "0000:11:00.0 still redirects" in done.stderr
    assert (tmp_path / "control/0000:10:01.1").read_text() == "0011\n"


def test_needrestart_leaves_our_units_alone_where_it_is() -> None:
    facts = replace(hosts.TURIN_DIRECT, packages={"needrestart": "3.6-7ubuntu4"})
    files = {one.path: one.text for one in host_files(decide(facts).host, facts)}
    assert body(files[system_files.NEEDRESTART]) == "$nrconf{override_rc}{qr(^kimi-)} = 0;\n1;\n"
    assert system_files.NEEDRESTART not in texts()
    assert system_files.NEEDRESTART in unwanted_files([])
