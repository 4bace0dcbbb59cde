"""The box on this computer (`make sandbox`). Loads when there is none; connecting then fails."""

from rig.sandbox import Box as _Box

_box = _Box()

sandbox = [(_box.name, _box.host_data())]
