"""rigctl on this machine, without systemd: what others wrote is the tests' own here, and runs as whoever tests."""

import sys

CODE = (
    "import sys; from rigctl import builder; builder.unconfined(); "
    "from rigctl.cli import main; sys.exit(main(sys.argv[1:]))"
)
RIGCTL = [sys.executable, "-c", CODE]
