"""rigctl: the part of kimi-rig that lives on the host.

Runs in its own locked environment (files/hostkit/requirements.txt), never in an engine's.
"""
