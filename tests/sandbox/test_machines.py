"""Machines that offer less than root has: without root, and with calls of the kernel refused."""

import json
import os
import platform

import pytest

from laminar_contrib.sandbox import places
from laminar_contrib.sandbox.inside.seccomp import BY_MACHINE
from laminar_contrib.sandbox.records import SandboxTier
from laminar_py.children.landlock import CREATE_RULESET
from tests.sandbox.conftest import SONG, left_since, metadata, traces
from tests.sandbox.hostile import HOSTILE
from tests.sandbox.machines import NOBODY, as_nobody, nobodys_interpreter, run_refusing
from tests.sandbox.machines import __file__ as script

MAY_START_NONE = {"ok": "ok processes", "processes": "processes time"}  # labels where no process may be started


@pytest.fixture(scope="module")
def known(offers):
    if platform.machine() not in BY_MACHINE or not offers[SandboxTier.LANDLOCK].offered:
        pytest.skip("the kernel's calls are not known, or too few are offered")


@pytest.mark.parametrize(
    ("refused", "taken", "why"),
    [
        (["unshare"], "landlock", "unshare: Operation not permitted"),
        (["mount"], "landlock", "Operation not permitted"),
        (["unshare", CREATE_RULESET], "none", "this kernel has no Landlock, or it is disabled at boot"),
    ],
)
def test_a_machine_that_refuses_calls_offers_less_and_says_why(known, refused, taken, why):
    before = traces()
    numbers = [call if isinstance(call, int) else BY_MACHINE[platform.machine()][call] for call in refused]
    found = run_refusing(numbers)
    stronger = [tier.value for tier in SandboxTier][: [tier.value for tier in SandboxTier].index(taken)]
    assert list(found["errors"]) == stronger
    for tier in stronger:
        assert not found[tier][0]
        assert found["errors"][tier].startswith(f"sandbox.require={tier}: cannot be had here")
        assert "\n" not in found["errors"][tier]
        assert "laminar doctor" in found["errors"][tier]
    assert why in found[stronger[-1]][1]
    assert left_since(before) == {}


@pytest.mark.slow
@pytest.mark.parametrize("tier", [SandboxTier.NAMESPACES, SandboxTier.LANDLOCK])
def test_without_root_hostile_programs_are_contained_and_labelled_too(tier, known, canary):
    if not places.may_change_user() or (found := nobodys_interpreter()) is None:
        pytest.skip("only root can become nobody, and no interpreter here is readable by others")
    python, paths = found
    os.chown(canary, NOBODY, NOBODY)
    before = metadata(canary)
    results = json.loads(as_nobody([python, script, "hostile", tier.value, str(canary)], paths))
    wrong = {}
    for hostile in HOSTILE:
        label, stdout, detail = results[hostile.name]
        allowed = hostile.labels + [more for one in hostile.labels for more in MAY_START_NONE.get(one, "").split()]
        if label not in allowed or hostile.prints not in (None, stdout):
            wrong[hostile.name] = (label, stdout, detail)
    assert not wrong
    assert metadata(canary) == before
    assert canary.read_text() == SONG
    assert list(canary.parent.iterdir()) == [canary]
