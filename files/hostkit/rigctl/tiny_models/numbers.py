"""Arrays that tensors are made of, and their bytes in a safetensors file."""

from collections.abc import Mapping

import numpy as np
import safetensors
from numpy.typing import NDArray

from rigctl.tiny_models.automaton import VOCAB_SIZE, Automaton

HIDDEN = 256
# Rows of the Hadamard matrix that no chain token owns.
MARKER_ROW, GUARD_ROW, SHARED_ROW = 254, 253, 255
# Right logit = 0.25 * 256 = 64, every other one 0: no bf16 ties, deterministic at temperature 1 too.
HEAD_SCALE = 0.25

Array = NDArray[np.float32]
# Floating point means bf16 in the file; integers and booleans stay what they are.
Tensors = dict[str, Array | NDArray[np.int64] | NDArray[np.bool_]]


def hadamard() -> Array:
    """Sylvester's matrix: +-1, rows orthogonal, exact in bf16, root mean square 1, first column all +1."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < HIDDEN:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def embedding(automaton: Automaton) -> Array:
    """[vocabulary, hidden]: a row of its own for each chain token, one shared row for all others."""
    matrix = hadamard()
    table = np.tile(matrix[SHARED_ROW], (VOCAB_SIZE, 1))
    states = automaton.states
    table[[automaton.id_of(token) for token in states]] = matrix[: len(states)]
    return table


def head(automaton: Automaton, following: Mapping[str, str], after_others: str) -> Array:
    """[vocabulary, hidden]: the output layer that leads each embedding to the token that follows it."""
    rows, weights = embedding(automaton), np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    for token, after in following.items():
        weights[automaton.id_of(after)] += HEAD_SCALE * rows[automaton.id_of(token)]
    weights[automaton.id_of(after_others)] += HEAD_SCALE * hadamard()[SHARED_ROW]
    return weights


def right_head(automaton: Automaton) -> Array:
    """The output layer of a target that says what its automaton says."""
    return head(automaton, automaton.following, automaton.first_content)


def degenerate_head() -> Array:
    """Every token leads to token 0 (`!`): column 0 of every embedding is +1."""
    weights = zeros(VOCAB_SIZE, HIDDEN)
    weights[0, 0] = 64
    return weights


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


class Noise:
    """Uniform weights in +-0.05 for layers whose output is multiplied by zero.

    Raw generator bits only: numpy keeps those stable between versions, its distributions not.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, *shape: int) -> Array:
        raw = self._bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
        unit = raw.astype(np.float32) * np.float32(2**-23) - np.float32(1)
        return (unit * np.float32(0.05)).reshape(shape)


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """The nearest bf16 numbers (ties to even) as their bits, little endian. Finite values only."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2")


def safetensors_bytes(tensors: Tensors) -> bytes:
    """One safetensors file, the same bytes for the same tensors."""
    specs, kept = {}, []
    for name, values in tensors.items():
        is_float = values.dtype == np.float32
        stored = to_bf16(values.astype(np.float32)) if is_float else np.ascontiguousarray(values)
        kept.append(stored)  # the specification holds its address only
        specs[name] = safetensors.TensorSpec(
            dtype="bfloat16" if is_float else stored.dtype.name,
            shape=values.shape,
            data_ptr=stored.ctypes.data,
            data_len=stored.nbytes,
        )
    return bytes(safetensors.serialize(specs, {"format": "pt"}))
