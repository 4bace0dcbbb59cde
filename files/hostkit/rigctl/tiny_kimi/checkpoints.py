"""The kinds of checkpoint, each as its files' bytes."""

from __future__ import annotations

from collections.abc import Callable

from rigctl.tiny_kimi import drafter, target, text_files
from rigctl.tiny_kimi.automaton import VOCAB_SIZE, Drafter
from rigctl.tiny_kimi.numbers import Tensors, safetensors_bytes

# vLLM counts features before a layer (0 is the embedding): 3 is the first that carries the marker of layer 2.
RIGHT_AUX_LAYERS = (3, 4, 5)

Files = dict[str, bytes]


def checkpoint_files(kind: str) -> Files:
    """All files of one kind of checkpoint (a key of `tiny_kimi.KINDS`) by name; the same bytes every time."""
    return BUILDERS[kind]()


def _target(tensors: Tensors, shape: target.Shape = target.SMALL) -> Files:
    return text_files.target_files(shape) | {"model.safetensors": safetensors_bytes(tensors)}


def _drafter(
    tensors: Tensors, draft_vocab: int, aux_layers: tuple[int, ...] | None = None, heads: int = drafter.HEADS
) -> Files:
    config = text_files.drafter_files(draft_vocab, aux_layers, heads)
    return config | {"model.safetensors": safetensors_bytes(tensors)}


def _wide_drafter(kind: Drafter) -> Files:
    heads = drafter.WIDE_HEADS
    return _drafter(drafter.drafter_tensors(kind, heads), drafter.DRAFT_VOCAB, heads=heads)


BUILDERS: dict[str, Callable[[], Files]] = {
    "target": lambda: _target(target.target_tensors()),
    "target-degenerate": lambda: _target(target.target_tensors(output=target.degenerate_head())),
    "target-aux": lambda: _target(target.target_tensors(marked=True)),
    "drafter-always": lambda: _drafter(drafter.drafter_tensors("always"), drafter.DRAFT_VOCAB),
    "drafter-half": lambda: _drafter(drafter.drafter_tensors("half"), drafter.DRAFT_VOCAB),
    "drafter-never": lambda: _drafter(drafter.drafter_tensors("never"), drafter.DRAFT_VOCAB),
    "target-wide": lambda: (
        _target(target.target_tensors(shape=target.WIDE), target.WIDE) | text_files.processor_files()
    ),
    "drafter-always-wide": lambda: _wide_drafter("always"),
    "drafter-half-wide": lambda: _wide_drafter("half"),
    "drafter-never-wide": lambda: _wide_drafter("never"),
    "drafter-degenerate": lambda: _drafter(drafter.shared_head_tensors(), VOCAB_SIZE),
    "drafter-aux-wrong": lambda: _drafter(drafter.marker_drafter_tensors(), VOCAB_SIZE),
    "drafter-aux-right": lambda: _drafter(drafter.marker_drafter_tensors(), VOCAB_SIZE, RIGHT_AUX_LAYERS),
}
