"""`python -m speculators` on a machine without an accelerator, which `train` refuses: the CPU takes its place.

Run by the trainer's python, this file alone. Read in speculators 0.9.0: train/cli.py asks for an accelerator,
train/trainer.py synchronises it, moves to its index and names it for autocast, train/dataloader.py pins memory, a
resume asks for its name.
"""

from collections.abc import Callable
from typing import Any

import torch
from speculators.cli import app
from speculators.train import checkpointer, trainer

CPU = torch.device("cpu")


def answers(value: Any) -> Callable[..., Any]:
    """A function that takes anything and returns this."""
    return lambda *_, **__: value


torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else CPU
torch.accelerator.is_available = answers(False)
torch.accelerator.synchronize = answers(None)
torch.Tensor.pin_memory = lambda self, *_: self
trainer.get_local_rank = answers(CPU)
checkpointer.get_current_device = answers("cpu")

if __name__ == "__main__":
    app()
