"""Other machines than this one: one without root, one that refuses calls of the kernel, as containers do.

Run as a script it is a child on such a machine, and prints what it found as JSON: `machines.py survey NUMBER...`
with the calls that are refused, or `machines.py hostile TIER CANARY`. `machines.py laminar WORD...` is the command
line where there is no sandbox.
"""

import asyncio
import errno
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from laminar_contrib.sandbox import interpreter
from laminar_contrib.sandbox.inside import seccomp
from laminar_contrib.sandbox.pool import SandboxPool, survey_tiers
from laminar_contrib.sandbox.records import SandboxTier
from laminar_py.children import kernel, landlock
from laminar_py.cli import main as laminar
from laminar_py.config.section import ConfigError
from tests.sandbox.conftest import TIGHT
from tests.sandbox.hostile import HOSTILE, run_hostile

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534


def run_refusing(numbers):
    """Output of a child for which the kernel refuses calls of these numbers."""
    command = [sys.executable, __file__, "survey", *map(str, numbers)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def laminar_without_sandbox(*words):
    """`laminar` on a machine that refuses namespaces and Landlock."""
    command, env = [sys.executable, __file__, "laminar", *words], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def nobodys_interpreter():
    """Command of an interpreter that another user can start and that finds our packages, or None."""
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    own = [interpreter.executable()] if interpreter.is_library_readable_by_others() else []
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


async def survey():
    """Tiers that are offered with their reasons, and the error of each that is not."""
    found = {offer.tier.value: [offer.offered, offer.reason] for offer in await survey_tiers()}
    errors = {}
    for tier in SandboxTier:
        try:
            async with SandboxPool(slots=1, require=tier) as pool:
                found["taken"] = pool.tier.value
        except ConfigError as error:
            errors[tier.value] = str(error)
    return found | {"errors": errors}


async def hostile(tier, canary):
    """Labels of all hostile programs by name."""
    async with SandboxPool(slots=2, require=tier, tier=tier, limits=TIGHT) as pool:
        programs = [one.program.replace("CANARY", canary).replace("PORT", "9") for one in HOSTILE]
        runs = (run_hostile(pool, one, program) for one, program in zip(HOSTILE, programs, strict=True))
        results = await asyncio.gather(*runs)
        pairs = zip(HOSTILE, results, strict=True)
        return {one.name: [found.label.value, found.stdout, found.detail] for one, found in pairs}


def main():
    what, *arguments = sys.argv[1:]
    if what == "laminar":
        refuse([seccomp.BY_MACHINE[platform.machine()]["unshare"], landlock.CREATE_RULESET])
        sys.argv[1:] = arguments
        laminar()
    if what == "survey":
        refuse([int(number) for number in arguments])
        found = asyncio.run(survey())
    else:
        found = asyncio.run(hostile(SandboxTier(arguments[0]), arguments[1]))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
