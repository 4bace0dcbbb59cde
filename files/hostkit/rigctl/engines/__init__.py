"""Engine environments on the host: built, patched, asked for their features, checked for drift, removed."""
