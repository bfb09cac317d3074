"""Alarms on parts that run beside the learner."""

from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.records.columns import Source
from laminar_py.runtime.orchestrator.alarms import Alarms
from tests.runs.runs import REPO, quickstart_model
from tests.workers.fakes import make_incarnation


@pytest.mark.parametrize("source", [Source.REFERENCE, Source.TEACHER])
def test_a_frozen_model_that_changes_is_named_and_ends_the_run(source):
    config = load_config(REPO / "configs/quickstart.yaml", [f"model.path={quickstart_model()}"])
    events, ends = [], []
    incarnation = make_incarnation(
        config=config,
        inputs=SimpleNamespace(sets={}),
        ledger=SimpleNamespace(append=events.append, observe=None),
    )
    alarms = Alarms(incarnation, None, stop=ends.append, show_line=lambda line: None)
    alarms.start()
    alarms.referred(Source.REFERENCE, "one")
    alarms.referred(Source.TEACHER, "two")
    alarms.referred(source, "one" if source is Source.REFERENCE else "two")
    assert not events
    alarms.referred(source, "three")
    (event,), (line,) = events, ends
    assert event.check == "reference"
    assert f"the {source} model changed" in line
