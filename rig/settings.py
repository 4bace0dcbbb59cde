"""What a host's facts decide about its units: the typed value that flows from facts to templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HostSettings:
    """Settings of one host that every serving unit takes over.

    environment: variables for the engine process, by engine name ("vllm", "sglang").
    device_allow: device nodes the units may open; empty where no GPU was found.
    cuda_home: toolkit for engines that compile at serve time, where there is one.
    """

    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device_allow: tuple[str, ...] = ()
    cuda_home: str | None = None


# The driver's device nodes: NVIDIA open-gpu-kernel-modules, nv-linux.h and nvidia-uvm; nvidia-caps holds MIG and IMEX.
NVIDIA_DEVICES = ("char-nvidia", "char-nvidia-uvm", "char-nvidia-caps", "char-nvidiactl")


def settings_from_gpus(gpu_count: int) -> HostSettings:
    """The settings that follow from the GPUs the PCI bus shows, before any driver is there."""
    if gpu_count == 0:
        return HostSettings()
    common = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return HostSettings(environment={"vllm": common, "sglang": common}, device_allow=NVIDIA_DEVICES)
