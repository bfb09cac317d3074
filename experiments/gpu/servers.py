"""The interpreter that a visit names as `rollout.engine.python`, so that SGLang 0.5.15 serves like 0.5.23.

0.5.23 needs a later torch than most machines without a network have. For an older version the interpreter is a
script that answers as 0.5.23 and starts `older_sglang.py` in place of `sglang.launch_server`. Then a run launches,
watches and restarts either version in the same way.
"""

import shlex
import subprocess
from pathlib import Path

from laminar_py.engines.sglang.launch import _VERSION, MIN_VERSION, version_numbers

OLDER = Path(__file__).with_name("older_sglang.py")
SCRIPT = """#!/bin/sh
# an interpreter whose SGLang {version} serves as {claimed}
case "$1 $2" in
    "-m sglang.launch_server") shift 2; exec {python} {older} "$@" ;;
    "-c "*) if [ "$2" = {question} ]; then echo {claimed}; exit; fi ;;
esac
exec {python} "$@"
"""


def interpreter(python: Path, folder: Path) -> Path:
    """Return `python`, or for an SGLang older than the client's a script in `folder` that stands for it."""
    asked = subprocess.run([str(python), "-c", _VERSION], capture_output=True, text=True, timeout=60, check=True)
    version = asked.stdout.strip()
    if version_numbers(version) >= MIN_VERSION:
        return python
    script = folder.absolute() / "python"
    words = {"python": str(python.absolute()), "older": str(OLDER), "question": _VERSION}
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    script.write_text(SCRIPT.format(**quoted, version=version, claimed=".".join(map(str, MIN_VERSION))))
    script.chmod(0o755)
    return script
