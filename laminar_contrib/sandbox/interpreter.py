"""The Python interpreter that zygotes run: its command line, the files it needs, and a copy for other users."""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

SWITCHES = ("-P", "-s", "-S", "-B")  # nothing but the standard library, nothing written beside it
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "config-*", "*.opt-?.pyc")
LOAD_ALL = """
import ctypes, pathlib, sys
for folder in sys.path:
    for file in pathlib.Path(folder).glob("*.so") if pathlib.Path(folder).is_dir() else ():
        if not file.name.startswith(("_test", "_ctypes_test", "_tkinter", "xx")):
            try:
                ctypes.CDLL(str(file))
            except OSError:
                print("left out:", file, file=sys.stderr)
with open("/proc/self/maps") as file:
    found = {line.split(maxsplit=5)[5].strip() for line in file if ".so" in line}
print(*sorted(path for path in found if path.startswith("/")), sep="\\n")
"""
START = """
import sys
sys.path.append(sys.argv[1])
from laminar_contrib.sandbox.inside.zygote import main
sys.path.remove(sys.argv[1])
main()
"""


def zygote_command() -> list[str]:
    """Return the command line of a zygote, without the descriptor of its socket."""
    return [executable(), *SWITCHES, "-c", START, str(Path(__file__).parent.parent.parent)]


def zygote_environment(home: Path | None) -> dict[str, str]:
    """Return the environment variables of a zygote, none of them ours.

    `home` is the folder of the copied standard library, if there is a copy.
    """
    plain = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}
    return plain if home is None else plain | {"PYTHONHOME": str(home)}


def executable() -> str:
    """Return the real path of this interpreter; a virtual environment only links to it."""
    return str(Path(sys.executable).resolve())


@cache
def shared_libraries() -> list[str]:
    """Return shared libraries that the interpreter and its extension modules load, and the links to them."""
    run = [executable(), *SWITCHES, "-c", LOAD_ALL]
    done = subprocess.run(run, env=zygote_environment(None), capture_output=True, text=True, check=True)
    files = {Path(line) for line in done.stdout.splitlines()}
    links = [
        link
        for folder in {file.parent for file in files}
        for link in folder.iterdir()
        if link.is_symlink() and link.resolve() in files
    ]
    return sorted(str(path) for path in (*files, *links))


def is_library_readable_by_others() -> bool:
    """Return True if every user of this machine can read the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return all(folder.stat().st_mode & 0o001 for folder in (library, *library.parents))


def copy_standard_library(folder: Path) -> Path:
    """Hard-link or copy the standard library into `folder`, and return the `PYTHONHOME` for it."""
    library = Path(sysconfig.get_path("stdlib"))
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(
        library, folder / "lib" / library.name, symlinks=True, ignore=ignored, copy_function=_link_or_copy
    )
    return folder


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
