"""A box whose login is not root: the rest is sandbox.py's."""

_sudo = True
