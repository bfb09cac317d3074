#!/usr/bin/env bash
# Fetch what run.py installs on a machine without a network: wheels for Python 3.12 on x86-64 Linux, at the versions
# that are tested here. The machine has the rest: torch, transformers, aiohttp, pyarrow, typer, rich, psutil, pytest.
# Usage: experiments/gpu/wheels.sh FOLDER
set -euo pipefail

folder=${1:?usage: experiments/gpu/wheels.sh FOLDER}
here=$(dirname "$0")
python=${PYTHON:-python3}
mkdir -p "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --dest "$folder" --requirement "$here/wheels.txt"
# a run starts neither Java workers, nor Ray's pages, nor its other libraries
for wheel in "$folder"/ray-*.whl; do
  "$python" "$here/strip.py" "$wheel" ray/jars ray/dashboard/client/build ray/rllib
done
du -sh "$folder"
