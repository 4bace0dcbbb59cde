"""Pre-check of a serving unit: the host runs on the settings that its deploy decided. Reads /proc and /sys only.

What takes effect at boot must hold: an engine on another kernel command line or other driver options is not what was
decided and measured. Of the rest a difference is only reported, since any administrator may have a reason for it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from rigctl.contract.comparison import same_value
from rigctl.contract.run_specification import LiveSettings
from rigctl.errors import RigctlError
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor.specification import Specification

ROOT = Path("/")
WARNING = "warning: "
"""How the outcome of a check begins that holds, and yet found what `rigctl status` should show."""

# (name, wanted, found); found is None where the host does not tell, such as an option of a module yet to be loaded.
Reading = tuple[str, str, str | None]


def precheck(specification: Specification, root: Path = ROOT) -> str:
    """Raises RigctlError when the kernel or the driver runs without a boot-time setting."""
    wanted = specification.host_settings
    boot, others = [*_boot_time(wanted, root)], [*_run_time(wanted, root)]
    if missing := _differing(boot):
        raise RigctlError(
            f"the host runs without {'; '.join(missing)}: deploy again, which stages it and asks for a reboot"
        )
    if differing := _differing(others):
        return f"{WARNING}the host differs from its last deploy: {'; '.join(differing)}"
    return f"{len(boot) + len(others)} settings are live"


def _differing(readings: list[Reading]) -> list[str]:
    return [
        f"{name} {wanted} (is {found or 'absent'})"
        for name, wanted, found in readings
        if found is not None and not same_value(found, wanted)
    ]


def _boot_time(wanted: LiveSettings, root: Path) -> Iterator[Reading]:
    line = _text(root / "proc/cmdline")
    for token in wanted.kernel_arguments:
        yield "kernel argument", token, None if line is None else token if token in line.split() else ""
    # "Name: value" lines without the NVreg_ prefix (NVIDIA's README, "Configuring a driver registry entry").
    lines = [text.partition(": ") for text in (_text(root / "proc/driver/nvidia/params") or "").splitlines()]
    driver = {name: told for name, _, told in lines}
    for module, options in wanted.module_options.items():
        for option, value in options.items():
            own = _text(root / f"sys/module/{module}/parameters/{option}")
            flag = {"Y": "1", "N": "0"}.get(own or "", own)
            told = driver.get(option.removeprefix("NVreg_"), "").strip('"') or None
            yield f"{module}.{option}", value, flag if flag is not None else told


def _run_time(wanted: LiveSettings, root: Path) -> Iterator[Reading]:
    for name, value in wanted.sysctls.items():
        yield name, value, _text(root / "proc/sys" / name.replace(".", "/"))
    if governor := wanted.governor:
        yield from _all("governor", governor, root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor", str)
    for disk, scheduler in wanted.disk_scheduler.items():
        pattern = f"sys/block/{disk}[0-9]*/queue/scheduler"
        yield from _all(f"scheduler of {disk}", scheduler, root, pattern, _in_brackets)
    if limit := wanted.power_limit_w:
        limits = {row[0].partition(".")[0] for row in nvidia_smi("--query-gpu=power.limit")}
        yield "power limit in W", str(limit), ", ".join(sorted(limits)) or None


def _all(name: str, wanted: str, root: Path, pattern: str, read: Callable[[str], str]) -> Iterator[Reading]:
    found = {read(text) for path in root.glob(pattern) if (text := _text(path))}
    yield name, wanted, ", ".join(sorted(found)) or None


def _in_brackets(text: str) -> str:
    """The scheduler in use of `none [mq-deadline] kyber`."""
    return text.partition("[")[2].partition("]")[0]


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
