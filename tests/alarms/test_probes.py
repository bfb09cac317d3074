"""Probes: engines that compute or draw otherwise are named, and sound ones never."""

import numpy as np
import pytest

from laminar_py.control.alarms.weights import EXACT, ROUNDED, WRONG, ProbeCheck, ProbeDistribution
from laminar_py.records.proofs import POWERS, NextToken, ProbeAnswer

VOCAB, PROBES = 64, 16


def next_token(logits: np.ndarray, *, top: int | None = None) -> NextToken:
    logprobs = logits - np.log(np.exp(logits).sum())
    ids = np.argsort(-logprobs).astype(np.int32)[:top]
    sums = np.array([np.log(np.exp(power * logprobs).sum()) for power in POWERS])
    return NextToken(ids, logprobs[ids].astype(np.float32), sums.astype(np.float32))


class Story:
    """A learner whose distributions move from version to version, and an engine that answers to its probes."""

    def __init__(self, *, moves: float = 0.02, seed: int = 0, tolerance=EXACT) -> None:
        self.rng = np.random.default_rng(seed)
        self.moves = moves
        self.logits = [self.rng.normal(0, 1.5, VOCAB) for _ in range(PROBES)]
        self.check = ProbeCheck(tolerance=tolerance)
        self.versions: list[list[np.ndarray]] = []

    def publish(self) -> list:
        if self.versions:
            self.logits = [logits + self.rng.normal(0, self.moves, VOCAB) for logits in self.logits]
        self.versions.append([logits - np.log(np.exp(logits).sum()) for logits in self.logits])
        return list(self.check.computed(len(self.versions) - 1, [next_token(logits) for logits in self.logits]))

    def answer(self, *, computes=None, draws=lambda logprobs: logprobs, says=None, noise=0.0) -> list:
        """Answers under the newest version, which the engine `computes` as the version of that number."""
        newest = len(self.versions) - 1
        alarms = []
        for probe in range(PROBES):
            logprobs = self.versions[newest if computes is None else computes][probe]
            drawn = draws(logprobs)
            p = np.exp(drawn - drawn.max())
            token = int(self.rng.choice(VOCAB, p=p / p.sum()))
            said = (logprobs if says is None else says(logprobs))[token] + self.rng.normal(0, noise)
            alarms += self.check.answered(0, ProbeAnswer(newest, probe, token, float(said)))
        return alarms


def test_an_engine_that_is_always_one_version_late_is_named_although_it_moves() -> None:
    story = Story(moves=1e-3)
    story.publish()
    assert not story.answer(noise=1e-6)
    for late in range(4):
        assert not story.publish()
        if alarms := story.answer(computes=late, noise=1e-6):
            break
    assert alarms
    assert f"as of version {late}" in alarms[0].message


@pytest.mark.parametrize("seed", range(20))
def test_a_sound_engine_gives_no_alarm(seed: int) -> None:
    story = Story(seed=seed)
    rounded = Story(seed=seed, moves=0.002, tolerance=ROUNDED)
    for _ in range(100):
        assert not story.publish() + story.answer()
        assert not rounded.publish() + rounded.answer(noise=0.03)


@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize("tolerance", [EXACT, ROUNDED])
def test_a_sound_engine_gives_no_alarm_though_few_of_its_tokens_are_known(slope: float, tolerance) -> None:
    rng, check = np.random.default_rng(0), ProbeCheck(tolerance=tolerance)
    logits = -slope * np.log(1.0 + np.arange(32_000))
    logprobs = logits - np.log(np.exp(logits).sum())
    assert not list(check.computed(0, [next_token(logits, top=256)] * PROBES))
    for number, token in enumerate(rng.choice(len(logits), size=20_000, p=np.exp(logprobs)).tolist()):
        assert not list(check.answered(0, ProbeAnswer(0, number % PROBES, token, float(logprobs[token]))))


def test_an_engine_that_stays_at_its_first_version_is_named_with_the_first_new_one() -> None:
    story = Story(moves=0.1)
    story.publish()
    assert not story.answer()
    story.publish()
    alarms = story.answer(computes=0)
    assert {alarm.check for alarm in alarms} == {"probes"}
    assert any("as of version 0" in alarm.message or "do not move" in alarm.message for alarm in alarms)


def test_in_bf16_an_engine_that_does_not_move_is_named_although_each_answer_is_near() -> None:
    story = Story(moves=0.05, tolerance=ROUNDED)
    found = []
    for version in range(20):
        story.publish()
        found += [(version, alarm) for alarm in story.answer(computes=0, noise=0.02)]
    assert found
    assert found[0][1].check == "probes"
    assert "do not move" in found[0][1].message


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("temperature 0.7", lambda logprobs: logprobs / 0.7),
        ("temperature 1.5", lambda logprobs: logprobs / 1.5),
        ("greedy", lambda logprobs: np.where(logprobs == logprobs.max(), 0, -1e9)),
        ("top_k 5", lambda logprobs: np.where(logprobs >= np.sort(logprobs)[-5], logprobs, -1e9)),
        ("top_p 0.8", lambda logprobs: nucleus(logprobs, 0.8)),
    ],
)
def test_other_sampling_settings_are_named_within_twenty_versions(name: str, draws) -> None:
    for seed in range(5):
        story, found = Story(seed=seed), []
        for _ in range(20):
            story.publish()
            found += story.answer(draws=draws)
        assert {alarm.check for alarm in found} == {"sampling"}, (name, seed)


def nucleus(logprobs: np.ndarray, share: float) -> np.ndarray:
    order = np.argsort(-logprobs)
    kept = order[: int(np.searchsorted(np.cumsum(np.exp(logprobs[order])), share)) + 1]
    cut = np.full_like(logprobs, -1e9)
    cut[kept] = logprobs[kept]
    return cut


def test_a_bet_on_each_wrong_setting_is_fair_under_the_right_one() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, VOCAB)
    expected = ProbeDistribution(next_token(logits))
    logprobs = logits - np.log(np.exp(logits).sum())
    mean = sum(np.exp(logprobs[token]) * np.exp(expected.bets(token)) for token in range(VOCAB))
    np.testing.assert_allclose(mean, np.ones(len(WRONG)), rtol=1e-4)


def test_answers_wait_for_the_learners_distribution() -> None:
    story = Story()
    assert not list(story.check.answered(0, ProbeAnswer(0, 0, 3, -55.0)))
    (alarm, *_) = story.publish()
    assert alarm.message.startswith("gives a token log-probability -55.000 under version 0, the learner ")


def test_a_log_probability_that_is_not_finite_is_named() -> None:
    story = Story()
    story.publish()
    (alarm, *_) = story.check.answered(0, ProbeAnswer(0, 0, 3, float("nan")))
    assert alarm.check == "probes"
