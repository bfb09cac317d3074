"""Other machines: hostile programs are contained without root and under the oldest Landlock, too."""

import asyncio
import json
import os

import pytest

from laminar_contrib.sandbox import slot
from laminar_py.children import landlock
from tests.sandbox.conftest import SONG, metadata
from tests.sandbox.hostile import HOSTILE
from tests.sandbox.machines import NOBODY, as_nobody, hostile, nobodys_interpreter
from tests.sandbox.machines import __file__ as script

LANDLOCK_1 = "from laminar_py.children import landlock; landlock.version = lambda: 1\n"


def contained(results, canary):
    """Assert that no hostile program got another label than it may, and that the canary is as it was."""
    wrong = {
        one.name: results[one.name]
        for one in HOSTILE
        if results[one.name][0] not in one.labels or one.prints not in (None, results[one.name][1])
    }
    assert not wrong
    assert canary.read_text() == SONG
    assert list(canary.parent.iterdir()) == [canary]


@pytest.mark.slow
def test_under_the_oldest_landlock_hostile_programs_are_contained_and_labelled_too(canary, monkeypatch):
    if not landlock.version():
        pytest.skip("the kernel has no Landlock")
    old = [part.replace("main()", f"{LANDLOCK_1}main()") if part == slot.START else part for part in slot.ZYGOTE]
    monkeypatch.setattr(slot, "ZYGOTE", tuple(old))
    before = metadata(canary)
    results = asyncio.run(hostile(str(canary)))
    contained(results, canary)
    assert metadata(canary) == before


@pytest.mark.slow
def test_without_root_hostile_programs_are_contained_and_labelled_too(canary):
    if not landlock.version() or os.geteuid() or (found := nobodys_interpreter()) is None:
        pytest.skip("only root can become nobody, and no interpreter here is readable by others")
    python, paths = found
    os.chown(canary, NOBODY, NOBODY)
    before = metadata(canary)
    results = json.loads(as_nobody([python, script, "hostile", str(canary)], paths))
    contained(results, canary)
    assert metadata(canary) == before
