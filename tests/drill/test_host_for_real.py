"""The host stage's tools for real in a box: apt, a signed repository, update-grub, kernel-install, update-initramfs.

What no container has is told or stood in for: the cards (host_deploy.py), grub-probe (there is no disk), the driver (a
module that no kernel loads). Sysctls, governor and disk schedulers are read-only in a box: their files are looked at.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rig.facts.report import HostReport
from rig.host import system_files
from rig.plan.host_plan import plan_from_facts, questions
from rigctl.contract import layout
from tests.drill.apt_repository import Package, Repository, kernel_module
from tests.drill.host_deploy import told
from tests.host import conftest as verification
from tests.host import test_settings
from tests.sandbox.conftest import DeployBox

KERNEL = "6.1.0-drill"
TOKENS = "iommu=off amd_iommu=off pcie_aspm=off pcie_port_pm=off"
OPERATORS = 'GRUB_DEFAULT=0\nGRUB_TIMEOUT=3\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX="rootdelay=5"\n'
CLOUD = 'GRUB_CMDLINE_LINUX_DEFAULT="console=ttyS0 $GRUB_CMDLINE_LINUX_DEFAULT"\n'
CMDLINE = "root=UUID=0-drill ro quiet crashkernel=512M\n"
REPOSITORY = "/srv/drill-repository"
PROBE = '#!/bin/sh\ncase "$*" in *fs_uuid*) echo 0-drill;; *target=fs*) echo ext2;; *) echo /dev/vda;; esac\n'
# A container may not write what a machine may: these settings are left alone.
OVERRIDES: dict[str, str | None] = {"sysctl.kernel.numa_balancing": None}


class HostBox:
    """A box, and the host stage on it."""

    def __init__(self, box: DeployBox, repository: Repository, keyring: Path) -> None:
        self.box, self.repository, self.keyring = box, repository, keyring

    def ssh(self, command: str, *, check: bool = True) -> str:
        return self.box.ssh(command, check=check).stdout

    def write(self, path: str, content: str | bytes, mode: str = "644") -> None:
        data = content.encode() if isinstance(content, str) else content
        command = f"mkdir -p $(dirname {path}) && cat > {path} && chmod {mode} {path}"
        subprocess.run(self.box.box.ssh_command(command), input=data, check=True, capture_output=True)

    def publish(self) -> None:
        """The repository as it stands, in the box."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(self.repository.folder.iterdir()):
                if path.is_file():
                    archive.add(path, path.name)
        command = f"rm -rf {REPOSITORY} && mkdir -p {REPOSITORY} && tar -x --no-same-owner -C {REPOSITORY}"
        subprocess.run(self.box.box.ssh_command(command), input=packed.getvalue(), check=True)

    def data(self, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(self.keyring.read_bytes()).hexdigest()
        url = f"file://{REPOSITORY}/{self.keyring.name}"
        overrides = {**OVERRIDES, **more.pop("host_overrides", {})}
        return {"driver_keyring": {"debian-12": [url, digest]}, "host_overrides": overrides, **more}

    def stage(self, *options: str, told: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run base and host stage."""
        data = [word for key, value in self.data(**more).items() for word in ("--data", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "pyinfra", "--chdir", str(ROOT), self.box.inventory, *data]
        return subprocess.run(
            [*command, "tests/drill/host_deploy.py", *(options or ("-y",))],
            capture_output=True, text=True, check=False, env={**os.environ, "PYINFRA_PROGRESS": "off", **(told or {})},
            cwd=ROOT, timeout=600,
        )  # fmt: skip

    def converge(self, told: dict[str, str] | None = None, **more: Any) -> None:
        """Apply, and see that a second run would change nothing."""
        done = self.stage("-y", told=told, **more)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
        again = self.stage("--dry", "--json", told=told, **more)
        assert again.returncode == 0, again.stderr[-3000:]
        plan = json.loads(again.stdout)["plan"]
        left = [one["name"] for one in plan if one["hosts_with_change"] or one["hosts_with_conditional_change"]]
        assert not left, f"a second run would change: {left}\n{again.stderr[-1500:]}"

    def target(self, **more: Any) -> verification.Target:
        """The box as verification sees it, with the same cards."""
        (entry,) = verification.inventory_hosts(self.box.inventory)
        data = {**entry["data"], **self.data(**more)}
        host = verification.connect(entry["name"], data, verification.ssh_config(self.box.inventory))
        found = HostReport().process(
            host.run(HostReport().command({**questions(data), "driver_source": None})).stdout.splitlines()
        )
        return verification.Target(entry["name"], host, plan_from_facts(data, told(found)), {}, {})

    def installed(self, package: str) -> str:
        return self.ssh(f"dpkg-query -W -f '${{Version}} ${{db:Status-Abbrev}}' {package} 2>/dev/null || true").strip()


@pytest.fixture(scope="module")
def host_box(bare_box: DeployBox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostBox]:
    """A box with a boot loader's tools, a kernel that is none, and a repository with an older and a newer driver."""
    repository = Repository(tmp_path_factory.mktemp("repository") / "files")
    running = bare_box.ssh("uname -r").stdout.strip()
    source = f"deb [signed-by=/usr/share/keyrings/drill.gpg] file:{REPOSITORY} ./\n"
    keyring = Package(
        "cuda-keyring", "1.1-1",
        files=(
            ("/usr/share/keyrings/drill.gpg", repository.key),
            ("/etc/apt/sources.list.d/cuda-drill.list", source.encode()),
        ),
    )  # fmt: skip
    repository.add(keyring, Package(f"linux-headers-{running}", "1"), *driver(running, "590.48.01"))
    host = HostBox(bare_box, repository, repository.folder / "cuda-keyring_1.1-1_all.deb")
    apt = "DEBIAN_FRONTEND=noninteractive apt-get -qqy"
    tools = "grub-common grub2-common systemd-boot kmod initramfs-tools curl"
    host.ssh(f"{apt} update && {apt} install --no-install-recommends {tools} </dev/null")
    host.write("/usr/sbin/grub-probe", PROBE, "755")
    host.ssh(f"mkdir -p /usr/lib/modules/{KERNEL} /usr/lib/modules/{running} && depmod {KERNEL} && depmod {running}")
    host.write(f"/boot/vmlinuz-{KERNEL}", "no kernel\n")
    host.write(f"/boot/config-{KERNEL}", "CONFIG_RD_GZIP=y\nCONFIG_BLK_DEV_INITRD=y\n")
    host.ssh(f"update-initramfs -c -k {KERNEL} >/dev/null 2>&1; ls /boot/initrd.img-{KERNEL}")
    host.write("/etc/systemd/system/kimi-acs.service.d/box.conf", "[Unit]\nConditionVirtualization=\n")
    host.write("/etc/default/grub", OPERATORS)
    host.write("/etc/default/grub.d/50-cloudimg.cfg", CLOUD)
    host.publish()
    yield host


def driver(running: str, version: str) -> list[Package]:
    """NVIDIA's three packages that matter, with a module for the running kernel."""
    module = f"/usr/lib/modules/{running}/updates/dkms/nvidia.ko"
    return [
        Package(
            "nvidia-open", f"{version}-1",
            f"nvidia-kernel-open-dkms (= {version}-1), libnvidia-compute (= {version}-1)",
        ),
        Package(
            "nvidia-kernel-open-dkms", f"{version}-1", files=((module, kernel_module(version)),),
            scripts=(("postinst", f"#!/bin/sh\ndepmod {running}\n"),),
        ),
        Package("libnvidia-compute", f"{version}-1"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def with_grub(host_box: HostBox) -> HostBox:
    host_box.ssh("rm -rf /boot/loader /boot/$(cat /etc/machine-id) && mkdir -p /boot/grub && update-grub 2>/dev/null")
    return host_box


def kernel_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(("linux", "options"))]


def test_a_keyring_that_is_another_is_not_installed(with_grub: HostBox) -> None:
    wrong = {"debian-12": [f"file://{REPOSITORY}/{with_grub.keyring.name}", "0" * 64]}
    done = with_grub.stage(driver_keyring=wrong)
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr and "WARNING" in done.stdout + done.stderr
    assert not with_grub.installed("cuda-keyring") and not with_grub.installed("nvidia-open")


def test_a_bare_host_gets_its_driver_held_and_its_boot_arguments(with_grub: HostBox) -> None:
    before = with_grub.ssh("cat /etc/default/grub /etc/default/grub.d/50-cloudimg.cfg")
    assert not with_grub.installed("nvidia-open")
    with_grub.converge()
    assert with_grub.installed("nvidia-open") == "590.48.01-1 hi"
    held = set(with_grub.ssh("apt-mark showhold").split())
    assert held == {"nvidia-open", "nvidia-kernel-open-dkms", "libnvidia-compute"}
    mark = with_grub.ssh(f"cat {layout.REBOOT_PENDING}").splitlines()
    assert mark[0] == "no driver is loaded, 590.48.01 is installed"
    assert "kernel_argument.iommu = off" in mark
    lines = kernel_lines(with_grub.ssh("cat /boot/grub/grub.cfg"))
    normal = [line for line in lines if " single" not in line]
    assert normal and all(line.endswith(f"rootdelay=5 console=ttyS0 quiet {TOKENS}") for line in normal), lines
    assert all("iommu" not in line for line in lines if " single" in line)
    assert with_grub.ssh("cat /etc/default/grub /etc/default/grub.d/50-cloudimg.cfg") == before
    inside = with_grub.ssh(f"lsinitramfs /boot/initrd.img-{KERNEL}")
    assert system_files.MODPROBE.lstrip("/") in inside.split()
    unit = with_grub.ssh("systemctl show kimi-acs.service -p ActiveState -p UnitFileState -p Result")
    assert set(unit.split()) == {"ActiveState=active", "UnitFileState=enabled", "Result=success"}


def test_a_newer_driver_does_not_come_by_itself(with_grub: HostBox) -> None:
    running = with_grub.ssh("uname -r").strip()
    with_grub.repository.add(*driver(running, "595.58.03"))
    with_grub.publish()
    with_grub.ssh("apt-get -qq update")
    assert "595.58.03-1" in with_grub.ssh("apt-cache policy nvidia-open")
    assert "nvidia" not in "".join(
        line for line in with_grub.ssh("apt-get -s dist-upgrade").splitlines() if line.startswith("Inst")
    )
    for loaded in ("590.48.01", ""):
        with_grub.converge({"KIMI_RIG_DRILL_DRIVER": loaded} if loaded else None)
        assert with_grub.installed("nvidia-open") == "590.48.01-1 hi"


def test_a_driver_that_will_not_do_is_changed_when_asked_and_idle_only(with_grub: HostBox) -> None:
    proprietary = {"KIMI_RIG_DRILL_DRIVER": "590.48.01", "KIMI_RIG_DRILL_PROPRIETARY": "1"}
    unasked = with_grub.stage(told=proprietary)
    assert unasked.returncode != 0 and "driver_upgrade" in unasked.stdout + unasked.stderr
    busy = with_grub.stage(told={**proprietary, "KIMI_RIG_DRILL_IN_USE": "1"}, driver_upgrade=True)
    assert busy.returncode != 0 and "stop what uses them first" in busy.stdout + busy.stderr
    assert with_grub.installed("nvidia-open") == "590.48.01-1 hi"
    idle = with_grub.stage(told=proprietary, driver_upgrade=True)
    assert idle.returncode == 0, idle.stdout + idle.stderr
    assert with_grub.installed("nvidia-open") == "595.58.03-1 hi"
    assert with_grub.installed("libnvidia-compute") == "595.58.03-1 hi"
    # The one that was loaded stays until the reboot, and the next plan finds the mark as it wrote it.
    with_grub.converge()
    assert with_grub.ssh(f"head -1 {layout.REBOOT_PENDING}").strip() == "no driver is loaded, 595.58.03 is installed"


def test_what_was_edited_by_hand_is_found_and_repaired(with_grub: HostBox) -> None:
    with_grub.converge()
    target = with_grub.target()
    test_settings.test_host_files(target)
    with pytest.raises(AssertionError, match="staged, waits for a reboot"):
        test_settings.test_settings_are_live(target)
    for path in (system_files.GRUB_DROP_IN, system_files.MODPROBE):
        with_grub.ssh(f"sed -i 's/off/on/; s/0x00/0x03/' {path}")
        with pytest.raises(AssertionError, match=f"{path}: content differs"):
            test_settings.test_host_files(with_grub.target())
    with_grub.ssh(f"sed -i 's/ {TOKENS}//' /boot/grub/grub.cfg")
    with_grub.converge()
    test_settings.test_host_files(with_grub.target())
    assert TOKENS in with_grub.ssh("cat /boot/grub/grub.cfg")


def test_a_sysctl_that_was_changed_by_hand_is_found(with_grub: HostBox) -> None:
    live = with_grub.ssh("sysctl -n vm.swappiness").strip()
    chosen = {"sysctl.vm.swappiness": live}
    with_grub.converge(host_overrides=chosen)
    test_settings.test_host_files(with_grub.target(host_overrides=chosen))
    with_grub.ssh(f"sed -i 's/= {live}/= 99/' {system_files.SYSCTL}")
    with pytest.raises(AssertionError, match=f"{system_files.SYSCTL}: content differs"):
        test_settings.test_host_files(with_grub.target(host_overrides=chosen))
    # The value of the running kernel: a box may not change it, so the wish is another one.
    with pytest.raises(AssertionError, match=r"'sysctl.vm.swappiness': 'to be applied'"):
        test_settings.test_settings_are_live(with_grub.target(host_overrides={"sysctl.vm.swappiness": "98"}))
    with_grub.converge(host_overrides=chosen)
    test_settings.test_host_files(with_grub.target(host_overrides=chosen))


def test_a_reboot_under_control_is_proved_by_live_values(with_grub: HostBox) -> None:
    boot = "cut -d' ' -f22 /proc/1/stat"
    before = with_grub.ssh(boot)
    done = with_grub.stage(reboot="yes")
    # The box has come back, and a container's kernel has no arguments of ours: the mark stays.
    assert done.returncode != 0, done.stdout + done.stderr
    assert "after the reboot the host runs without kernel_argument.iommu" in done.stdout + done.stderr
    assert with_grub.ssh(boot) != before
    assert "kernel_argument.amd_iommu" in with_grub.ssh(f"cat {layout.REBOOT_PENDING}").split()
    # Where nothing but the driver waited, the next boot has it all.
    left_alone = {f"kernel_argument.{name}": None for name in ("iommu", "amd_iommu", "pcie_aspm", "pcie_port_pm")}
    before = with_grub.ssh(boot)
    told = {"KIMI_RIG_DRILL_DRIVER": "580.95.05"}
    done = with_grub.stage(told=told, reboot="yes", host_overrides=left_alone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert with_grub.ssh(boot) != before
    assert with_grub.ssh(f"cat {layout.REBOOT_PENDING} 2>/dev/null || true") == ""


def test_an_upgraded_library_restarts_others_and_not_our_units(with_grub: HostBox) -> None:
    """As needrestart does after each upgrade on Ubuntu 24.04."""
    with_grub.ssh("DEBIAN_FRONTEND=noninteractive apt-get -qqy install --no-install-recommends needrestart </dev/null")
    with_grub.converge()
    unit = "[Service]\nExecStart=/usr/bin/python3 -c 'import ssl, time; time.sleep(600)'\n"
    names = ("kimi-drill", "other-drill")
    for name in names:
        with_grub.write(f"{layout.UNITS}/{name}.service", unit)
    with_grub.ssh(f"systemctl daemon-reload; systemctl start {' '.join(names)}; sleep 2")
    # Their library is another file now, of the same content.
    library = with_grub.ssh("ldconfig -p | sed -n 's/.*libcrypto.so.3 .*=> //p'").strip()
    with_grub.ssh(f"cp -p {library} {library}.new && mv {library}.new {library}")
    since = f"systemctl show {' '.join(names)} -p MainPID --value"
    before = with_grub.ssh(since).split()
    with_grub.ssh("needrestart -r a >/dev/null 2>&1", check=False)
    after = with_grub.ssh(since).split()
    with_grub.ssh(f"systemctl stop {' '.join(names)}; rm {layout.UNITS}/*-drill.service; systemctl daemon-reload")
    assert before[0] == after[0] and before[1] != after[1], (before, after)


def test_an_uninstall_restores_boot_loader_modules_and_packages(with_grub: HostBox) -> None:
    uninstall = with_grub.box.run("rig", "uninstall", with_grub.box.inventory, "--yes")
    assert uninstall.returncode == 0, uninstall.stdout + uninstall.stderr
    lines = kernel_lines(with_grub.ssh("cat /boot/grub/grub.cfg"))
    assert lines and all("iommu" not in line and "pcie_" not in line for line in lines)
    assert with_grub.ssh("cat /etc/default/grub") == OPERATORS
    assert with_grub.ssh("cat /etc/default/grub.d/50-cloudimg.cfg") == CLOUD
    assert "kimi-rig" not in with_grub.ssh(f"lsinitramfs /boot/initrd.img-{KERNEL}")
    for path in (
        system_files.GRUB_DROP_IN,
        system_files.MODPROBE,
        system_files.SYSCTL,
        system_files.TMPFILES,
        system_files.ACS_SCRIPT,
    ):
        assert with_grub.ssh(f"ls {path} 2>/dev/null || true") == "", path
    assert with_grub.ssh("systemctl show kimi-acs.service -p LoadState --value").strip() == "not-found"
    assert not any(with_grub.installed(one) for one in ("nvidia-open", "libnvidia-compute", "cuda-keyring", "pciutils"))
    assert with_grub.ssh("apt-mark showhold") == ""
    assert with_grub.ssh(f"ls {system_files.NEEDRESTART} 2>/dev/null || true") == ""


def test_systemd_boot_gets_our_tokens_and_gives_them_back(host_box: HostBox) -> None:
    host_box.ssh("rm -rf /boot/grub && mkdir -p /boot/loader/entries /boot/$(cat /etc/machine-id)")
    host_box.write(system_files.KERNEL_CMDLINE, CMDLINE)
    host_box.ssh(f"kernel-install add {KERNEL} /boot/vmlinuz-{KERNEL}")
    before = kernel_lines(host_box.ssh("cat /boot/loader/entries/*.conf"))
    host_box.converge()
    assert host_box.ssh(f"cat {system_files.KERNEL_CMDLINE}") == f"{CMDLINE.strip()} {TOKENS}\n"
    entries = kernel_lines(host_box.ssh("cat /boot/loader/entries/*.conf"))
    assert any(TOKENS in line and "crashkernel=512M" in line for line in entries), entries
    # The operator adds one of their own, and leaves one of ours alone.
    host_box.ssh(f"sed -i 's/quiet/quiet nosplash/' {system_files.KERNEL_CMDLINE}")
    host_box.converge(host_overrides={"kernel_argument.pcie_aspm": None})
    wanted = f"{CMDLINE.strip()} {TOKENS}".replace("quiet", "quiet nosplash").replace(" pcie_aspm=off", "")
    assert host_box.ssh(f"cat {system_files.KERNEL_CMDLINE}") == f"{wanted}\n"
    host_box.ssh(f"sed -i 's/ amd_iommu=off//' {system_files.KERNEL_CMDLINE}")
    with pytest.raises(AssertionError, match=f"{system_files.KERNEL_CMDLINE}: content differs"):
        test_settings.test_host_files(host_box.target())
    host_box.converge()
    uninstall = host_box.box.run("rig", "uninstall", host_box.box.inventory, "--yes")
    assert uninstall.returncode == 0, uninstall.stdout + uninstall.stderr
    assert host_box.ssh(f"cat {system_files.KERNEL_CMDLINE}") == CMDLINE.replace("quiet", "quiet nosplash")
    after = kernel_lines(host_box.ssh("cat /boot/loader/entries/*.conf"))
    assert after == [line.replace("quiet", "quiet nosplash") for line in before]
