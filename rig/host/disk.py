"""What lies on a host's disks, what a deploy adds, and what may go: by file system. Pure.

What lies there comes from the host (rig/facts/remote_script.py), what is added from the plan (rig/artifacts/disk.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rig.facts.host import DataPath

WORTH_NAMING = 100_000_000
"""Bytes: what is smaller is left out of texts."""


@dataclass(frozen=True)
class Item:
    """Something on a disk, or to be written. bytes: None where not known; a file with several names counts once.

    command: what removes it, on the host; empty for what is needed.
    """

    what: str
    path: str
    bytes: int | None
    command: str = ""

    def __str__(self) -> str:
        return f"{self.what} {size(self.bytes)}"


@dataclass(frozen=True)
class FileSystem:
    """One file system, or several that share one pool of space, with all that is ours on it. size, free: bytes."""

    mount: str
    size: int
    free: int
    there: tuple[Item, ...] = ()
    adds: tuple[Item, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes that a deploy writes, as far as they are known."""
        return sum(item.bytes or 0 for item in self.adds)

    @property
    def fits(self) -> bool:
        return self.needed <= self.free

    @property
    def may_go(self) -> tuple[Item, ...]:
        """What can be removed, largest first."""
        return tuple(sorted((item for item in self.there if item.command), key=lambda item: -(item.bytes or 0)))

    @property
    def cure(self) -> str:
        """What to remove, by which command and for how many bytes."""
        named = [item for item in self.may_go if (item.bytes or 0) >= WORTH_NAMING]
        return "; ".join(f"{item}: `{item.command}`" for item in named)

    @property
    def shortage(self) -> str:
        """What does not fit, in numbers."""
        adds = ", ".join(f"{item} in {item.path}" for item in self.adds)
        return (
            f"{self.mount} has {size(self.free)} free of {size(self.size)}, a deploy needs {size(self.needed)}: {adds}"
        )

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **asdict(self),
            "needed": self.needed,
            "fits": self.fits,
            "shortage": self.shortage,
            "lines": self.lines(),
        }

    def lines(self) -> list[str]:
        """For people: the account, and where it is tight what may go."""
        there: dict[str, int] = {}
        for item in self.there:
            kind = item.what.partition(" ")[0]
            there[kind] = there.get(kind, 0) + (item.bytes or 0)
        account = f"disk {self.mount}: {size(self.free)} free of {size(self.size)}"
        ours = [f"{kind} {size(count)}" for kind, count in there.items() if count >= WORTH_NAMING]
        account += f"; ours: {', '.join(ours)}" if ours else ""
        account += f"; a deploy adds {', '.join(map(str, self.adds))}" if self.adds else ""
        tight = self.free - self.needed < self.size // 10
        return [account, *([f"  may go: {self.cure}"] if tight and self.cure else [])]


def size(count: int | None) -> str:
    """Decimal units, as disks and the hub count."""
    if count is None:
        return "of unknown size"
    return f"{count / 1e9:,.0f} GB" if abs(count) >= 10e9 else f"{count / 1e9:,.1f} GB"


def file_systems(
    there: Sequence[tuple[DataPath, Item]], adds: Sequence[tuple[DataPath, Item]]
) -> tuple[FileSystem, ...]:
    """Every file system that something of ours lies on or is to be written to, by mount point."""
    pools: dict[object, list[DataPath]] = {}
    for place, _ in [*adds, *there]:
        pools.setdefault(_pool(place), []).append(place)
    found = [
        FileSystem(
            places[0].mount,
            places[0].size,
            min(place.free for place in places),  # of several in one pool each may have a limit of its own
            *(tuple(item for place, item in items if _pool(place) == pool) for items in (there, adds)),
        )
        for pool, places in pools.items()
    ]
    return tuple(sorted(found, key=lambda one: one.mount))


def _pool(place: DataPath) -> object:
    """What file systems share their free space by: subvolumes of btrfs a device, data sets of ZFS a pool."""
    if place.filesystem == "zfs":
        return place.source.partition("/")[0]
    return place.source if place.filesystem == "btrfs" else place.device
