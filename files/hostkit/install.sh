#!/bin/sh
# Completes a version of hostkit whose files lie in the directory given: its Python environment, shared by every version
# with the same requirements, and bytecode. `complete` is written last.
set -eu
cd "$1"
digest=$(sha256sum requirements.txt | cut -c 1-12)
environment="../venv-$digest"
if [ ! -e "$environment/complete" ]; then
    echo "making rigctl's environment"
    rm -rf "$environment"
    settings=$(python3 rigctl/site_settings.py)
    eval "$settings"
    python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --no-cache-dir --quiet --quiet --require-hashes --only-binary :all: -r requirements.txt
    touch "$environment/complete"
fi
ln -sfn "$environment" venv
venv/bin/python -m compileall -q rigctl
touch complete
