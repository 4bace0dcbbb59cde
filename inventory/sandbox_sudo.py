"""The box as a rented host often is: its login is `ubuntu`, with sudo, zsh and umask 077.

KIMI_RIG_SANDBOX_PORT=2223 kimi-rig sandbox --name sandbox-sudo up --user ubuntu
"""

from rig.sandbox import Box as _Box

_box = _Box("sandbox-sudo")

sandbox_sudo = [(_box.name, _box.host_data())]
# Also of group sandbox, so that group_data/sandbox.py holds for it.
sandbox = sandbox_sudo
