"""Other machines than this one: one without root, and one that refuses Landlock, as some containers do.

Run as a script it is a child on such a machine: `machines.py hostile CANARY` prints labels as JSON, and
`machines.py laminar WORD...` is the command line where there is no sandbox.
"""

import asyncio
import errno
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from laminar_contrib.sandbox.inside import seccomp
from laminar_contrib.sandbox.pool import SandboxPool
from laminar_py.children import kernel, landlock
from laminar_py.cli import main as laminar
from tests.sandbox.conftest import TIGHT
from tests.sandbox.hostile import HOSTILE, run_hostile

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534


def laminar_without_sandbox(*words):
    """`laminar` on a machine that refuses Landlock."""
    command, env = [sys.executable, __file__, "laminar", *words], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def nobodys_interpreter():
    """Command of an interpreter that another user can start and that finds our packages, or None."""
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    library = Path(sysconfig.get_path("stdlib"))
    readable = all(folder.stat().st_mode & 0o001 for folder in (library, *library.parents))
    own = [str(Path(sys.executable).resolve())] if readable else []
    for python in (*own, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            as_nobody([python, "-c", "import laminar_py, msgspec, pydantic"], paths)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python, paths
    return None


def as_nobody(command, paths):
    """Output of a command that nobody runs."""
    env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": env, "cwd": "/"}
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def refuse(numbers):
    """Have the kernel refuse calls of this process."""
    cases = [part for number in numbers for part in seccomp._case(number, [seccomp._refuse(errno.EPERM)])]
    end = seccomp._op(seccomp.RETURN, seccomp.ALLOW)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.apply_filter(b"".join([seccomp._op(seccomp.LOAD, seccomp.NUMBER), *cases, end]))


async def hostile(canary):
    """Labels of all hostile programs by name."""
    async with SandboxPool(slots=2, limits=TIGHT) as pool:
        programs = [one.program.replace("CANARY", canary).replace("PORT", "9") for one in HOSTILE]
        runs = (run_hostile(pool, one, program) for one, program in zip(HOSTILE, programs, strict=True))
        results = await asyncio.gather(*runs)
        pairs = zip(HOSTILE, results, strict=True)
        return {one.name: [found.label.value, found.stdout, found.detail] for one, found in pairs}


def main():
    what, *arguments = sys.argv[1:]
    if what == "laminar":
        refuse([landlock.CREATE_RULESET])
        sys.argv[1:] = arguments
        laminar()
    sys.stdout.write(json.dumps(asyncio.run(hostile(*arguments))))


if __name__ == "__main__":
    main()
