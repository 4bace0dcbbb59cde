"""Loads the library for this machine's GPU: sm90/ for capability 9.0, else, and without a GPU, sm100/."""

from pathlib import Path

import torch

_folder = "sm90" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "sm100"
library = next((Path(__file__).parent / _folder).glob("common_ops*.so"))
torch.ops.load_library(str(library))
_operators = torch.ops.rig_kernel
scale, row_sum, relu = _operators.scale, _operators.row_sum, _operators.relu
shift, heavy, huge = _operators.shift, _operators.heavy, _operators.huge
