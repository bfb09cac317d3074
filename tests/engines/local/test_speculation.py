"""Speculation draws the tokens that single steps draw, whatever interrupts it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from laminar_py.engines.local.corpus import characters
from laminar_py.engines.local.draft_choice import FASTER, TRIAL, TRIAL_SHARE, DraftChoice, StepTimes
from laminar_py.engines.local.drafts import Texts
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import DraftCounts, GenerateRequest, PauseMode
from laminar_py.records.pieces import Recording
from laminar_py.records.trajectory import FinishReason
from tests.depth import examples
from tests.engines.engine_conformance import LAWS, make_request
from tests.engines.local.test_engine import factory, save_model
from tests.engines.recording_conformance import RECORDING_LAWS

PROMPTS = ([3, 4, 5], [9] * 40, list(range(20, 31)))


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftChoice, "advance", lambda self: True)
    monkeypatch.setattr(StepTimes, "at", lambda self, tokens: np.ones(len(tokens)))


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


def make_scheduler(
    folder: Path, *, drafts: bool, kv_capacity: int = 4096, masks: bool = False, **options: Callable[[], float]
) -> Scheduler:
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
        **options,
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
            temperature=draw(st.sampled_from([0.0, 0.3, 1.0])),
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
    if tight:  # a full cache computes a request's older KV again, by the newest weights: another policy
        changes |= {step: replace(one, mode=PauseMode.RETRACT) for step, one in changes.items() if one.mode}
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


@pytest.mark.parametrize("law", [*LAWS, *RECORDING_LAWS], ids=lambda law: law.__name__)
async def test_an_engine_that_drafts_keeps_the_law(law, versions):
    is_mixture = ModelSpec.read(versions[0]).mixture is not None
    if law in RECORDING_LAWS and not is_mixture:
        pytest.skip("no experts to record")
    record = (Recording.ROUTED_EXPERTS,) if law in RECORDING_LAWS else ()
    await law(factory(tuple(versions[:2]), drafts=True, record=record))


@pytest.mark.parametrize("seed", range(3))
def test_turns_are_the_same_with_drafts(versions, seed):
    stop_ids = tuple(range(0, 123, 4))

    def turns(drafts: bool) -> dict[str, list[int]]:
        run, contexts = Run(make_scheduler(versions[0], drafts=drafts)), {"a": [], "b": [], "c": []}
        for turn in range(6):
            for number, (rid, ids) in enumerate(contexts.items()):
                request = make_request(
                    rid, group="g", prefix=ids, length=200, temperature=0.2, seed=seed, stop_ids=stop_ids
                )
                run.scheduler.add_request(3 * turn + number, msgspec.structs.replace(request, has_turns=True))
                while run.scheduler.has_work:
                    run.scheduler.step()
                    run.take()
            contexts = {rid: [*ids, *run.tokens.pop(rid), 7, 8, 9] for rid, ids in contexts.items()}
        assert (run.scheduler.status().drafts.accepted > 0) == drafts
        return contexts

    assert turns(drafts=True) == turns(drafts=False)


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


def test_a_text_is_found_by_the_longest_run_that_ends_a_response():
    start, other = "\U0010ffff", object()
    texts = Texts(f"{start}abcd{start}ibcef{start}", 5, {other: range(6, 11)})
    assert texts.find(start) == (6, 1)
    assert texts.find(f"{start}abc") == (4, 4)
    assert texts.find(f"{start}gbc") == (9, 2)
    assert texts.find(f"{start}ghc") is None  # a run of one token says little
    assert texts.find(f"{start}bcd") is None  # nothing follows
    assert texts.rest(9, stops=()) == "ef"
    assert texts.rest(1, stops=("c",)) == "abc"
    assert texts.rest(1, stops=("e", "d", "c")) == "abc"


def test_each_token_is_a_character():
    ids = np.array([0, 0x7F, 0xD800, 0xDFFF, 0xFFFF, 0x10FFFE], np.int32)
    assert [ord(token) for token in characters(ids)] == ids.tolist()


def choose(choice: DraftChoice, drafts_s: float, *, steps: int) -> int:
    """Number of steps that draft, if a step takes so long with drafts and a second without."""
    drafted = 0
    for _ in range(steps):
        tries = choice.advance()
        choice.add(1, drafts_s if tries else 1.0)
        drafted += tries
    return drafted


@pytest.mark.parametrize("drafts_s", [0.2, 0.5, 0.9, 1.1, 2.0, 5.0])
def test_trials_of_the_slower_way_go_on_and_cost_a_small_part_of_the_time(monkeypatch, drafts_s):
    monkeypatch.undo()
    drafted = choose(choice := DraftChoice(), drafts_s, steps=60_000)
    slower, faster_s, slower_s = drafted, 1.0, drafts_s
    if drafts_s < 1:
        slower, faster_s, slower_s = 60_000 - drafted, drafts_s, 1.0
    assert choice.speedup == pytest.approx(1 / drafts_s)
    assert choice.trials >= 8
    assert TRIAL * (choice.trials - 1) <= slower <= TRIAL * (choice.trials + 2)
    assert slower * (slower_s - faster_s) < 1.5 * TRIAL_SHARE * 60_000 * faster_s


@pytest.mark.parametrize(("before_s", "after_s"), [(0.5, 4.0), (2.0, 0.3), (5.0, 0.5), (0.9, 1.3)])
def test_a_change_of_the_faster_way_is_noticed(monkeypatch, before_s, after_s):
    monkeypatch.undo()
    choice = DraftChoice()
    choose(choice, before_s, steps=20_000)
    choose(choice, after_s, steps=2 * (choice.wait + TRIAL) + FASTER)
    drafted = choose(choice, after_s, steps=FASTER)
    assert min(drafted, FASTER - drafted) <= TRIAL
    assert choice.drafts is (after_s < 1) is (drafted > FASTER / 2)


def test_one_trial_that_misleads_costs_a_few_steps(monkeypatch):
    monkeypatch.undo()
    choice = DraftChoice()
    choose(choice, 1.5, steps=5_000)
    before = choice.trials
    while choice.trials == before:
        choose(choice, 0.6, steps=1)
    assert choose(choice, 1.5, steps=4 * FASTER) <= 3 * TRIAL
    assert not choice.drafts


def test_responses_with_earlier_ones_and_responses_without_are_told_apart(versions, monkeypatch):
    monkeypatch.undo()
    clock = iter(range(10**9))
    scheduler = make_scheduler(versions[0], drafts=True, thread_s=lambda: float(next(clock)))
    run = Run(scheduler)
    for number in range(8):
        scheduler.add_request(number, make_request(f"r{number}", length=30, temperature=1.0, seed=number))
        while scheduler.has_work:
            scheduler.step()
        run.take()
    choices = scheduler._drafter._choices
    assert choices[1, True].used > 2 * choices[1, False].used > 0
    assert choices[1, True].trials > 0
    assert set(scheduler.status().speedups) == {1}


def test_an_engine_whose_steps_all_take_as_long_drafts_most_tokens(versions, monkeypatch):
    monkeypatch.undo()
    clock = iter(range(10**9))
    scheduler = make_scheduler(versions[0], drafts=True, thread_s=lambda: float(next(clock)))
    run, started = Run(scheduler), 0
    for _ in range(600):  # every step takes a second, so drafts of any length pay
        while len(run.reasons) > started - 4:
            scheduler.add_request(started, make_request(f"r{started}", length=60, temperature=1.0, seed=7))
            started += 1
        scheduler.step()
        run.take()
    counts = scheduler.status().drafts
    assert counts.accepted > 0.8 * sum(map(len, run.tokens.values())) > 600


@pytest.mark.parametrize(("near", "temperature", "share"), [(2.0, 1.0, 1.0), (2.0, 0.0, 0.0), (0.0, 1.0, 0.0)])
def test_verified_tokens_near_a_boundary_are_counted(versions, monkeypatch, near, temperature, share):
    monkeypatch.setattr("laminar_py.engines.local.sampling.NEAR", near)
    run = Run(make_scheduler(versions[0], drafts=True))
    for number in range(3):
        run.scheduler.add_request(number, make_request(f"r{number}", length=90, temperature=temperature, seed=7))
        while run.scheduler.has_work:
            run.scheduler.step()
        run.take()
    counts = run.scheduler.status().drafts
    assert counts.accepted_per_pass > 1
    assert counts.accepted < counts.verified < 3 * 90
    assert counts.near == share * counts.verified


def test_a_restarted_engine_counts_from_zero():
    before = DraftCounts(drafted_own=9, accepted_own=3, drafted_earlier=4)
    after = DraftCounts(drafted_own=9, accepted_own=5, drafted_earlier=20)
    assert after.since(before) == DraftCounts(accepted_own=2, drafted_earlier=16)
    other = DraftCounts(drafted_own=1, drafted_earlier=100)
    assert other.since(before) == other
    assert before.plus(other).drafted == 114
