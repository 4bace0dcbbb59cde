"""Loads the library for this machine's GPU: sm90/ for capability 9.0, else, and without a GPU, sm100/."""

from pathlib import Path

import torch

_folder = "sm90" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "sm100"
library = next((Path(__file__).parent / _folder).glob("common_ops*.so"))
torch.ops.load_library(str(library))
scale, row_sum, relu, heavy = (getattr(torch.ops.rig_kernel, n) for n in ("scale", "row_sum", "relu", "heavy"))
