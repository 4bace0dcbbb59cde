"""The box: a Debian machine booted by systemd-nspawn on this computer, reached over SSH like a real host.

`kimi-rig sandbox up` makes and boots it; `inventory/sandbox.py` takes its address from `Box.host_data`.
"""

from rig.sandbox.box import Box, SandboxError

__all__ = ["Box", "SandboxError"]
