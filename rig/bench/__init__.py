"""The benchmark: which serving configuration is fastest, fairly measured. docs/reference/benchmark.md is its page."""
