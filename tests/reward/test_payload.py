"""Scorers read responses by reference and store the columns of their scores; what is lost costs itself alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import RewardConfig
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SEGMENT, SegmentWriter
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import TOKEN_REWARDS, Column, Dtype, token_values
from laminar_py.records.credit import earned_by
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.scoring import Score, ScoringRequest, Unscored
from laminar_py.records.trajectory import DropReason
from laminar_py.reward import scorer as scorer_module
from laminar_py.reward.scorer import Scorer, ScorerStorage
from tests.depth import examples
from tests.reward.requests import by_reference, make_request
from tests.reward.test_scorer import PATIENCE_S, SEGMENTS, column, scorer_of, scores_of, serve, with_ids

HINTS = Column(name="hints", dtype=Dtype.INT32)
GIVES_BOTH = (
    "from laminar_py.records.scoring import Reward\n"
    "def score(request):\n"
    "    values = [float(id) for id in request.response_ids]\n"
    "    return Reward(values, {'hints': range(len(values))})\n"
)


def payload(folder: Path) -> ScorerStorage:
    return ScorerStorage(PayloadReader(folder / SEGMENTS), SegmentWriter(folder / SEGMENTS, "scorer-0"))


def replica(folder: Path, part: str = "replica-0-1-0") -> SegmentWriter:
    return SegmentWriter(folder / SEGMENTS, part)


def response(text: str, *, index: int = 0) -> ScoringRequest:
    """A response with tokens that its text is made of."""
    return with_ids(make_request(text, index=index, num_tokens=len(text)))


def travelled(unscored: Unscored) -> Unscored:
    """As it arrives at a scorer."""
    return decode(Unscored, encode(unscored))


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39), max_size=4),
    seed=st.integers(0, 9),
)
def test_a_request_by_reference_has_the_tokens_and_logprobs_of_all_its_pieces(ids, cuts, seed, tmp_path):
    logprobs = -np.random.default_rng(seed).random(len(ids)).astype(np.float32)
    whole = make_request("", response_ids=np.array(ids, np.int32), logprobs=logprobs)
    unscored = by_reference(whole, replica(tmp_path), *sorted(cut for cut in cuts if cut < len(ids)))
    assert len(unscored.request.response_ids) == 0, "no token goes with it"
    found = payload(tmp_path).load_request(travelled(unscored))
    assert found.response_ids.tolist() == ids
    assert found.logprobs.tobytes() == logprobs.tobytes()
    bare = {"response_ids": unscored.request.response_ids, "logprobs": unscored.request.logprobs}
    assert encode(msgspec.structs.replace(found, **bare)) == encode(unscored.request), "nothing else differs"


def test_a_response_without_all_of_its_pieces_is_lost_and_never_scored_in_part(tmp_path):
    unscored = by_reference(response("abcdef"), replica(tmp_path), 2, 4)
    first, second, third = unscored.tokens
    for tokens in ((second, third), (first, third)):
        with pytest.raises(PayloadLostError, match="missing"):
            payload(tmp_path).load_request(msgspec.structs.replace(unscored, tokens=tokens))


async def test_the_reward_sees_the_text_of_tokens_that_were_read(tmp_path, monkeypatch):
    seen: list[ScoringRequest] = []

    async def look(request: ScoringRequest) -> float:
        seen.append(request)
        return 1.0

    serve(monkeypatch, look)
    unscored = by_reference(response("#7 it is"), replica(tmp_path), 3)
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        (found,) = await scores_of(scorer, travelled(unscored))
    assert (found.value, seen[0].response) == (1.0, "#7 it is")
    assert len(seen[0].logprobs) == len("#7 it is")


async def test_a_lost_piece_is_a_score_of_a_lost_host_and_costs_no_other(tmp_path):
    lost, kept = replica(tmp_path, "replica-0-1-0"), replica(tmp_path, "replica-1-1-1")
    requests = [response("#7", index=index) for index in range(9)]
    unscored = [
        by_reference(request, lost if index % 3 == 0 else kept, 1) for index, request in enumerate(requests)
    ]
    next((tmp_path / SEGMENTS).glob(f"replica-0*{SEGMENT}")).unlink()
    async with scorer_of(tmp_path, {"use": [{"kind": "exact", "pattern": "#(.)"}]}) as scorer:
        found = await scores_of(scorer, *unscored)
        (after,) = await scores_of(scorer, by_reference(response("#7", index=9), kept))
    for index, score in enumerate(found):
        if index % 3:
            assert (score.value, score.failure) == (1.0, None)
        else:
            assert (score.value, score.failure) == (None, DropReason.TOKENS_LOST)
            assert "replica-0-1-0" in score.detail
    assert after.value == 1.0


async def test_columns_are_in_a_segment_before_a_score_names_them(tmp_path):
    (tmp_path / "mine.py").write_text(GIVES_BOTH)
    writer = replica(tmp_path)
    unscored = [by_reference(response("\1\2\3"[: 1 + index % 3], index=index), writer) for index in range(12)]
    told = 0
    async with scorer_of(tmp_path, {"use": [f"{tmp_path}/mine.py:score"]}, columns=(HINTS,)) as scorer:
        scorer.submit_responses(unscored)
        async with asyncio.timeout(PATIENCE_S):
            while told < len(unscored):
                for score in await scorer.next_scores(1.0):
                    told += 1
                    length = 1 + int(score.trajectory_id[3:]) % 3
                    assert sorted(score.columns) == ["hints", TOKEN_REWARDS], score.detail
                    assert column(tmp_path, score, "hints").tolist() == list(range(length))
                    assert column(tmp_path, score, TOKEN_REWARDS).tolist() == [1.0, 2.0, 3.0][:length]
    labels = {path.name.split(".")[0] for path in (tmp_path / SEGMENTS).iterdir()}
    assert labels == {"replica-0-1-0", "scorer-0"}


async def test_process_rewards_are_told_in_short_with_their_score(tmp_path):
    (tmp_path / "mine.py").write_text(GIVES_BOTH)
    unscored = by_reference(response("\1\2\3\4"), replica(tmp_path))
    async with scorer_of(tmp_path, {"use": [f"{tmp_path}/mine.py:score"]}) as scorer:
        (found,) = await scores_of(scorer, unscored)
    rewards = token_values(np.array([1, 2, 3, 4], np.float32))
    assert (found.value, found.earned) == (10.0, earned_by({TOKEN_REWARDS: rewards}))
    assert decode(Score, encode(found)) == found


async def test_what_cannot_be_stored_is_told_by_nobody_and_ends_the_scorer(tmp_path):
    """Else a score would name a column that no trainer can read."""
    (tmp_path / "mine.py").write_text(GIVES_BOTH)
    unscored = Unscored(request=response("\1\2"))
    async with scorer_of(tmp_path, {"use": [f"{tmp_path}/mine.py:score"]}) as scorer:
        (tmp_path / SEGMENTS).write_text("a file where the folder was to be")
        with pytest.raises(OSError, match="exists"):
            await scores_of(scorer, unscored)


@asynccontextmanager
async def trial_scorer(folder: Path, reward: dict) -> AsyncIterator[Scorer]:
    """A scorer without payload, as for trials."""
    config = RewardConfig.model_validate_json(msgspec.json.encode({"timeout_s": 30} | reward))
    async with Scorer(
        config,
        sandbox=SandboxConfig(),
        columns=(HINTS,),
        decode=lambda ids: "".join(map(chr, ids)),
        folder=folder,
        name="scorer-0",
    ) as scorer:
        yield scorer


async def test_a_request_with_tokens_of_its_own_needs_no_segment(tmp_path):
    (tmp_path / "mine.py").write_text(GIVES_BOTH)
    unscored = Unscored(request=response("\1\2"))
    async with trial_scorer(tmp_path, {"use": [f"{tmp_path}/mine.py:score"]}) as scorer:
        (found,) = await scores_of(scorer, travelled(unscored))
    assert (found.value, found.columns, found.failure) == (3.0, {}, None)
    assert not (tmp_path / SEGMENTS).exists()


async def test_no_score_is_lost_that_comes_while_others_are_taken(tmp_path, monkeypatch):
    """Calls end one by one, each while `take` may be handing out those before it."""

    async def quick(request: ScoringRequest) -> float:
        await asyncio.sleep(0)
        return float(request.response)

    serve(monkeypatch, quick)
    monkeypatch.setattr(scorer_module, "CALLS_AT_ONCE", 1)
    monkeypatch.setattr("tests.reward.test_scorer.Many.concurrency", 1)
    writer, count = replica(tmp_path), 300
    unscored = [by_reference(response(str(index), index=index), writer) for index in range(count)]
    found: dict[str, float | None] = {}
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        assert scorer.concurrency == 1
        scorer.submit_responses(unscored)
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < count:
                for score in await scorer.next_scores(1.0):
                    assert score.trajectory_id not in found
                    found[score.trajectory_id] = score.value
        assert await scorer.next_scores(0.0) == []
    assert found == {f"g0.{index}": float(index) for index in range(count)}
