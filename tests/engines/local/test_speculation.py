"""Speculation draws the tokens that single steps draw, whatever interrupts it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from laminar_py.engines.local.drafts import (
    LONGEST,
    MOST_FINISHED,
    TRIAL,
    TRIAL_EVERY,
    Choice,
    Drafter,
    Origin,
    StepTimes,
    Texts,
)
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import GenerateRequest, PauseMode
from laminar_py.records.pieces import Recording
from laminar_py.records.trajectory import FinishReason
from tests.depth import examples
from tests.engines.engine_conformance import make_request
from tests.engines.local.test_engine import save_model

PROMPTS = ([3, 4, 5], [9] * 40, list(range(20, 31)))


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choice, "next", lambda self: True)
    monkeypatch.setattr(StepTimes, "at", lambda self, queries: np.ones_like(queries))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def versions(request, tmp_path_factory) -> list[Path]:
    """Three versions of one model, so that texts of older weights suggest drafts."""
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / str(seed), request.param, seed=seed) for seed in range(3)]


@dataclass
class Run:
    """What a scheduler gave each request, and what happened to each at which length."""

    scheduler: Scheduler
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=dict)
    masks: dict[str, list[list[int]]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    experts: dict[str, bytes] = field(default_factory=dict)

    def take(self) -> None:
        for _, delta in self.scheduler.take_deltas():
            self.tokens.setdefault(delta.rid, []).extend(delta.ids.tolist())
            self.logprobs.setdefault(delta.rid, []).extend(delta.logprobs.tolist())
            self.versions.setdefault(delta.rid, []).extend([delta.version] * len(delta.ids))
            if (mask := delta.sampling_mask) is not None:
                rows = np.split(mask.ids, mask.counts.cumsum()[:-1]) if len(mask.counts) else []
                self.masks.setdefault(delta.rid, []).extend(row.tolist() for row in rows)
            if delta.finish_reason is not None:
                self.reasons[delta.rid] = delta.finish_reason
                if delta.routed_experts is not None:
                    self.experts[delta.rid] = delta.routed_experts.data

    def length(self, rid: str) -> int:
        return len(self.tokens.get(rid, ()))


def make_scheduler(folder: Path, *, drafts: bool, kv_capacity: int = 4096, masks: bool = False) -> Scheduler:
    spec = ModelSpec.read(folder)
    record = [Recording.SAMPLING_MASK] * masks + [Recording.ROUTED_EXPERTS] * (spec.mixture is not None)
    scheduler = Scheduler(
        spec,
        num_slots=4,
        max_len=256,
        kv_capacity=kv_capacity,
        stream_interval=1,
        record=tuple(record),
        drafts=drafts,
    )
    scheduler.load_weights(folder, 0)
    return scheduler


@dataclass(frozen=True)
class Change:
    """New weights, or an abort (`mode` None)."""

    mode: PauseMode | None
    version: int = 0

    def apply(self, run: Run, folders: list[Path], ticket: int) -> None:
        if self.mode is None:
            run.scheduler.abort(ticket)
        else:
            run.scheduler.pause(self.mode)
            run.scheduler.load_weights(folders[self.version], self.version)
            run.scheduler.resume()
        run.take()


@dataclass
class Begun:
    """A request under way: the version that it began under, and what happened at which of its lengths."""

    request: GenerateRequest
    version: int
    changes: list[tuple[int, Change]] = field(default_factory=list)


def alone(begun: Begun, folders: list[Path], *, masks: bool) -> Run:
    """A request by single steps, with each change at its length."""
    request, waiting = begun.request, list(begun.changes)
    run = Run(make_scheduler(folders[0], drafts=False, masks=masks))
    run.scheduler.load_weights(folders[begun.version], begun.version)
    run.scheduler.add_request(0, request)
    while waiting or run.scheduler.has_work:
        while waiting and waiting[0][0] <= run.length(request.rid):
            waiting.pop(0)[1].apply(run, folders, 0)
        run.scheduler.step()
        run.take()
    return run


def requests_of(draw: st.DrawFn) -> Iterator[GenerateRequest]:
    for number in range(draw(st.integers(2, 10))):
        prompt = draw(st.integers(0, len(PROMPTS) - 1))
        yield make_request(
            f"r{number}",
            group=f"g{prompt}",
            prompt=PROMPTS[prompt],
            length=draw(st.integers(1, 90)),
            temperature=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
            top_k=draw(st.sampled_from([0, 0, 3])),
            seed=draw(st.integers(0, 1)),
            stop_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=2))),
        )


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[GenerateRequest], dict[int, Change]]:
    """Requests, and what happens before which step."""
    kinds = st.sampled_from([None, PauseMode.RETRACT, PauseMode.IN_PLACE])
    at = sorted(draw(st.sets(st.integers(1, 40), max_size=3)))
    changes, version = {}, 0
    for step in at:
        mode = draw(kinds)
        version = min(2, version + (mode is not None))
        changes[step] = Change(mode, version)
    return list(requests_of(draw)), changes


@given(script=scripts(), tight=st.booleans(), masks=st.booleans())
@settings(max_examples=examples(8), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_speculation_changes_no_token(versions, script, tight, masks):
    requests, changes = script
    run = Run(make_scheduler(versions[0], drafts=True, kv_capacity=256 if tight else 4096, masks=masks))
    begun: list[Begun] = []
    due: list[Change] = []
    step = version = 0
    while len(begun) < len(requests) or run.scheduler.has_work:
        while (
            len(begun) < len(requests) and len(begun) - len(run.reasons) < 4
        ):  # some begin when others have ended
            run.scheduler.add_request(len(begun), requests[len(begun)])
            begun.append(Begun(requests[len(begun)], version))
        due += [changes[step]] if step in changes else []
        here = [(ticket, one) for ticket, one in enumerate(begun) if one.request.rid not in run.reasons]
        if due and all(run.length(one.request.rid) for _, one in here):  # all have begun under one version
            change = due.pop(0)
            for _, one in here if change.mode else here[:1]:
                one.changes.append((run.length(one.request.rid), change))
            version = change.version
            change.apply(run, versions, here[0][0])
        run.scheduler.step()
        run.take()
        step += 1
    for one in begun:
        found, rid = alone(one, versions, masks=masks), one.request.rid
        assert (run.tokens[rid], run.reasons[rid]) == (found.tokens[rid], found.reasons[rid])
        assert run.versions[rid] == found.versions[rid]
        rounding = 1e-5 / (one.request.sampling.temperature or 1.0)
        np.testing.assert_allclose(run.logprobs[rid], found.logprobs[rid], atol=rounding)
        assert run.masks.get(rid) == found.masks.get(rid)
        assert run.experts.get(rid) == found.experts.get(rid)


def test_a_repeated_response_takes_few_steps(versions):
    run = Run(make_scheduler(versions[0], drafts=True))
    steps = []
    for number in range(2):
        run.scheduler.add_request(number, make_request(f"r{number}", length=96, temperature=1.0, seed=7))
        steps.append(0)
        while run.scheduler.has_work:
            run.scheduler.step()
            steps[-1] += 1
        run.take()
    assert run.tokens["r0"] == run.tokens["r1"]
    assert steps[1] <= 96 / 16 + 2 < steps[0]
    counts = run.scheduler.status().drafts
    assert counts.accepted_earlier == counts.accepted >= 80
    assert counts.drafted <= 96


def test_texts_go_on_after_the_longest_run(versions):
    start = -1
    texts = Texts(np.array([start, 1, 2, 3, 4, start, 9, 2, 3, 5, start], np.int32), 5, {3: range(6, 10)})
    assert texts.find([start]) == (6, 1)
    assert texts.find([start, 1, 2, 3]) == (4, 4)
    assert texts.find([start, 7, 2, 3]) == (9, 2)
    assert texts.find([start, 7, 8, 3]) is None  # a run of one token says little
    assert texts.find([start, 2, 3, 4]) is None  # nothing follows
    assert [texts.origin(place, 3) for place in (2, 7)] == [Origin.EARLIER, Origin.OWN]
    assert texts.origin(7, 2) is Origin.SIBLING
    assert texts.find([start, *range(20), 2, 3]) == (9, 2)
    assert LONGEST >= 4


def test_old_responses_are_forgotten(versions, monkeypatch):
    monkeypatch.setattr("laminar_py.engines.local.drafts.MOST_TOKENS", 100)
    drafter = Drafter(make_scheduler(versions[0], drafts=True)._slots)
    job = make_scheduler(versions[0], drafts=False)._make_job
    for number in range(40):
        prompt = job(number, make_request(prompt=[number % 2]))
        drafter.finished(prompt, np.arange(3, dtype=np.int32))
        drafter.left(prompt)
    kept = {key: len(found) for key, found in drafter._finished.items()}
    assert set(kept.values()) == {MOST_FINISHED}
    drafter.finished(job(40, make_request(prompt=[5])), np.arange(90, dtype=np.int32))
    assert sum(len(one) for found in drafter._finished.values() for one in found) == 90
    assert not drafter._followed


def test_the_slower_way_is_tried_now_and_then(monkeypatch):
    monkeypatch.undo()
    choice, drafted = Choice(), []
    for _ in range(10 * (TRIAL_EVERY + TRIAL)):
        tries = choice.next()
        drafted.append(tries)
        (choice.drafts if tries else choice.plain).add(3, 2.0 if tries else 1.0)
    assert 0 < sum(drafted) / len(drafted) < 1.5 * TRIAL / TRIAL_EVERY
