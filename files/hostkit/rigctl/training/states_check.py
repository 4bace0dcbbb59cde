"""Are recorded states what a drafter can be trained on? Shape, dtype, tokens, finite numbers; from the files alone."""

import hashlib
from pathlib import Path

import numpy as np

from rigctl.checkpoints import headers
from rigctl.checkpoints.headers import BadFile
from rigctl.contract.eagle3_conventions import Convention, trained_input_ids
from rigctl.training import tensors

STATES, TOKENS = "hidden_states", "token_ids"


def check(path: Path, *, layers: int, hidden: int, sha256: str | None = None) -> None:
    """Raises BadFile, by file, for states that are not [tokens, layers, hidden] of finite numbers for these tokens.

    layers: ids that were extracted, the last state among them. sha256: of the tokens that they should be of.
    """
    found = headers.read(path)
    if set(found) != {STATES, TOKENS}:
        raise BadFile(f"{path.name}: holds {', '.join(sorted(found)) or 'nothing'}, not {STATES} and {TOKENS}")
    states, tokens = found[STATES], found[TOKENS]
    if tokens.dtype != "I64" or len(tokens.shape) != 1:
        raise BadFile(f"{path.name}: {TOKENS} is {tokens.dtype} {list(tokens.shape)}, must be I64 [tokens]")
    if states.shape != (wanted := (tokens.shape[0], layers, hidden)):
        raise BadFile(f"{path.name}: {STATES} is {list(states.shape)}, must be {list(wanted)}")
    if sha256 is not None and hashlib.sha256(tensors.data(tokens)).hexdigest() != sha256:
        raise BadFile(f"{path.name}: its tokens are not those of its row")
    values = tensors.as_float32(tensors.data(states), states.dtype)
    if not np.isfinite(values).all():
        raise BadFile(f"{path.name}: {np.count_nonzero(~np.isfinite(values))} of {values.size} numbers are not finite")


def inputs(convention: Convention, ids: list[int], layers: int) -> list[int]:
    """Ids of a drafter's configuration as ids of layer inputs, the last state's appended: what the engine is asked for.

    Raises BadFile for ids that do not rise or are none of the target's layers.
    """
    found = trained_input_ids(convention, ids, layers)
    if found is None:
        raise BadFile(f"layer ids {ids} of an unknown convention: say input (vLLM) or output (SGLang, SpecForge)")
    if found != sorted(set(found)) or not all(0 <= one < layers for one in found):
        raise BadFile(f"layer ids {ids} ({convention}) are inputs {found}: they must rise and be below {layers}")
    return [*found, layers]
