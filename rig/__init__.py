"""The control side. rigctl (files/hostkit) can be imported: what a host computes and what is shown here is one code."""

import sys
from pathlib import Path

_HOSTKIT = str(Path(__file__).resolve().parent.parent / "files" / "hostkit")
if _HOSTKIT not in sys.path:
    sys.path.append(_HOSTKIT)
