#!/usr/bin/env bash
# Installs a real SGLang server for machines without a GPU: install.sh VENV (x86-64, Python 3.11, about a minute).
# Does nothing if VENV has been installed since this folder last changed. README.md says what for.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV}
stamp=$venv/installed

if [ -f "$stamp" ] && [ -z "$(find "$here" -type f -newer "$stamp")" ]; then
    exit 0
fi
rm -f "$stamp" # an interrupted installation starts anew

"${PYTHON:-python3}" -m venv "$venv"

# Without dependencies: requirements.txt has them all, and asking the packages would bring CUDA, triton and
# torchvision. torch is 2.13.0 like the project's own, so that both use one download; SGLang names a later one.
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$here/requirements.txt"

# What only a GPU or a picture needs, but importing the server asks for.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here"/stubs/* "$site/"

# Routed experts are copied to a pinned buffer on the host, and pinning needs CUDA.
capturer=$site/sglang/srt/state_capturer/base.py
sed -i 's/pin_memory=True,/pin_memory=torch.cuda.is_available(),/' "$capturer"
grep -q 'pin_memory=torch.cuda.is_available(),' "$capturer"

# Adapters go to the model through pinned buffers as well.
lora=$site/sglang/srt/lora
staging=("$lora/layers.py" "$lora/lora.py" "$lora/backend/torch_backend.py")
sed -i 's/pin_memory=True/pin_memory=torch.cuda.is_available()/; s/\.pin_memory()//' "${staging[@]}"
for file in "${staging[@]}"; do
    if grep -q 'pin_memory=True\|\.pin_memory()' "$file"; then
        echo "install.sh: $file still pins memory, which needs CUDA; have the lines above take that out" >&2
        exit 1
    fi
done

touch "$stamp"
