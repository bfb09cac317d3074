"""A replica's engine drafts from responses that another replica has finished."""

import msgspec
import numpy as np
import pytest

from laminar_py.engines.local.draft_choice import DraftChoice, StepTimes
from laminar_py.records.pieces import TokensRef
from laminar_py.records.replica import EarlierResponse
from tests.builders import make_ref
from tests.rollout.test_replica import assignment, folders, serving  # noqa: F401 (`folders` is a fixture)


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_replica_drafts_from_responses_of_another_one_and_does_without_lost_ones(
    folders,  # noqa: F811
    monkeypatch,
    is_read,
):
    monkeypatch.setattr(DraftChoice, "advance", lambda self: True)
    monkeypatch.setattr(StepTimes, "at", lambda self, tokens: np.ones(len(tokens)))
    item = assignment("a", length=60)
    async with serving(folders) as (other, _):
        await other.until(lambda s: s.admissible > 0)
        other.replica.start_assignments([item])
        await other.until(lambda s: "a" in s.ended)
    earlier = (
        EarlierResponse("gone", 0, (TokensRef(0, 3, make_ref("replica-9.gone")),)),
        EarlierResponse("a", 0, other.tokens["a"]),
    )
    again = msgspec.structs.replace(item, trajectory_id="b", earlier=earlier)  # with the seed of the other
    async with serving(folders, drafts=True, is_read=is_read) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([again])
        await story.until(lambda s: "b" in s.ended)
        assert story.ids["b"] == other.ids["a"]
        assert not story.missing
        assert story.replica._engine.status().drafts.accepted_earlier > 40
