"""Another user: hostile programs are contained without root, too."""

import json
import os

import pytest

from laminar_py.children import landlock
from tests.sandbox.conftest import SONG, metadata
from tests.sandbox.hostile import HOSTILE
from tests.sandbox.machines import NOBODY, as_nobody, nobodys_interpreter
from tests.sandbox.machines import __file__ as script


@pytest.mark.slow
def test_without_root_hostile_programs_are_contained_and_labelled_too(canary):
    if not landlock.version() or os.geteuid() or (found := nobodys_interpreter()) is None:
        pytest.skip("only root can become nobody, and no interpreter here is readable by others")
    python, paths = found
    os.chown(canary, NOBODY, NOBODY)
    before = metadata(canary)
    results = json.loads(as_nobody([python, script, "hostile", str(canary)], paths))
    wrong = {
        hostile.name: results[hostile.name]
        for hostile in HOSTILE
        if results[hostile.name][0] not in hostile.labels or hostile.prints not in (None, results[hostile.name][1])
    }
    assert not wrong
    assert metadata(canary) == before
    assert canary.read_text() == SONG
    assert list(canary.parent.iterdir()) == [canary]
