"""A scorer: terms of a task added up, retried where that helps, computed once where equal. Real processes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from laminar_py.config import reward as reward_config
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import RewardConfig, RewardKind, TermConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.columns import TOKEN_REWARDS, Array, Column
from laminar_py.records.credit import RoleCredit
from laminar_py.records.scoring import (
    NoValueError,
    Reward,
    Score,
    ScoringRequest,
    TryAgainError,
    Unscored,
)
from laminar_py.records.trajectory import DropReason
from laminar_py.reward import scorer as scorer_module
from laminar_py.reward.scorer import SAMPLE_CHARS, Scorer, ScorerStorage
from tests.reward.requests import make_request

PATIENCE_S = 60.0
SEGMENTS = "segments"


class Served(TermConfig):
    kind: str = "served"


@asynccontextmanager
async def scorer_of(
    folder: Path, reward: dict[str, object], *, columns: tuple[Column, ...] = (), sandbox: dict | None = None
) -> AsyncIterator[Scorer]:
    config = RewardConfig.model_validate_json(msgspec.json.encode({"timeout_s": 30} | reward))
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    reader = PayloadReader(folder / SEGMENTS)
    async with Scorer(
        config,
        sandbox=SandboxConfig(**(sandbox or {})),
        columns=columns,
        decode=decode,
        folder=folder,
        name="scorer-0",
        payload=ScorerStorage(reader, SegmentWriter(folder / SEGMENTS, "scorer-0")),
    ) as scorer:
        yield scorer
    reader.close()


def column(folder: Path, score: Score, name: str) -> Array:
    """A column of a score of `scorer_of` that folder, as it lies there."""
    ref = score.columns[name]
    piece = PayloadReader(folder / SEGMENTS).load([ref.at]).column(ref)
    assert (piece.trajectory_id, piece.name, piece.values.dtype) == (score.trajectory_id, name, ref.dtype)
    return piece.values.array


def with_ids(request: ScoringRequest) -> ScoringRequest:
    """The request with the ids that its text is made of."""
    return msgspec.structs.replace(request, response_ids=np.array([*map(ord, request.response)], np.int32))


async def score(scorer: Scorer, *requests: ScoringRequest) -> list[Score]:
    """Scores in the order of the requests, which have tokens of their own."""
    return await scores_of(scorer, *(Unscored(request=with_ids(request)) for request in requests))


async def scores_of(scorer: Scorer, *requests: Unscored) -> list[Score]:
    """Scores in the order of the requests."""
    scorer.submit_responses(requests)
    scores: dict[str, Score] = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(scores) < len(requests):
            scores |= {score.trajectory_id: score for score in await scorer.next_scores(1.0)}
    return [scores[request.id] for request in requests]


class Many:
    """A served function that takes many at once."""

    concurrency = 256

    def __init__(self, function: Callable) -> None:
        self._function = function

    async def __call__(self, request: ScoringRequest) -> object:
        return await self._function(request)


def serve(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable,
    *,
    caches: bool = False,
) -> None:
    """Have the kind `served` be that function, in the scorer itself."""

    @asynccontextmanager
    async def opened(term, context):
        yield Many(function)

    kind = RewardKind(settings=Served, serve=opened, caches=caches)
    get = reward_config.REWARDS.get
    monkeypatch.setattr(reward_config.REWARDS, "get", lambda name: kind if name == "served" else get(name))


async def test_a_term_that_takes_one_at_a_time_does_not_hold_back_those_that_take_many(tmp_path, monkeypatch):
    async def wide(request):
        await asyncio.sleep(0.2)
        return 1.0

    serve(monkeypatch, wide)
    (tmp_path / "mine.py").write_text("import time\ndef score(request): time.sleep(0.1); return 1.0")
    async with scorer_of(tmp_path, {"use": ["served", f"{tmp_path}/mine.py:score"]}) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert scorer.concurrency == 256
    assert 1.0 <= found.at_once < 8.0  # what the narrow one lets through in the time of both


async def test_terms_are_weighted_added_up_and_told_one_by_one(tmp_path):
    (tmp_path / "mine.py").write_text("def score(request): return {'a': 1, 'b': len(request.response)}")
    exact = {"kind": "exact", "pattern": "#(.)$", "weight": 2}
    short = {"kind": "length", "most": 4, "weight": 0.5}
    async with scorer_of(tmp_path, {"use": [exact, short, f"{tmp_path}/mine.py:score"]}) as scorer:
        (found,) = await score(scorer, make_request("#7"))
    assert [(term.name, term.value) for term in found.terms] == [
        ("exact", 1),
        ("length", -0.5),
        ("a", 1),
        ("b", 2),
    ]
    assert found.value == 2 * 1 - 0.5 * 0.5 + 1 + 2


async def test_only_a_score_that_should_bring_a_sample_has_the_end_of_its_response(tmp_path):
    requests = [make_request("so " * 500 + f"#{place}", index=place) for place in (0, 1)]
    async with scorer_of(tmp_path, {"use": [{"kind": "exact", "pattern": "#(.)$"}]}) as scorer:
        given = (Unscored(request=with_ids(one), wants_sample=place == 1) for place, one in enumerate(requests))
        hidden, shown = await scores_of(scorer, *given)
    assert hidden.sample == ""
    assert shown.sample.endswith("so so #1")
    assert len(shown.sample) == SAMPLE_CHARS


async def test_other_terms_are_added_to_the_reward_of_each_role(tmp_path):
    roles = tuple(RoleCredit(role=name, reward=reward, turns=(1,)) for name, reward in (("a", 1.0), ("b", 0.0)))
    use = [{"kind": "environment", "weight": 2}, {"kind": "format", "pattern": "x", "weight": 0.5}]
    async with scorer_of(tmp_path, {"use": use}) as scorer:
        (found,) = await score(scorer, make_request("x", roles=roles, environment_reward=1.0))
    assert [(one.role, one.reward) for one in found.roles] == [("a", 2.5), ("b", 0.5)]
    assert [(term.name, term.value) for term in found.terms] == [("a", 1), ("b", 0), ("format", 1)]


async def test_roles_and_tokens_cannot_both_have_rewards(tmp_path):
    (tmp_path / "mine.py").write_text("def score(request): return [1.0]")
    roles = (RoleCredit(role="a", reward=1.0, turns=(1,)),)
    use = [{"kind": "environment"}, f"{tmp_path}/mine.py:score"]
    async with scorer_of(tmp_path, {"use": use}) as scorer:
        (found,) = await score(scorer, make_request("x", roles=roles, environment_reward=1.0))
    assert found.failure is DropReason.REWARD_FAILED
    assert "roles have their own rewards" in found.detail


async def test_each_task_has_its_own_terms(tmp_path):
    reward = {"use": [{"kind": "format", "pattern": "a"}], "by_task": {"b": [{"kind": "format", "pattern": "b"}]}}
    async with scorer_of(tmp_path, reward) as scorer:
        found = await score(scorer, *(make_request("b", index=i, task=task) for i, task in enumerate("ab")))
    assert [each.value for each in found] == [0.0, 1.0]


async def test_a_number_for_the_response_is_added_at_the_last_of_process_rewards(tmp_path):
    (tmp_path / "mine.py").write_text("def score(request): return [1.0] * len(request.response_ids)")
    use = [{"kind": "format", "pattern": "x", "weight": 4}, f"{tmp_path}/mine.py:score"]
    async with scorer_of(tmp_path, {"use": use}) as scorer:
        (found,) = await score(scorer, make_request("xy"))
    assert (found.value, column(tmp_path, found, TOKEN_REWARDS).tolist()) == (6.0, [1.0, 5.0])


async def test_a_column_that_no_term_gives_is_a_failed_reward_that_names_it(tmp_path):
    async with scorer_of(
        tmp_path, {"use": [{"kind": "format", "pattern": "x"}]}, columns=(Column(name="hints"),)
    ) as s:
        (found,) = await score(s, make_request("x"))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert "gave no column 'hints', which the algorithm needs" in found.detail


async def test_the_failure_of_one_of_several_terms_names_it(tmp_path):
    (tmp_path / "mine.py").write_text("def score(request): raise KeyError(4)")
    async with scorer_of(
        tmp_path, {"use": [{"kind": "format", "pattern": "x"}, f"{tmp_path}/mine.py:score"]}
    ) as s:
        (found,) = await score(s, make_request("x"))
    assert found.failure is DropReason.REWARD_FAILED
    assert found.detail == f"{tmp_path}/mine.py:score: KeyError: 4 (at {tmp_path}/mine.py:1)"


async def test_what_may_succeed_later_is_tried_again_and_given_up_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "PAUSE_S", 0.001)
    monkeypatch.setattr(scorer_module, "RETRY_FOR_S", 0.5)
    calls = Counter[str]()

    async def busy(request: ScoringRequest) -> float:
        calls[request.response] += 1
        if request.response == "never" or calls[request.response] < 3:
            raise TryAgainError("503")
        return 1.0

    serve(monkeypatch, busy)
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        later, never = await score(scorer, make_request("later"), make_request("never", index=1))
    assert (later.value, never.value, never.failure, never.detail) == (1.0, None, DropReason.REWARD_FAILED, "503")
    assert calls["later"] == 3
    assert calls["never"] > 3


async def test_a_verdict_on_one_problem_is_none_on_another_with_the_same_answer(tmp_path, monkeypatch):
    async def ask(request: ScoringRequest) -> float:
        return float(request.prompt == "p")

    serve(monkeypatch, ask, caches=True)
    other = msgspec.structs.replace(make_request("a", index=1), prompt="another")
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        first, second = await score(scorer, msgspec.structs.replace(make_request("a"), prompt="p"), other)
    assert (first.value, second.value) == (1.0, 0.0)


async def test_a_served_call_has_the_limit_of_its_term(tmp_path, monkeypatch):
    async def wait(request: ScoringRequest) -> float:
        await asyncio.Event().wait()
        return 1.0

    monkeypatch.setattr(scorer_module, "OWN_LIMITS_S", 0.0)
    serve(monkeypatch, wait)
    async with scorer_of(tmp_path, {"use": [{"kind": "served", "timeout_s": 0.1}], "timeout_s": 900}) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert found.failure is DropReason.REWARD_TIMEOUT


async def test_terms_are_asked_at_the_same_time(tmp_path, monkeypatch):
    both = asyncio.Barrier(2)

    async def meet(request: ScoringRequest) -> float:
        await both.wait()
        return 1.0

    serve(monkeypatch, meet)
    use = [{"kind": "served", "name": "one"}, {"kind": "served", "name": "two"}]
    async with scorer_of(tmp_path, {"use": use}) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert found.value == 2.0


async def test_a_variable_that_is_not_set_is_told_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.env=NO_SUCH: not set where scorer-0 runs"):
        async with scorer_of(tmp_path, {"use": [{"kind": "exact", "pattern": "(.)"}], "env": ["NO_SUCH"]}):
            pass


async def test_numbers_of_the_same_name_have_that_of_their_term_and_no_number_is_a_failure(tmp_path):
    (tmp_path / "mine.py").write_text("def one(request): return {'n': 1}\ndef two(request): return {'n': 2}")
    (tmp_path / "none.py").write_text("def score(request): return {}")
    use = [{"kind": "function", "path": f"{tmp_path}/mine.py:{name}", "name": name} for name in ("one", "two")]
    async with scorer_of(tmp_path, {"use": use}) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert {term.name: term.value for term in found.terms} == {"one.n": 1.0, "two.n": 2.0}
    async with scorer_of(tmp_path, {"use": [f"{tmp_path}/none.py:score"]}) as scorer:
        (found,) = await score(scorer, make_request("a"))
    assert "no named number" in found.detail


async def test_a_slow_response_holds_none_of_the_others_up(tmp_path, monkeypatch):
    end = asyncio.Event()

    async def slow(request: ScoringRequest) -> float:
        if request.response == "slow":
            await end.wait()
        return 1.0

    serve(monkeypatch, slow)
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        scorer.submit_responses([Unscored(request=with_ids(make_request("slow", index=300)))])
        await score(scorer, *(make_request("x", index=index) for index in range(200)))
        assert await scorer.next_scores(0.0) == []
        end.set()
        assert [found.trajectory_id for found in await scorer.next_scores(PATIENCE_S)] == ["g0.300"]


async def test_equal_responses_are_verified_once_also_at_the_same_time_and_failures_again(tmp_path, monkeypatch):
    calls = Counter[str]()

    async def verify(request: ScoringRequest) -> Reward:
        calls[f"{request.response} to {request.answer}"] += 1
        if request.response == "bad":
            raise NoValueError("its server is gone", DropReason.REWARD_TIMEOUT)
        return Reward(1.0, text="right")

    serve(monkeypatch, verify, caches=True)
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        same = [make_request("x", index=index) for index in range(3)]
        found = await score(scorer, *same, make_request("x", index=3, answer="8"), make_request("bad", index=4))
        (again,) = await score(scorer, make_request("bad", index=5))
    assert calls == {"x to 7": 1, "x to 8": 1, "bad to 7": 2}
    assert [(each.value, each.terms[0].text) for each in found[:4]] == [(1.0, "right")] * 4
    assert (again.failure, again.detail) == (DropReason.REWARD_TIMEOUT, "its server is gone")


async def test_a_mistake_in_what_the_scorer_serves_is_ours_and_ends_it(tmp_path, monkeypatch):
    async def broken(request: ScoringRequest) -> float:
        raise TypeError("ours")

    serve(monkeypatch, broken)
    async with scorer_of(tmp_path, {"use": ["served"]}) as scorer:
        with pytest.raises(TypeError, match="ours"):
            await score(scorer, make_request("x"))


async def test_a_request_has_the_problem_with_all_its_fields(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(request):\n"
        "    assert request.prompt_ids.tolist() == [3] and request.logprobs.tolist() == [0.0], request\n"
        "    return request.fields['level'] + len(request.fields['tests'])\n"
    )
    async with scorer_of(tmp_path, {"use": [f"{tmp_path}/mine.py:score"]}) as scorer:
        (found,) = await score(scorer, make_request("x", fields_json=b'{"level": 3, "tests": [1, 2]}'))
    assert found.value == 5.0, found.detail
