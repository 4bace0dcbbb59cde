"""Checkpoints on the host: staged, proved, resumable; drafters checked against their target."""

from rigctl.checkpoints.commands import register

__all__ = ["register"]
