"""Checkpoints on the host: staged, proved, resumable; drafters checked against their target."""
