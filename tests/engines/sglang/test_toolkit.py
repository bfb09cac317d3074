"""A host with only a driver: SGLang gets pip's compiler where it looks for one, or a line says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from laminar_py.config.cluster import Device
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang import toolkit
from laminar_py.engines.sglang.launch import replica_server
from laminar_py.engines.sglang.toolkit import check_compilers, compiler_environment, linked_home

FILES = ("bin/crt/link.stub", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/cccl/nv/target")
FIELD = "rollout.engine.python"


@pytest.fixture(autouse=True)
def bare_host(monkeypatch, tmp_path):
    """No CUDA but a driver, and a C++ compiler of the host's."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    cxx = tmp_path / "path/c++"
    cxx.parent.mkdir()
    cxx.symlink_to("/usr/bin/c++")
    monkeypatch.setenv("PATH", str(cxx.parent))
    monkeypatch.setattr(toolkit, "SYSTEM", tmp_path / "no/cuda")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packaged(site: Path, *, without: str = "", release: str = "13.0") -> Path:
    """pip's CUDA 13.0 in a folder of packages, with an nvcc that says where it is."""
    home = site / "nvidia/cu13"
    for name in FILES:
        if not without or without not in name:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()
    (home / "bin").mkdir(parents=True, exist_ok=True)
    (home / "bin/nvcc").write_text(f'#!/bin/sh\necho "$0, release {release}, V1"\n')
    (home / "bin/nvcc").chmod(0o755)
    (home / "include").mkdir(parents=True, exist_ok=True)
    (home / "include/cuda.h").write_text("#define CUDA_VERSION 13000\n")
    if without != "libcudart":
        (home / "lib").mkdir(exist_ok=True)
        (home / "lib/libcudart.so.13").symlink_to(shared_library(site))
    return home


def shared_library(folder: Path) -> Path:
    path = folder / "runtime.so"
    build = ["/usr/bin/c++", "-shared", "-x", "c++", "-Wl,-soname,libcudart.so.13", "-o", str(path), "/dev/null"]
    subprocess.run(build, check=True, env={"PATH": "/usr/bin:/bin"})
    return path


def interpreter(folder: Path, site: Path, *, headers: bool = True) -> Path:
    """An interpreter with packages of its own."""
    path = folder / "bin/python"
    path.parent.mkdir(exist_ok=True)
    home = "" if headers else "import sysconfig; sysconfig.get_path = lambda name: '/no/headers'\n"
    path.write_text(
        f"#!{sys.executable} -S\nimport sys; sys.path.insert(0, {str(site)!r})\n{home}exec(sys.argv[2])\n"
    )
    path.chmod(0o755)
    ninja = path.with_name("ninja")  # as pip installs it
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    return path


def links(home: Path) -> bool:
    """As SGLang links a kernel."""
    command = [
        "/usr/bin/c++",
        "-shared",
        "-x",
        "c++",
        "/dev/null",
        f"-L{home}/lib64",
        "-lcudart",
        "-o",
        "/dev/null",
    ]
    return subprocess.run(command, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"}).returncode == 0


def test_a_server_gets_the_compiler_that_pip_installed_for_its_interpreter(tmp_path):
    home, python = packaged(tmp_path / "site"), interpreter(tmp_path, tmp_path / "site")
    check_compilers(python, field=FIELD)
    spec = replica_server(python, tmp_path, tmp_path / "log", max_batch=1, max_len=8)
    found = Path(spec.environment()["CUDA_HOME"])
    assert found.is_absolute()
    said = subprocess.run([found / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    assert said == f"{found}/bin/nvcc, release 13.0, V1\n"
    assert (found / "include/cuda_runtime.h").is_file()
    assert not links(home), "as pip lays it out, SGLang cannot link"
    assert links(found)


def test_servers_of_a_host_get_the_same_folder_and_others_another(tmp_path):
    home, other = packaged(tmp_path / "site"), packaged(tmp_path / "other")
    cache = tmp_path / "cache"
    one = linked_home(home, cache)
    assert linked_home(home, cache) == one
    assert linked_home(other, cache) != one
    assert len(list(cache.iterdir())) == 2


def test_a_server_on_a_cpu_needs_no_compiler(tmp_path):
    spec = replica_server(
        interpreter(tmp_path, packaged(tmp_path / "site").parent.parent),
        tmp_path,
        tmp_path / "log",
        max_batch=1,
        max_len=8,
        kv_capacity=16,
        device=Device.CPU,
    )
    assert "CUDA_HOME" not in spec.environment()


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH", "system"])
def test_a_compiler_that_sglang_finds_stays(place, tmp_path, monkeypatch):
    python = interpreter(tmp_path, packaged(tmp_path / "site").parent.parent)
    own = tmp_path / "own"
    (own / "bin").mkdir(parents=True)
    (own / "bin/nvcc").touch(mode=0o755)
    if place == "system":
        monkeypatch.setattr(toolkit, "SYSTEM", own)
    else:
        old = f":{tmp_path}/path" if place == "PATH" else ""
        monkeypatch.setenv(place, f"{own}/bin{old}" if place == "PATH" else str(own))
    check_compilers(python, field=FIELD)
    assert compiler_environment(python) == {}


@pytest.mark.parametrize("without", ["all", "bin/crt", "cicc", "cuda_runtime.h", "cccl", "libcudart"])
def test_a_host_without_a_compiler_is_one_line(without, tmp_path):
    if without != "all":
        packaged(tmp_path / "site", without=without)
    python = interpreter(tmp_path, tmp_path / "site")
    with pytest.raises(
        ConfigError, match=rf"^{FIELD}={python}: SGLang compiles kernels, and nvcc is neither"
    ) as caught:
        check_compilers(python, field=FIELD)
    assert str(caught.value).endswith(f"run `{python} -m pip install 'cuda-toolkit[nvcc,cccl]'`")
    assert compiler_environment(python) == {}


def test_a_host_without_ninja_is_one_line(tmp_path):
    packaged(tmp_path / "site")
    python = interpreter(tmp_path, tmp_path / "site")
    python.with_name("ninja").unlink()
    with pytest.raises(ConfigError, match=r"needs ninja, .*package ninja-build"):
        check_compilers(python, field=FIELD)


def test_a_compiler_newer_than_its_headers_is_one_line(tmp_path):
    """As pip resolves SGLang 0.5.23 alone: kernels of mixtures include CCCL, which refuses the pair."""
    packaged(tmp_path / "site", release="13.5")
    with pytest.raises(
        ConfigError, match=r"has release 13\.5 beside headers of 13\.0, .* pip install 'cuda-toolkit"
    ):
        check_compilers(interpreter(tmp_path, tmp_path / "site"), field=FIELD)


def test_a_host_without_a_cpp_compiler_or_headers_is_one_line(tmp_path, monkeypatch):
    packaged(tmp_path / "site")
    python = interpreter(tmp_path, tmp_path / "site", headers=False)
    with pytest.raises(ConfigError, match=r"needs /no/headers/Python.h, .*package python3-dev"):
        check_compilers(python, field=FIELD)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs c\+\+, which this host lacks; .*package g\+\+"):
        check_compilers(python, field=FIELD)


def test_a_cuda_home_without_a_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/opt/none")
    with pytest.raises(ConfigError, match=r"^CUDA_HOME=/opt/none: .*does not run; name a CUDA toolkit"):
        check_compilers(interpreter(tmp_path, tmp_path), field=FIELD)
