"""The box of sandbox.py with another overlay, which KIMI_RIG_KERNEL_OVERLAY names (tests/kernel/test_box.py)."""

import os as _os

from rig.sandbox import Box as _Box

_box = _Box()

sandbox = [(_box.name, {**_box.host_data(), "catalogue_overlay": _os.environ.get("KIMI_RIG_KERNEL_OVERLAY")})]
