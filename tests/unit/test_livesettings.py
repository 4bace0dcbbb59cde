"""Before a start: the settings that the deploy decided are live, and the engine has its patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rig.artifacts.units import live_settings
from rig.host.settings import HostSettings
from rigctl.engines import patches
from rigctl.errors import RigctlError
from rigctl.supervisor.live_settings import precheck
from tests.unit.serving import specification
from tests.unit.test_patches import Engine

WANTED = HostSettings(
    kernel_arguments=("iommu=pt", "pci=realloc"),
    module_options={
        "nvidia": {"NVreg_EnableResizableBar": "0x01", "NVreg_RegistryDwords": "A=1;B=2"},
        "nvidia_uvm": {"uvm_disable_hmm": "1"},
    },
    sysctls={"vm.swappiness": "10"},
    governor="performance",
    disk_scheduler={"nvme": "none"},
    power_limit_w=450,
)
LIVE = {
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz ro iommu=pt pci=realloc\n",
    "proc/driver/nvidia/params": 'ResizableBar: 0\nEnableResizableBar: 1\nRegistryDwords: "A=1;B=2"\n',
    "sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "Y\n",
    "proc/sys/vm/swappiness": "10\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
    "sys/block/nvme0n1/queue/scheduler": "[none] mq-deadline\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with all settings live, and an nvidia-smi of its own."""
    for path, text in LIVE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 450.00\necho 450.00\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=":")
    return tmp_path


def look(root: Path, settings: HostSettings = WANTED) -> str:
    return precheck(specification(host_settings=live_settings(settings).model_dump()), root)


def test_settings_that_are_live(root: Path) -> None:
    assert look(root) == "9 settings are live"
    assert look(root, HostSettings()) == "0 settings are live"


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("proc/cmdline", "ro iommu=ptx pci=realloc", "kernel argument iommu=pt (is absent)"),
        ("proc/driver/nvidia/params", "EnableResizableBar: 0", "nvidia.NVreg_EnableResizableBar 0x01 (is 0)"),
        ("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N", "nvidia_uvm.uvm_disable_hmm 1 (is 0)"),
    ],
)
def test_a_boot_without_a_setting_serves_nothing(root: Path, path: str, text: str, named: str) -> None:
    (root / path).write_text(text)
    with pytest.raises(RigctlError, match="the host runs without") as refused:
        look(root)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("proc/sys/vm/swappiness", "60", "vm.swappiness 10 (is 60)"),
        (
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor",
            "powersave",
            "governor performance (is performance, powersave)",
        ),
        ("sys/block/nvme0n1/queue/scheduler", "none [kyber]", "scheduler of nvme none (is kyber)"),
        ("bin/nvidia-smi", "#!/bin/sh\necho 600.00\n", "power limit in W 450 (is 600)"),
    ],
)
def test_what_an_administrator_changed_is_told(root: Path, path: str, text: str, named: str) -> None:
    (root / path).write_text(text)
    assert look(root) == f"warning: the host differs from its last deploy: {named}"


def test_what_the_host_does_not_tell_is_not_held_against_it(root: Path) -> None:
    for path in ("proc/driver/nvidia/params", "proc/sys/vm/swappiness"):
        (root / path).unlink()
    assert look(root).endswith("settings are live")


def test_an_engine_without_its_patches_serves_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    where: dict[str, Any] = {"environment_path": str(engine.env), "series": str(engine.series)}
    with pytest.raises(RigctlError, match=r"unpatched: engine/one\.py, engine/two\.py; .*deploy again"):
        patches.precheck(specification(**where))
    patches.apply(engine.site, engine.series)
    assert patches.precheck(specification(**where)) == "2 files are ours"
    (engine.site / "engine/one.py").unlink()
    (engine.site / "engine/one.py").write_text("first\nedited\n")
    with pytest.raises(RigctlError, match=r"engine/one\.py: not the wheel's file"):
        patches.precheck(specification(**where))
    assert patches.precheck(specification()) == "this release needs none"


@pytest.mark.parametrize("live", ["B=2;A=1", "A=0x1;B=2;C=3", "C=3; B=2 ;A=1;"])
def test_registry_keys_hold_in_any_order_and_beside_others(root: Path, live: str) -> None:
    path = root / "proc/driver/nvidia/params"
    path.write_text(f'EnableResizableBar: 1\nRegistryDwords: "{live}"\n')
    assert look(root) == "9 settings are live"
    for wrong in ("A=1", "A=1;B=3", ""):
        path.write_text(f'EnableResizableBar: 1\nRegistryDwords: "{wrong};X=1"\n')
        with pytest.raises(RigctlError, match="RegistryDwords"):
            look(root)


def test_lines_of_the_driver_that_say_nothing(root: Path) -> None:
    path = root / "proc/driver/nvidia/params"
    path.write_text(f"{path.read_text()}\nRegistryDwords:\n")
    assert look(root) == "9 settings are live"
