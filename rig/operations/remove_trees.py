"""Remove directories of ours with all in them, also where other users can write on the way there.

Runs on a host by `python3 -` with the paths as arguments, so: standard library only. What it imports of ours travels in
front of it (rig/facts/report.py). A user who can write on the way could else have us delete where root alone may.
"""

from __future__ import annotations

import os
import subprocess
import sys

from rigctl.guarded import DIRECTORY
from rigctl.reached import reached


def remove_tree(path: str) -> str | None:
    """Remove it; in words why it stays, None when it is gone. Raises OSError."""
    above, name = os.path.split(path.rstrip("/"))
    try:
        with reached(above) as way:
            inside = os.open(way.name or ".", DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=way.directory)
    except FileNotFoundError:
        return None
    try:
        if way.links and os.fstat(inside).st_uid not in way.owners:
            return (
                f"{way.links[0]} is a link that another user made, and leads where that user cannot write: "
                f"`chown -h root {way.links[0]}` if {way.path} is the right place, and uninstall again"
            )
        os.fchdir(inside)
        # By descriptors of its own from here on, and never into another file system.
        done = subprocess.run(
            ["rm", "-rf", "--one-file-system", "--", f"./{name}"], capture_output=True, errors="replace", check=False
        )
    finally:
        os.chdir("/")
        os.close(inside)
    # It names files, which are others' words.
    return "".join(one if one.isprintable() else "?" for one in done.stderr)[:500] if done.returncode else None


if __name__ == "__main__":
    stays = [f"{path} stays: {why}" for path in sys.argv[1:] if (why := remove_tree(path))]
    sys.exit("\n".join(stays) or 0)
