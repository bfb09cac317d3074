#!/usr/bin/env bash
# Installs packages that the adapters are tested against: install.sh FOLDER (Python 3.11 or later, two to four minutes).
# Each has a virtual environment of its own in the folder, since they want different releases of one library.
# Does nothing if FOLDER has been installed since this folder last changed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: install.sh FOLDER}
stamp=$folder/installed

if [ -f "$stamp" ] && [ -z "$(find "$here" -type f -newer "$stamp")" ]; then
    exit 0
fi
rm -f "$stamp" # an interrupted installation starts anew

for name in verifiers openenv; do
    "${PYTHON:-python3}" -m venv "$folder/$name"
    "$folder/$name/bin/pip" install -q --disable-pip-version-check -r "$here/$name.txt"
done

touch "$stamp"
