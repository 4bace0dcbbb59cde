"""`rigctl kernel`: CMake/scikit-build-core CUDA wheels, built for this host's GPUs, proved, and kept installed.

What is built is an order that the deploy writes (rigctl/contract/kernel_job.py); nothing here knows a kernel library
by name.
"""

import argparse


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `kernel` to the command line."""
    # The compiler launcher is in this package too, and starts once a file.
    from rigctl.kernel.commands import register as register_commands

    register_commands(subparsers)
