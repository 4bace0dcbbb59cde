"""The kinds of checkpoint as their files' bytes, and how these get to their place: whole, never over anything else."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rigctl.errors import RigctlError
from rigctl.tiny_models import glm, kimi_drafter, kimi_files, kimi_target, kimi_topics, qwen3
from rigctl.tiny_models.automaton import VOCAB_SIZE, Drafter
from rigctl.tiny_models.numbers import Tensors, degenerate_head, safetensors_bytes

# vLLM counts features before a layer (0 is the embedding): 3 is the first that carries the marker of layer 2.
RIGHT_AUX_LAYERS = (3, 4, 5)

Files = dict[str, bytes]


def checkpoint_files(kind: str) -> Files:
    """All files of one kind of checkpoint (a key of `tiny_models.KINDS`) by name; the same bytes every time."""
    return BUILDERS[kind]()


def _target(tensors: Tensors, shape: kimi_target.Shape = kimi_target.SMALL) -> Files:
    return kimi_files.target_files(shape) | {"model.safetensors": safetensors_bytes(tensors)}


def _drafter(
    tensors: Tensors, draft_vocab: int, aux_layers: tuple[int, ...] | None = None, heads: int = kimi_drafter.HEADS
) -> Files:
    config = kimi_files.drafter_files(draft_vocab, aux_layers, heads)
    return config | {"model.safetensors": safetensors_bytes(tensors)}


def _wide_drafter(kind: Drafter) -> Files:
    heads = kimi_drafter.WIDE_HEADS
    return _drafter(kimi_drafter.drafter_tensors(kind, heads), kimi_drafter.DRAFT_VOCAB, heads=heads)


def _glm(drafter: Drafter) -> Files:
    return glm.files() | {"model.safetensors": safetensors_bytes(glm.tensors(drafter))}


BUILDERS: dict[str, Callable[[], Files]] = {
    "target": lambda: _target(kimi_target.target_tensors()),
    "target-degenerate": lambda: _target(kimi_target.target_tensors(output=degenerate_head())),
    "target-aux": lambda: _target(kimi_target.target_tensors(marked=True)),
    "drafter-always": lambda: _drafter(kimi_drafter.drafter_tensors("always"), kimi_drafter.DRAFT_VOCAB),
    "drafter-half": lambda: _drafter(kimi_drafter.drafter_tensors("half"), kimi_drafter.DRAFT_VOCAB),
    "drafter-never": lambda: _drafter(kimi_drafter.drafter_tensors("never"), kimi_drafter.DRAFT_VOCAB),
    "target-wide": lambda: (
        _target(kimi_target.target_tensors(shape=kimi_target.WIDE), kimi_target.WIDE) | kimi_files.processor_files()
    ),
    "topics": lambda: (
        kimi_files.target_files(kimi_target.WIDE, kimi_topics.TOPICS, kimi_topics.TEMPLATE)
        | kimi_files.processor_files()
        | {
            "model.safetensors": safetensors_bytes(
                kimi_target.target_tensors(shape=kimi_target.WIDE, automaton=kimi_topics.TOPICS)
            )
        }
    ),
    "drafter-always-wide": lambda: _wide_drafter("always"),
    "drafter-half-wide": lambda: _wide_drafter("half"),
    "drafter-never-wide": lambda: _wide_drafter("never"),
    "drafter-degenerate": lambda: _drafter(kimi_drafter.shared_head_tensors(), VOCAB_SIZE),
    "drafter-aux-wrong": lambda: _drafter(kimi_drafter.marker_drafter_tensors(), VOCAB_SIZE),
    "drafter-aux-right": lambda: _drafter(kimi_drafter.marker_drafter_tensors(), VOCAB_SIZE, RIGHT_AUX_LAYERS),
    "qwen3": lambda: qwen3.files() | {"model.safetensors": safetensors_bytes(qwen3.tensors())},
    "glm-always": lambda: _glm("always"),
    "glm-half": lambda: _glm("half"),
    "glm-never": lambda: _glm("never"),
}


def publish(files: Mapping[str, bytes], destination: Path) -> bool:
    """Write a flat directory of world-readable files; True if it was written, False if it was there already.

    Raises RigctlError if something else lies at `destination` or it cannot be written.
    """
    if not destination.parent.is_dir():
        raise RigctlError(f"{destination.parent} is no directory; make it first")
    try:
        if os.path.lexists(destination):
            if _holds(files, destination):
                return False
            raise RigctlError(
                f"{destination} exists and is not this checkpoint; move it away or name another directory"
            )
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as beside:
            fresh = Path(beside, destination.name)
            fresh.mkdir()
            fresh.chmod(0o755)
            for name, data in files.items():
                with (fresh / name).open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fchmod(stream.fileno(), 0o644)
                    os.fsync(stream.fileno())
            fresh.rename(destination)
    except OSError as error:
        raise RigctlError(f"{destination} cannot be made or read: {error.strerror} ({error.filename})") from error
    return True


def _holds(files: Mapping[str, bytes], directory: Path) -> bool:
    if directory.is_symlink() or not directory.is_dir() or {path.name for path in directory.iterdir()} != set(files):
        return False
    return all((directory / name).read_bytes() == data for name, data in files.items())
