"""The document of rig/facts/remote_script.py, typed: what an older or a mutilated one lacks is said in words."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=0, lt=1 << 63)]


class Reading(BaseModel):
    """A part of the document. Keys that are of no use any more are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Answer(Reading):
    """What a command said; rc None: it did not run to its end, and err says why."""

    rc: int | None = None
    out: str = ""
    err: str = ""


class Device(Reading):
    """An NVIDIA display controller, or a bridge above one. path: host bridge and devices above it, root first."""

    address: str
    kind: str = Field(alias="class")
    vendor: str | None
    device: str | None
    numa_node: str | None
    current_link_speed: str | None
    max_link_speed: str | None
    current_link_width: str | None
    max_link_width: str | None
    path: tuple[str, ...]
    driver: str | None
    bars: tuple[Size, ...]
    acs: tuple[int, int] | None
    acs_readable: bool
    aer: dict[str, Size] = {}
    clique: bool | None = None

    @property
    def display(self) -> bool:
        return self.kind.startswith("0x03")

    @property
    def pci_id(self) -> str:
        return ":".join((part or "").removeprefix("0x") for part in (self.vendor, self.device))


class Processor(Reading):
    """The first CPU, and counts of all."""

    vendor: str | None = None
    family: str | None = None
    model: str | None = None
    name: str | None = None
    hypervisor: bool = False
    count: Size | None = None
    sockets: Size = 0
    governors: tuple[str, ...] = ()


class IommuGroups(Reading):
    """Number and default domain types of the IOMMU groups."""

    groups: Size | None = None
    types: tuple[str, ...] = ()


class BlockDevice(Reading):
    """A physical disk."""

    name: str
    scheduler: str | None
    model: str | None


class Place(Reading):
    """The file system of a path."""

    path: str
    exists: bool
    mount: str
    type: str
    source: str
    size: Size
    free: Size
    device: int
    disks: tuple[BlockDevice, ...]


class Checkpoint(Reading):
    """A checkpoint's folder."""

    path: str
    config: str | None
    bytes: Size | None
    partial: Size = 0


class Stored(Place):
    """Something of ours that takes room on it."""

    kind: str
    name: str
    bytes: Size | None
    used: bool


class FactsDocument(Reading):
    """The whole document."""

    files: dict[str, str | None]
    exists: tuple[str, ...]
    commands: dict[str, Answer]
    pci: tuple[Device, ...]
    cpu: Processor
    iommu: IommuGroups
    paths: tuple[Place, ...]
    sysctls: dict[str, str | None]
    device_nodes: tuple[str, ...]
    probes: dict[str, str | None]
    unknown: dict[str, str]
    kernel: str | None = None
    machine: str | None = None
    glibc: str | None = None
    models: tuple[Checkpoint | None, ...] = ()
    environments: tuple[str, ...] = ()
    disk: tuple[Stored, ...] = ()
    kernels: dict[str, bool] = {}
    toolkits: dict[str, str] = {}
    gcc: str | None = None
    accepted: tuple[str, ...] = ()
    ports: tuple[int, ...] | None = None
    secure_boot: bool | None = None
    seconds: float | None = None
