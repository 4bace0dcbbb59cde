"""systemd's own view of units, by systemctl."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from rigctl.contract import layout
from rigctl.errors import RigctlError

UNITS = Path(layout.UNITS)


def properties(unit: str, wanted: Sequence[str]) -> dict[str, str]:
    """Properties of a unit; empty for what systemd does not tell. Raises RigctlError when it cannot be asked."""
    lines = systemctl("show", f"--property={','.join(wanted)}", unit).splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    return {key: found.get(key, "") for key in wanted}


def systemctl(*arguments: str) -> str:
    """What systemctl answers. Raises RigctlError with its words when it fails."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RigctlError(f"systemctl {' '.join(arguments)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
