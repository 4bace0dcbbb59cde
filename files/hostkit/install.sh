#!/bin/sh
# Makes hostkit's own Python environment below the directory given, which already holds hostkit's files.
set -eu
cd "$1"
echo "making hostkit's environment"
python3 -m venv venv
venv/bin/python -m pip install --quiet --require-hashes --only-binary :all: -r requirements.txt
venv/bin/python -m compileall -q rigctl
chmod 755 bin/rigctl
touch complete
