"""What the engines print while they load: the phase a line belongs to, and how far it is.

Wording as printed by vLLM 0.16 to 0.33 and SGLang 0.5.9 to 0.5.23. A line that matches nothing changes no phase.
"""

import re

_SHARDS = (r"Loading \w+ checkpoint shards.*?(?P<done>\d+)/(?P<total>\d+)", "loading weights")

PATTERNS: dict[str, list[tuple[str, str]]] = {
    "vllm": [
        _SHARDS,
        (r"Starting to load model", "loading weights"),
        (r"Loading weights took", "weights loaded, preparing the model"),
        (r"torch\.compile|Dynamo bytecode|Compiling a graph", "compiling kernels"),
        (r"Capturing CUDA graphs?.*?(?P<done>\d+)/(?P<total>\d+)", "capturing graphs"),
        (r"Graph capturing finished", "graphs captured"),
        (r"(GPU|CPU) KV cache size", "key-value cache allocated"),
        (r"init engine .* took|Warming up|warm-?up", "warming up"),
        (r"Starting vLLM (API )?server|Started server process", "starting the HTTP server"),
    ],
    "sglang": [
        _SHARDS,
        (r"Load weight begin", "loading weights"),
        (r"Load weight end", "weights loaded, preparing the model"),
        (r"KV Cache is allocated", "key-value cache allocated"),
        (r"Capturing batches.*?(?P<done>\d+)/(?P<total>\d+)", "capturing graphs"),
        # "Capture cuda graph begin" in 0.5.9, "Capture target verify CUDA graph begin" in 0.5.16.
        (r"Capture .* begin\.", "capturing graphs"),
        (r"Capture .* end\.", "graphs captured"),
        (r"Started server process|Uvicorn running", "starting the HTTP server"),
        (r"The server is fired up", "warmed up"),
    ],
}


_COMPILED = {engine: [(re.compile(pattern), phase) for pattern, phase in found] for engine, found in PATTERNS.items()}


def phase_of(engine: str, line: str) -> str | None:
    """`loading weights 37/64`, or None for a line that says nothing about the phase."""
    for pattern, phase in _COMPILED.get(engine, []):
        if found := pattern.search(line):
            count = found.groupdict()
            return f"{phase} {count['done']}/{count['total']}" if count.get("total") else phase
    return None
