"""Moved to rig.cli.converge; this name works until the next version."""

from rig.cli.converge import main

if __name__ == "__main__":
    raise SystemExit(main())
