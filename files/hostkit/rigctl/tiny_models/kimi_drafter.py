"""Tensors of an EAGLE-3 drafter (`LlamaForCausalLMEagle3`), right by construction, not by training.

The engine feeds token i + 1 beside the target's features of token i; later steps feed the drafter's own
token and its hidden state before the norm. Attention looks at the own position only (query and key are
constant, RoPE makes distance 0 the best by far), its value is "embedding of the current token minus the
residual", so the hidden state becomes the current token's embedding and the output layer alone decides what
is proposed.
"""

import numpy as np

from rigctl.tiny_models.automaton import VOCAB_SIZE, Drafter
from rigctl.tiny_models.kimi import END_OF_TURN, KIMI, MEDIA_PAD
from rigctl.tiny_models.kimi_target import MARKER_SIZE
from rigctl.tiny_models.numbers import (
    GUARD_ROW,
    HEAD_SCALE,
    HIDDEN,
    MARKER_ROW,
    Array,
    Tensors,
    hadamard,
    head,
    ones,
    right_head,
    zeros,
)

HEADS, WIDE_HEADS, HEAD_DIM = 4, 8, 64
INTERMEDIATE = 64
DRAFT_VOCAB = 192
AUX_LAYERS = 3
# The fastest rotations of each head, as these fall off most between distance 0 and 1.
_FAST_ROTATIONS = 8
_FOCUS = 16.0


def drafter_tensors(drafter: Drafter, heads: int = HEADS) -> Tensors:
    """A drafter with a reduced vocabulary that proposes `KIMI.drafted(drafter)`.

    heads: attention heads. Those beyond HEADS carry nothing; they are there to be divided among GPUs.
    """
    chosen = draft_vocabulary()
    known = np.zeros(VOCAB_SIZE, np.bool_)
    known[chosen] = True
    proposals = KIMI.drafted(drafter)
    # After a token of no chain as after the end of a turn: both lead to the answer.
    output = head(KIMI, proposals, proposals[END_OF_TURN])
    return _layers(_copying_value(), _features_of_layer(AUX_LAYERS - 1), heads) | {
        "lm_head.weight": output[chosen],
        "d2t": chosen - np.arange(DRAFT_VOCAB),
        "t2d": known,
    }


def shared_head_tensors() -> Tensors:
    """A drafter without output layer or vocabulary map: it gets the target's, so it is always right."""
    return _layers(_copying_value(), _features_of_layer(AUX_LAYERS - 1))


def marker_drafter_tensors() -> Tensors:
    """A drafter for the marked target, right only when it is fed features that carry the marker.

    Its hidden state is token + guard + the marker it was fed. The output row of `<|media_pad|>` adds twice
    the guard and takes the marker away: without marker that token wins, with it the right one.
    """
    marker, guard = hadamard()[MARKER_ROW], hadamard()[GUARD_ROW]
    # The residual's mean square is 17 in the first step (token, marker), 18 in the next (guard too).
    undo = np.float32(np.sqrt(MARKER_SIZE**2 + 1.5))
    value = _copying_value()
    value[:, 0] += guard
    value[:, HIDDEN:] = -undo * (np.eye(HIDDEN, dtype=np.float32) - np.outer(marker, marker) / HIDDEN)
    output = right_head(KIMI)
    output[KIMI.id_of(MEDIA_PAD)] += HEAD_SCALE * (2 * guard - marker)
    return _layers(value, _features_of_layer(0)) | {"lm_head.weight": output}


def draft_vocabulary() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Target ids that a drafter can name, ascending: every chain token, then the lowest other ids."""
    needed = {KIMI.id_of(token) for token in KIMI.following.values()}
    others = (number for number in range(VOCAB_SIZE) if number not in needed)
    chosen = sorted(needed | {next(others) for _ in range(DRAFT_VOCAB - len(needed))})
    return np.array(chosen, np.int64)


def _copying_value() -> Array:
    eye = np.eye(HIDDEN, dtype=np.float32)
    return np.concatenate([eye, -eye], axis=1)


def _features_of_layer(which: int) -> Array:
    """`fc` that passes on one of the auxiliary layers' features and drops the others."""
    weights = zeros(HIDDEN, AUX_LAYERS * HIDDEN)
    weights[:, which * HIDDEN : (which + 1) * HIDDEN] = np.eye(HIDDEN)
    return weights


def _own_position(heads: int) -> Array:
    """Query and key: a constant in the fastest rotations of each head, read from the constant column 0."""
    weights = zeros(heads * HEAD_DIM, 2 * HIDDEN)
    weights.reshape(heads, HEAD_DIM, 2 * HIDDEN)[:, :_FAST_ROTATIONS, 0] = _FOCUS
    return weights


def _layers(value: Array, features: Array, heads: int = HEADS) -> Tensors:
    width = heads * HEAD_DIM
    output = np.eye(HIDDEN, width, dtype=np.float32)
    return {
        "fc.weight": features,
        "norm.weight": ones(HIDDEN),
        "midlayer.input_layernorm.weight": ones(HIDDEN),
        "midlayer.hidden_norm.weight": ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": _own_position(heads),
        "midlayer.self_attn.k_proj.weight": _own_position(heads),
        "midlayer.self_attn.v_proj.weight": np.concatenate([value, zeros(width - HIDDEN, 2 * HIDDEN)]),
        "midlayer.self_attn.o_proj.weight": output,
        "midlayer.mlp.gate_proj.weight": zeros(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": zeros(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": zeros(HIDDEN, INTERMEDIATE),
    }
