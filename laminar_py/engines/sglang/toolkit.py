"""Compilers of SGLang's kernels: nvcc, a C++ compiler and Python's headers. `launch` finds and checks them here.

SGLang compiles kernels in a server's first requests. Version 0.5.23 looks for nvcc in CUDA_HOME, CUDA_PATH, PATH
and /usr/local/cuda. pip's nvcc is in none of them, and its folder has no `lib64/libcudart.so`, with which SGLang
links. Where pip's is the only one, a server gets a CUDA_HOME of links into the packages.

Servers of a host share SGLang's caches, and SGLang itself keeps them apart: by `_build_lock` (flock) and a rename
in `sglang/kernels/jit/utils/compile/loader.py`, `_local_rank_compile_lock` (flock) in
`sglang/srt/layers/deep_gemm_wrapper/compile_utils.py`, and `FileLock` in `sglang/kernels/jit/cute_aot_cache.py`.
The links have one path for all servers of a host, since a kernel's key may have the compiler's path.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar_py.config.section import ConfigError

CACHE = Path(".cache/cuda")
SYSTEM = Path("/usr/local/cuda")  # SGLang's last guess
PACKAGE = "cuda-toolkit[nvcc,cccl]"  # torch's own CUDA packages, with compilers of the same version
PARTS = (
    "bin/crt",
    "nvvm/bin/cicc",
    "include/cuda.h",
    "include/cuda_runtime.h",
    "include/cccl",
)  # beside nvcc, of other packages
_ASK = """
import importlib.util, json, os, sysconfig
found = importlib.util.find_spec("nvidia")
folders = list(found.submodule_search_locations) if found else []
print(json.dumps([folders, os.path.join(sysconfig.get_path("include"), "Python.h")]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Folders of an interpreter where compilers look, e.g. `ask_interpreter(Path("sglang-env/bin/python"))`."""

    packages: Sequence[Path]  # folders `nvidia` of its packages
    headers: Path  # its Python.h, which may be missing


def ask_interpreter(python: Path) -> Interpreter:
    """Ask an interpreter of this host for its packages of CUDA and its headers.

    Raises `OSError` or `subprocess.SubprocessError` if it does not run, and `ValueError` if it answers otherwise.
    """
    answer = subprocess.run(
        [str(python), "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    folders, headers = json.loads(answer)
    return Interpreter([Path(folder) for folder in folders], Path(headers))


def compiler_environment(python: Path) -> dict[str, str]:
    """Environment variables that lead a server of `python` to pip's nvcc; {} if it has another, or none."""
    if _usual_nvcc() is not None:
        return {}
    try:
        home = _packaged_home(ask_interpreter(python).packages)
    except (OSError, ValueError, subprocess.SubprocessError):  # the server does not start either, and says why
        return {}
    return {} if home is None else {"CUDA_HOME": str(linked_home(home, CACHE.absolute()))}


def own_path(python: Path) -> str:
    """Return PATH with the folder of `python` first, where pip puts the ninja that SGLang compiles with."""
    return os.pathsep.join([str(python.absolute().parent), os.environ.get("PATH", os.defpath)])


def check_compilers(python: Path, *, field: str) -> None:
    """Raise `ConfigError` if a server of `python` on this host's GPUs could not compile its kernels."""
    known = ask_interpreter(python)
    usual, cxx = _usual_nvcc(), os.environ.get("CXX", "c++")
    if usual is not None and not os.access(usual, os.X_OK):
        raise ConfigError(
            f"CUDA_HOME={usual.parent.parent}: SGLang compiles with its bin/nvcc, which does not run; name a"
            " CUDA toolkit, or unset the variable"
        )
    if usual is None:
        _check_packages(_packaged_home(known.packages), python, field)
    for name, found, package in (
        (cxx, shutil.which(cxx), "g++"),
        ("ninja", shutil.which("ninja", path=own_path(python)), "ninja-build"),
        (known.headers, known.headers.is_file(), "python3-dev"),
    ):
        if not found:
            raise ConfigError(
                f"{field}={python}: SGLang compiles kernels and needs {name}, which this host lacks; install the"
                f" system's package {package}"
            )


def _check_packages(home: Path | None, python: Path, field: str) -> None:
    """Raise `ConfigError` without pip's compiler, or if its version differs from the headers."""
    remedy = f"run `{python} -m pip install '{PACKAGE}'`"
    if home is None:
        raise ConfigError(
            f"{field}={python}: SGLang compiles kernels, and nvcc is neither in CUDA_HOME, PATH or {SYSTEM} nor"
            f" complete among its packages; {remedy}"
        )
    said = subprocess.run(
        [home / "bin/nvcc", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    compiler = re.search(r"release (\d+\.\d+)", said.stdout)
    number = re.search(r"#define CUDA_VERSION (\d+)", (home / "include/cuda.h").read_text())
    assert number is not None, f"{home}/include/cuda.h has a version"
    headers = f"{int(number[1]) // 1000}.{int(number[1]) % 1000 // 10}"
    if compiler is None or compiler[1] != headers:
        found = f"has release {compiler[1]}" if compiler else "does not run"
        raise ConfigError(
            f"{field}={python}: SGLang compiles kernels, and nvcc in {home} {found} beside headers of {headers},"
            f" which NVIDIA's libraries refuse; {remedy}"
        )


def _usual_nvcc() -> Path | None:
    """Return the nvcc that SGLang finds by itself; None if its last guess leads nowhere."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name]) / "bin/nvcc"
    on_path = shutil.which("nvcc")
    guess = Path(on_path) if on_path else SYSTEM / "bin/nvcc"
    return guess if guess.is_file() else None


def _packaged_home(packages: Sequence[Path]) -> Path | None:
    """Return the folder of pip's CUDA that has a compiler and the runtime, e.g. `site-packages/nvidia/cu13`."""
    for folder in packages:
        for nvcc in sorted(folder.glob("cu*/bin/nvcc")):
            home = nvcc.parent.parent
            if all((home / part).exists() for part in PARTS) and _runtime(home):
                return home
    return None


def _runtime(home: Path) -> Path | None:
    return next(iter(sorted((home / "lib").glob("libcudart.so.*"))), None)


def linked_home(home: Path, cache: Path) -> Path:
    """Return a folder of links to pip's CUDA in `home`, laid out as NVIDIA's installer does; make it if needed."""
    runtime = _runtime(home)
    assert runtime is not None, f"{home} has a runtime"
    links = {name: home / name for name in ("bin", "include", "nvvm")}
    links |= {f"lib64/{path.name}": path for path in sorted((home / "lib").iterdir())}
    links["lib64/libcudart.so"] = runtime
    if (driver := _driver()) is not None:
        links["lib64/stubs/libcuda.so"] = driver
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    made = cache / digest
    if made.is_dir():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=cache))
    for name, target in links.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).symlink_to(target)
    try:
        partial.rename(made)
    except OSError:  # another server of this host was first
        shutil.rmtree(partial)
    return made


def _driver() -> Path | None:
    """Return the driver's library, in place of the stub that pip's CUDA does not have."""
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if Path(ldconfig).is_file():
            known = subprocess.run(
                [ldconfig, "-p"], capture_output=True, text=True, timeout=60, check=False
            ).stdout
            match = re.search(r"libcuda\.so\.1 .*x86-64.* => (/\S+)", known)
            return Path(match[1]) if match else None
    return None
