"""The benchmark: which serving configuration is fastest, fairly measured. docs/benchmark.md is its page."""
