"""`rigctl kernel`: CMake/scikit-build-core CUDA wheels, built for this host's GPUs, proved, and kept installed.

What is built is a specification (spec.py) that the deploy writes; nothing here knows a kernel library by name.
"""

from rigctl.kernel.commands import register

__all__ = ["register"]
