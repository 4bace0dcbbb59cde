"""The box of sandbox.py as a host that trains: `make train NAME=tiny-drafter`, with this file as INVENTORY."""

from rig.sandbox import Box as _Box

_box = _Box()

sandbox = [
    (
        _box.name,
        {
            **_box.host_data(),
            "catalogue_overlay": "sandbox-training.yaml",
            "configurations": ["vllm-base"],
            "trainings": ["tiny-drafter"],
        },
    )
]
