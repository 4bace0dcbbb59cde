"""Leave GPU code out of a wheel's libraries without moving a byte of what stays.

A wheel with code for seven architectures is too large to carry to a machine that has one of them. The code of the
others is overwritten with zeros, which compress to nothing; the RECORD is mended, and the wheel says in METADATA what
was done to it.

Layout as read from libraries of nvcc 12 and 13 (no public description): a fatbinary is a header (magic, version, size
of the header, size of the rest) and entries (kind, size of the header, size of the data, ..., architecture).
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_ARCH_OFFSET = 28
# No entry with this architecture in its header is ever loaded on a newer card: cubins run within one major version.
NEVER = 30
_SECTION = re.compile(r"\.nv_fatbin\s+\S+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)")


@dataclass(frozen=True)
class Entry:
    """One piece of GPU code in a library: where its header begins, and its sizes in bytes."""

    at: int
    header_size: int
    data_size: int
    compressed: bool
    arch: int


def entries(library: bytes | bytearray, offset: int, size: int) -> Iterator[Entry]:
    """The entries of all fatbinaries in a section. Raises ValueError for a section that is not laid out as known."""
    position, end = offset, offset + size
    while position + _HEADER.size <= end:
        magic, _, header_size, rest = _HEADER.unpack_from(library, position)
        if magic != MAGIC:
            position += 8  # padding
            continue
        at, stop = position + header_size, position + header_size + rest
        if stop > end:
            raise ValueError(f"a fatbinary at {position} ends beyond its section")
        while at < stop:
            _, _, own_header, data_size, compressed, _, _, _, arch = _ENTRY.unpack_from(library, at)
            if own_header < _ENTRY.size or at + own_header + data_size > stop:
                raise ValueError(f"an entry at {at} is not laid out as known")
            yield Entry(at, own_header, data_size, compressed > 0, arch)
            at += own_header + data_size
        position = stop


def trim(library: bytearray, offset: int, size: int, keep: Callable[[Entry, bytes], bool]) -> tuple[int, int]:
    """Empty every entry that `keep(entry, its data)` refuses; entries emptied and kept."""
    emptied = kept = 0
    for entry in list(entries(library, offset, size)):
        begin = entry.at + entry.header_size
        if keep(entry, bytes(library[begin : begin + entry.data_size])):
            kept += 1
            continue
        emptied += 1
        library[begin : begin + entry.data_size] = bytes(entry.data_size)
        struct.pack_into("<I", library, entry.at + _ARCH_OFFSET, NEVER)
    return emptied, kept


def section(path: Path) -> tuple[int, int] | None:
    """Offset and size of a library's GPU code, by readelf; None for one that has none."""
    done = subprocess.run(["readelf", "-SW", str(path)], capture_output=True, text=True, check=True)
    found = _SECTION.search(done.stdout)
    return (int(found[1], 16), int(found[2], 16)) if found else None


# sgl_kernel/load_utils.py takes this folder's library on every card but those of compute capability 9.0.
OTHER_CARDS = "/sm100/"

# In the mangled name of a FlashAttention 3 kernel: the size of a value head, then the type of the inputs.
_KERNEL = re.compile(rb"FlashAttnFwdSm90.*?Li(\d+)ENS_\d+(bfloat16_t|half_t|float_e4m3_t)")
# Value heads of 512 (MLA's latent), 128 (MLA's prefill) and 64 (the drafter).
_VALUE_HEADS = {b"64", b"128", b"512"}


def for_hopper(entry: Entry, data: bytes) -> bool:
    """Code of compute capability 9.0; of FlashAttention 3's, what a Kimi-K2.5 and its drafter need in bf16.

    All variants together are 1.1 GB. The compressed ones among them are FP8 (every bf16 and FP16 variant is there
    uncompressed).
    """
    if entry.arch != 90 or (entry.data_size > 1 << 20 and entry.compressed):
        return False
    found = _KERNEL.search(data)
    return found is None or (found[2] == b"bfloat16_t" and found[1] in _VALUE_HEADS)


def trimmed_wheel(
    source: Path, target: Path, keep: Callable[[Entry, bytes], bool] = for_hopper, left_out: Collection[str] = ()
) -> list[str]:
    """Write `target`, the wheel `source` without the code that `keep` refuses and without the files `left_out`.

    Returns what was done, a line a file.
    """
    said = [f"{name}: left out" for name in left_out]
    changed: dict[str, bytes] = {}
    with zipfile.ZipFile(source) as old:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        metadata = record.replace("RECORD", "METADATA")
        for name in old.namelist():
            if ".so" not in Path(name).name or name in left_out:
                continue
            with tempfile.NamedTemporaryFile() as file:
                library = bytearray(old.read(name))
                file.write(library)
                file.flush()
                where = section(Path(file.name))
            if where is None:
                continue
            emptied, kept = trim(library, *where, (lambda *_: False) if OTHER_CARDS in name else keep)
            if emptied:
                said.append(f"{name}: {emptied} pieces of GPU code emptied, {kept} kept")
                changed[name] = bytes(library)
        note = f"Changed: not the published wheel; {'; '.join(said)}\n"
        changed[metadata] = note.encode() + old.read(metadata)
        changed[record] = _mended(old.read(record).decode(), changed, left_out).encode()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
            for info in (one for one in old.infolist() if one.filename not in left_out):
                new.writestr(info, changed.get(info.filename) or old.read(info), zipfile.ZIP_DEFLATED, 9)
    return said


def _mended(record: str, changed: dict[str, bytes], left_out: Collection[str]) -> str:
    lines = []
    for line in record.splitlines():
        name = line.split(",", 1)[0]
        if name in left_out:
            continue
        if name in changed and not name.endswith("RECORD"):
            content = changed[name]
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            line = f"{name},sha256={digest},{len(content)}"  # noqa: PLW2901  # the line as it shall be
        lines.append(line)
    return "\n".join(lines) + "\n"
