"""The box of sandbox.py with tiny models of three families, which run beside each other on ports of their own."""

from rig.sandbox import Box as _Box

_box = _Box()

sandbox = [
    (
        _box.name,
        {
            **_box.host_data(),
            "configurations": [
                "vllm-base",
                "tiny-glm-mtp",
                "tiny-glm-mtp-always",
                "tiny-glm-mtp-never",
                "tiny-qwen3-ngram",
            ],
        },
    )
]
