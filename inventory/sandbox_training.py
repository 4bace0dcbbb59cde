"""The box of sandbox.py as a host that trains: `make train NAME=tiny-drafter`, with this file as INVENTORY.

Its box is made by `KIMI_RIG_SANDBOX_NETWORKS=1 make sandbox`: the extraction listens in a network of its own.
"""

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
