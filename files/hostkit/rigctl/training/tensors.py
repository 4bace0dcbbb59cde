"""Safetensors files written from parts of others: renamed, or cast to float32. Streams; a model is never in memory
whole."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from rigctl.checkpoints.headers import BadFile, Tensor

CHUNK = 1 << 26
FLOATS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""Dtypes of weights, as numpy reads their bytes; bfloat16 is the upper half of a float32."""


def copy(tensors: Mapping[str, Tensor], destination: Path, *, to_float32: bool = False) -> None:
    """Write these tensors under these names; floats in float32 if asked. Whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        cast = to_float32 and tensor.dtype in FLOATS
        size = (tensor.end - tensor.start) * (2 if cast and tensor.dtype != "F32" else 1)
        dtype = "F32" if cast else tensor.dtype
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    with unfinished.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for chunk in _chunks(tensor):
                handle.write(
                    as_float32(chunk, tensor.dtype).tobytes() if to_float32 and tensor.dtype in FLOATS else chunk
                )
    unfinished.chmod(0o644)
    unfinished.replace(destination)


def as_float32(data: bytes, dtype: str) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The numbers in the bytes of a tensor. Raises BadFile for a dtype that is no float."""
    if dtype not in FLOATS:
        raise BadFile(f"{dtype} where floating point is expected")
    raw = np.frombuffer(data, FLOATS[dtype])
    return (raw.astype("<u4") << 16).view("<f4") if dtype == "BF16" else raw.astype("<f4")


def data(tensor: Tensor) -> bytes:
    """All bytes of one tensor."""
    return b"".join(_chunks(tensor))


def _chunks(tensor: Tensor) -> Iterator[bytes]:
    with tensor.file.open("rb") as handle:
        handle.seek(tensor.start)
        left = tensor.end - tensor.start
        while left:
            chunk = handle.read(min(CHUNK, left))
            if not chunk:
                raise BadFile(f"{tensor.file}: ends within {tensor.name}")
            left -= len(chunk)
            yield chunk
