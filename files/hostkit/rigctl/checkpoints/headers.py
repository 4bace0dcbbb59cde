"""What safetensors files say of themselves: names, dtypes, shapes. Only headers are read.

Format (safetensors documentation): 8 bytes little-endian header length, JSON header with `data_offsets`
relative to the end of the header, then the data, which must end where the last tensor ends.
"""

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError
from rigctl.reached import readable

LONGEST = 100_000_000  # bytes of header that the library accepts
DIMENSIONS = 64  # of a tensor, as torch allows
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


class BadFile(RigctlError):
    """Not a whole safetensors file."""


@dataclass(frozen=True)
class Tensor:
    """One tensor: dtype as in the header (BF16, I32, ...), shape, and its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read(path: Path) -> dict[str, Tensor]:
    """Tensors of one file by name; raises BadFile if it is truncated, too long or inconsistent."""
    with readable(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(8)
        if len(prefix) < 8:
            raise BadFile(f"{path.name}: {size} bytes, too short for a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if length > LONGEST or 8 + length > size:
            raise BadFile(f"{path.name}: header of {length} bytes in a file of {size}: truncated or not safetensors")
        raw = handle.read(length)
    base = 8 + length
    try:
        header = json.loads(raw, object_pairs_hook=_no_twins)
        tensors = {name: _tensor(name, item, path, base) for name, item in header.items() if name != "__metadata__"}
    except BadFile as error:
        raise BadFile(f"{path.name}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"{path.name}: header cannot be read: {error!r}") from error
    end = base
    for tensor in sorted(tensors.values(), key=lambda one: (one.start, one.end)):
        if tensor.start != end:
            raise BadFile(f"{path.name}: {tensor.name} begins at byte {tensor.start}, the one before it ends at {end}")
        end = tensor.end
    if end != size:
        what = "truncated" if end > size else "longer than its tensors"
        raise BadFile(f"{path.name}: {what}: {size} bytes, the header accounts for {end}")
    return tensors


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twin = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadFile(f"header names {twin!r} twice")
    return content


def _tensor(name: str, item: Any, path: Path, base: int) -> Tensor:
    dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    numbers = (*shape, start, end)
    if len(shape) > DIMENSIONS:
        raise BadFile(f"tensor {name}: {len(shape)} dimensions")
    if not isinstance(dtype, str) or any(type(one) is not int or one < 0 for one in numbers) or start > end:
        raise BadFile(f"tensor {name}: dtype {dtype!r}, shape {list(shape)}, bytes {start!r} to {end!r}")
    if dtype not in BITS:
        raise BadFile(f"tensor {name}: the dtype {dtype!r} is not known")
    if math.prod(shape) * BITS[dtype] != (end - start) * 8:
        raise BadFile(f"tensor {name}: {end - start} bytes for {dtype} {list(shape)}")
    return Tensor(name, dtype, shape, path, base + start, base + end)


def read_table(tensor: Tensor, dtype: str) -> list[int]:
    """The values of a small table of int64 (I64) or boolean (BOOL) numbers."""
    if tensor.dtype != dtype:
        raise BadFile(f"{tensor.file.name}: {tensor.name} is {tensor.dtype}, must be {dtype}")
    with readable(tensor.file) as handle:
        handle.seek(tensor.start)
        data = handle.read(tensor.end - tensor.start)
    return list(struct.unpack(f"<{len(data) // 8}q", data)) if dtype == "I64" else [int(byte != 0) for byte in data]
