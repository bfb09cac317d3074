"""Alarms on parts that run beside the learner."""

import math
from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.records.columns import Source
from laminar_py.records.events import Alarmed, FrozenLoaded
from laminar_py.runtime.orchestrator.alarms import Alarms
from tests.runs.runs import REPO, quickstart_model
from tests.workers.fakes import make_incarnation


def make_alarms(*settings, recovered=None):
    """Alarms of the quickstart, the events that they record, and the lines that end the run."""
    config = load_config(REPO / "configs/quickstart.yaml", [f"model.path={quickstart_model()}", *settings])
    events, ends = [], []
    incarnation = make_incarnation(
        config=config,
        overrides=(),
        inputs=SimpleNamespace(sets={}),
        ledger=SimpleNamespace(append=events.append, observe=None),
    )
    alarms = Alarms(incarnation, recovered, stop=ends.append, show_line=lambda line: None)
    alarms.start()
    return alarms, events, ends


@pytest.mark.parametrize("source", [Source.REFERENCE, Source.TEACHER])
def test_a_frozen_model_that_changes_is_named_and_ends_the_run(source):
    alarms, events, ends = make_alarms()
    alarms.referred(Source.REFERENCE, "one")
    alarms.referred(Source.TEACHER, "two")
    alarms.referred(source, "one" if source is Source.REFERENCE else "two")
    assert events == [FrozenLoaded("reference", "", "one"), FrozenLoaded("teacher", "", "two")]
    alarms.referred(source, "three")
    (event,), (line,) = events[2:], ends
    assert event.check == "reference"
    assert f"the {source} model changed" in line


@pytest.mark.parametrize(("teacher", "is_named"), [("old", True), ("new", False)])
def test_a_teacher_that_changed_between_two_starts_is_named_unless_the_config_names_another(teacher, is_named):
    recovered = SimpleNamespace(
        frozen=(FrozenLoaded("teacher", "old", "one"),),
        live=(),
        rewards=(math.inf, -math.inf),
        unquantized=False,
        overrides=(),
    )
    settings = ("algorithm.name=distill", f"algorithm.teacher={teacher}")
    alarms, events, ends = make_alarms(*settings, recovered=recovered)
    alarms.referred(Source.TEACHER, "two")
    assert len(ends) == is_named
    assert [type(event) for event in events] == [Alarmed if is_named else FrozenLoaded]
