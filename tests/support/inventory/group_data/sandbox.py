"""The box on this machine: the real thing on a CPU engine with a tiny model. Only data differs from a GPU host."""

catalogue_overlay = "sandbox.yaml"
configurations = ["vllm-base", "vllm-eagle3-aq-medai", "vllm-eagle3-custom"]
bench_sweep = "sandbox"
