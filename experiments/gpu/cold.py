"""Visit 2: `python -m experiments.gpu.cold launch|no_compiler --sglang PYTHON [--dry]`.

`launch`: seconds from the command `laminar train` to the first learner step, with one SGLang server on the
learner's GPU: first with empty caches of kernels, then with the caches that this launch filled. `no_compiler`: the
same command where no `nvcc` and no C compiler is found, which must end with one line and exit code 2 before
anything starts.
"""

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.gpu.sglang_run import SIZES, run_config, write_data
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import LAMINAR

LIMIT_S = 240.0  # of one launch, to its end
STEPS = 2
COMPILERS = ("nvcc", "cc", "gcc", "g++", "c++", "clang", "clang++")
TOOLKIT = Path("/usr/local/cuda")  # where SGLang looks last


def write_config(folder: Path, python: Path, device: str) -> Path:
    """Write a run of two steps."""
    size = replace(SIZES[device], steps=STEPS)
    write_data(folder, size)
    config = folder / "config.yaml"
    config.write_text(json.dumps(run_config(folder, size, python=python, device=device)))
    return config


def with_caches(home: Path) -> dict[str, str]:
    """An environment whose caches of kernels lie below `home`: most are in `~`, torch's is named."""
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    moved = {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "torchinductor")}
    return kept | moved | {"PYTHONUSERBASE": site.getuserbase()}


def first_step_s(config: Path, name: str, runs: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds from the command until the first step is recorded, and until the run has ended.

    Raises `CalledProcessError` if the run fails, and `TimeoutExpired` after `LIMIT_S`.
    """
    command = [*LAMINAR, "train", str(config), f"name={name}", f"runs={runs}"]
    began = time.monotonic()
    first = 0.0
    with subprocess.Popen(command, stdout=sys.stderr, env=environment) as process:
        while process.poll() is None:
            seconds = time.monotonic() - began
            if seconds > LIMIT_S:
                process.terminate()
                raise subprocess.TimeoutExpired(command, LIMIT_S)
            if not first and any(path.stat().st_size for path in runs.glob(f"{name}-*/metrics.jsonl")):
                first = seconds
            time.sleep(0.1)
    if process.returncode or not first:
        raise subprocess.CalledProcessError(process.returncode, command)
    return first, time.monotonic() - began


def launch_rows(folder: Path, python: Path, device: str) -> list[Row]:
    """Seconds to the first step with empty caches, then with filled caches."""
    config = write_config(folder, python, device)
    caches = with_caches(folder / "home")
    rows = []
    for name, state in (("cold", "empty caches of kernels"), ("warm", "the caches of the launch before")):
        first, whole = first_step_s(config, name, folder / "runs", caches)
        what = f"{state}; one server and the learner on one {device}, {STEPS} steps, {whole:.0f} s to the end"
        rows.append(Row(f"{name}_first_step", first, "s from the command to the first step", what))
    return rows


def without_compilers(folder: Path) -> tuple[dict[str, str], Sequence[str]]:
    """An environment in which no compiler is found, and a command that hides the toolkit of this machine.

    Folders of `PATH` that have a compiler are replaced by folders of links to their other programs.
    """
    paths = []
    for place, name in enumerate(os.environ["PATH"].split(os.pathsep)):
        found = list(Path(name).iterdir()) if Path(name).is_dir() else []
        if any(path.name.startswith(COMPILERS) for path in found):
            links = folder / "bin" / str(place)
            links.mkdir(parents=True)
            for path in found:
                if not path.name.startswith(COMPILERS):
                    (links / path.name).symlink_to(path)
            name = str(links)
        paths.append(name)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CUDA_PATH", "CC", "CXX")
    }
    hide = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {TOOLKIT} && exec "$@"', "sh"]
    return environment | {"PATH": os.pathsep.join(paths)}, hide if TOOLKIT.exists() else []


def no_compiler_row(folder: Path, python: Path, device: str) -> Row:
    """Whether the launch ends at once with a line."""
    environment, hide = without_compilers(folder)
    what = "`laminar train` where no nvcc and no C compiler is found"
    if hide and subprocess.run([*hide, "true"], capture_output=True, check=False).returncode:
        return Row("no_compiler_one_line", None, "1: yes", f"not run: {TOOLKIT} cannot be hidden here; {what}")
    command = [*hide, *LAMINAR, "train", str(write_config(folder, python, device)), "name=no_compiler"]
    ended = subprocess.run(
        [*command, f"runs={folder / 'runs'}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S / 3,
        check=False,
    )
    lines = ended.stderr.strip().splitlines()
    holds = ended.returncode == 2 and len(lines) == 1
    said = f"exit code {ended.returncode}, {len(lines)} lines: {lines[-1] if lines else ''}"
    return Row("no_compiler_one_line", float(holds), "1: yes", f"{said[:300]}; {what}")


def main() -> None:
    """Measure and print the report as JSON; exit code 1 if there is more than one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["launch", "no_compiler"])
    parser.add_argument("--sglang", type=Path, required=True, help="interpreter of an environment with SGLang")
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    device = "cpu" if args.dry else "cuda"
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        if args.what == "launch":
            rows = launch_rows(Path(name), args.sglang, device)
        else:
            rows = [no_compiler_row(Path(name), args.sglang, device)]
    show("gpu", rows, as_json=True)
    sys.exit(0 if all(row.value != 0.0 for row in rows) else 1)


if __name__ == "__main__":
    main()
