#!/bin/sh
# As the project's own release does: the toolkit's version into the names of the wheels in dist/. A plain build has none.
set -e
for wheel in dist/*-cp310-abi3-linux_x86_64.whl; do
  mv "$wheel" "$(echo "$wheel" | sed 's/-cp310-abi3-linux/+cu130-cp310-abi3-manylinux2014/')"
done
