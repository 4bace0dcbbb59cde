"""The failure that every command of rigctl ends with."""


class RigctlError(Exception):
    """A failure the operator can act on: says what is wrong, where, and what to do. Exit code 1."""
