"""References to earlier responses of a prompt go to replicas that may draft from them."""

from types import SimpleNamespace

import msgspec
import pytest

from laminar_py.config.loading import load_config
from laminar_py.control import earlier
from laminar_py.control.earlier import MOST_SENT, EarlierResponses
from laminar_py.control.settings import control_settings
from tests.builders import make_prompt
from tests.control.fleet import Fleet, make_tokens
from tests.report.scripted import CONFIG


@pytest.mark.parametrize("sends_earlier", [True, False])
async def test_one_member_of_a_group_brings_what_other_replicas_answered_to_its_prompt(sends_earlier):
    fleet = Fleet(replicas=2, sends_earlier=sends_earlier)
    dispatcher = fleet.scheduler.dispatcher
    dispatcher._prompt_at = lambda place: msgspec.structs.replace(make_prompt(place), id="p0")
    dispatcher._on_issued = lambda group, prompt: None
    await fleet.report(0, admissible=4)
    for name in list(fleet.running[0]):
        await fleet.finish(0, name, admissible=0)
    await fleet.report(1, admissible=4)
    await fleet.report(0, admissible=4)
    assert list(fleet.running[1]) == [f"g1.{index}" for index in range(4)]
    first, *others = fleet.running[1].values()
    assert [one.trajectory_id for one in first.earlier] == [f"g0.{index}" for index in range(4 * sends_earlier)]
    assert all(one.tokens == (make_tokens(0, 3),) and one.version == 0 for one in first.earlier)
    assert not any(item.earlier for item in [*others, *fleet.running[0].values()])


def test_the_newest_of_a_prompt_are_kept_and_the_prompts_that_finished_last(monkeypatch):
    monkeypatch.setattr(earlier, "MOST_KEPT", 2 * MOST_SENT + 1)
    kept = EarlierResponses()
    for number in range(4 * MOST_SENT):
        prompt = SimpleNamespace(id=f"p{number % 2}")
        kept.add(SimpleNamespace(id=f"r{number}", prompt=prompt, last_version=3, tokens=(), replica=0))
    ids = [[one.trajectory_id for one in kept.for_replica(1, f"p{place}")] for place in range(2)]
    assert ids == [[f"r{number}" for number in range(2 * MOST_SENT + place, 4 * MOST_SENT, 2)] for place in (0, 1)]
    for number in range(2):
        prompt = SimpleNamespace(id="new")
        kept.add(SimpleNamespace(id=f"n{number}", prompt=prompt, last_version=3, tokens=(), replica=0))
    assert [len(kept.for_replica(1, name)) for name in ("p0", "p1", "new")] == [0, MOST_SENT, 2]


def test_a_replica_that_starts_again_gets_what_it_finished_before():
    kept = EarlierResponses()
    for replica in range(2):
        prompt = SimpleNamespace(id="p0")
        kept.add(SimpleNamespace(id=f"r{replica}", prompt=prompt, last_version=3, tokens=(), replica=replica))
    assert [one.trajectory_id for one in kept.for_replica(0, "p0")] == ["r1"]
    kept.lost(0)
    assert [one.trajectory_id for one in kept.for_replica(0, "p0")] == ["r0", "r1"]


@pytest.mark.parametrize(("setting", "sends"), [("none", False), ("ngram", True)])
def test_references_are_sent_where_engines_draft(setting, sends):
    config = load_config(CONFIG, [f"rollout.engine.speculation={setting}"])
    assert control_settings(config, stop_ids=()).sends_earlier is sends
