"""Programs for a machine with GPUs that has no network: run there by hand, their outputs become fixtures."""
