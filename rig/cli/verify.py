"""`kimi-rig verify`: tests/host over the live hosts of an inventory."""

import subprocess
import sys
from collections.abc import Sequence

from rig.catalog.entries import ROOT
from rig.cli.arguments import FAILED, inventory, limit, limit_options, verb


@verb("verify")
@inventory
@limit
def verify_command(inventory: str, limits: Sequence[str]) -> int:
    """Prove the live hosts of INVENTORY (such as inventory/gpu.py): compare them with the plan, ask their engines.

    Exit codes: 0 all hold, 1 not.
    """
    tests = [sys.executable, "-m", "pytest", "-q", "tests/host", "--inventory", inventory, *limit_options(limits)]
    return FAILED if subprocess.run(tests, cwd=ROOT, check=False).returncode else 0
