"""The kinds of checkpoint as their files' bytes, and how these get to their place: whole, never over anything else."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rigctl.errors import RigctlError
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
