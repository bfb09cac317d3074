"""The policy of `staleness.control`: limits, rules, collapse; no flapping on measurements that stay."""

import math
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.changes import BOUND, PUBLISH_EVERY
from laminar_py.config.steering import StalenessControl
from laminar_py.control.steering import RETRY, StalenessSteering
from laminar_py.records.metrics import StepRow, TokenMetrics
from tests.depth import examples

ROW = StepRow(
    step=1,
    version=1,
    rl_s=0.0,
    reward=0.5,
    trajectories=4,
    trained_tokens=0,
    generated_tokens=0,
    staleness_mean=0.0,
    learner_s=1.0,
    learner_waiting_share=0.0,
    learner_busy_s=0.0,
    overlap_s=0.0,
    versions_alive=1,
)


def row(*, step=1, waits=0.0, stalled=0.0, effective=1.0, reward=0.5, fresh=1.0):
    """A step of 1 s, in which the learner waited for more than its batch and stalled; half of its data is 3 to 4
    steps old."""
    rest = max(1e-6, 1.0 - waits - stalled)
    tokens = {"0": TokenMetrics(num_tokens=50, effective_share=fresh)}
    tokens["3-4"] = TokenMetrics(num_tokens=50, effective_share=effective)
    return msgspec.structs.replace(
        ROW,
        step=step,
        reward=reward,
        waited_s=waits + 9.0,  # checkpoints and restarts too
        publish_stall_s=stalled,
        learner_s=rest,
        by_staleness=tokens,
    )


class Run:
    """A run whose bound and steps between two versions follow the policy."""

    def __init__(self, *, bound=4, every=1, **control):
        self.control = StalenessControl(**control)
        self.steering = StalenessSteering(self.control, publish_every=every)
        self.values = {BOUND: bound, PUBLISH_EVERY: every}
        self.bounds, self.alarms, self.reasons, self.step = [bound], [], [], 0

    def go(self, steps, *, spare=0, **measured):
        for _ in range(steps):
            self.step += 1
            now = {name: value(self) if callable(value) else value for name, value in measured.items()}
            changes, alarm = self.steering.observe(
                row(step=self.step, **now),
                spare=spare(self) if callable(spare) else spare,
                waited_s=now.get("waits", 0.0),
                bound=self.values[BOUND],
                publish_every=self.values[PUBLISH_EVERY],
            )
            for change in changes:
                self.values[change.name] = change.value
                self.reasons.append(change.reason)
            self.bounds.append(self.bound)
            self.alarms += [alarm] if alarm else []
        return self

    @property
    def bound(self):
        return self.values[BOUND]

    @property
    def turns(self):
        """How often the bound moved the other way than before."""
        moves = [after - before for before, after in pairwise(self.bounds)]
        moves = [move for move in moves if move]
        return sum(one * other < 0 for one, other in pairwise(moves))


SHARES = st.floats(0.0, 1.0)
MEASURED = st.fixed_dictionaries(
    {
        "waits": SHARES,
        "stalled": st.floats(0.0, 0.5),
        "effective": st.one_of(SHARES, st.just(math.nan)),
        "reward": st.floats(-2.0, 2.0),
        "fresh": st.floats(0.5, 1.0),
        "spare": st.integers(0, 3),
    }
)


@given(st.lists(MEASURED, min_size=1, max_size=60), st.integers(0, 3), st.integers(0, 4), st.integers(1, 3))
@settings(max_examples=examples(100))
def test_bound_and_steps_between_versions_never_leave_their_limits(measured, least, more, most_every):
    most = max(1, least + more)
    run = Run(bound=most, min=least, max=most, max_publish_every=most_every, window=2)
    for one in measured:
        run.go(4, **one)
        assert least <= run.bound <= most
        assert 1 <= run.values[PUBLISH_EVERY] <= most_every
        assert run.values[PUBLISH_EVERY] - 1 <= run.bound, "else the config refuses it"


@given(MEASURED, st.integers(1, 8))
@settings(max_examples=examples(100))
def test_measurements_that_stay_turn_the_bound_around_only_to_try_a_rise_again(measured, bound):
    run = Run(bound=bound, window=2).go(200, **measured)
    tries = 1 + 200 // (2 * RETRY)
    assert run.turns <= 2 * tries
    settled = len(run.bounds)
    after = run.go(200, **measured).bounds[settled:]
    assert max(after) - min(after) <= 1
    assert sum(one < other for one, other in pairwise(after)) <= tries
    assert not run.alarms


def test_the_bound_rises_while_that_shortens_the_waits_and_old_data_is_effective():
    run = Run(max=7).go(300, waits=lambda run: 1.2 / run.bound, effective=0.95)
    assert (run.bound, run.turns) == (7, 0)
    run = Run(max=9).go(300, waits=lambda run: 1.2 / run.bound, effective=0.95)
    assert (max(run.bounds), run.bound) == (8, 7), "at 8 the learner works for 2.5 % more of the time than at 7"


def tried():
    """A run that has just undone a rise without effect."""
    run = Run()
    while run.turns == 0:
        run.go(1, waits=0.3, effective=0.95)
    assert (max(run.bounds), run.bound) == (5, 4)
    assert "before the bound rose" in run.reasons[-1]
    return run


def test_a_rise_that_shortens_no_wait_is_undone_and_tried_again_after_many_windows():
    run = tried()
    assert max(run.go(5 * (RETRY - 1), waits=0.3, effective=0.95).bounds[-5 * (RETRY - 1) :]) == 4
    assert run.go(15, waits=0.3, effective=0.95).bound == 5, "then things may have changed"
    run = tried()
    assert max(run.go(20, waits=0.55, effective=0.95).bounds[-20:]) == 5, "the learner waits much more than then"
    run = Run().go(30, waits=0.97, effective=0.99)
    assert "before the bound rose" in run.reasons[-1]
    assert run.go(5 * RETRY + 15, waits=0.97, effective=0.99).reasons[-2].startswith("the learner waits 97%")


def test_a_rise_that_shortens_waits_by_less_than_steps_differ_is_undone():
    def shorter(run, *, swing):
        return (0.5 if run.bound == 4 else 0.45) + swing * (-1) ** run.step

    run = Run(max=5).go(40, waits=lambda run: shorter(run, swing=0.0), effective=0.95)
    assert run.bound == 5
    run = Run(max=5).go(40, waits=lambda run: shorter(run, swing=0.2), effective=0.95)
    assert run.bounds[10:26] == [5] * 15 + [4], "after a second window"


def test_a_gain_that_one_window_does_not_show_is_kept_if_two_do():
    def waits(run):
        return (0.5 if run.bound == 4 else 0.41) + (0.33 if run.step % 5 == 0 else 0.0)

    run = Run(max=5).go(60, waits=waits, effective=0.95)
    assert run.bounds[9:] == [4] + [5] * 51
    run = Run(max=5).go(10, waits=waits, effective=0.95).go(11, waits=waits, effective=0.5)
    assert run.bound == 4, "old data that lost its signal waits for no second window"


def test_after_a_change_by_the_user_a_rise_is_tried_at_once():
    run = tried()
    run.steering.begin_again(run.bound)
    assert run.go(9, waits=0.3, effective=0.95).bound == 4, "the steps in flight do not count"
    assert run.go(1, waits=0.3, effective=0.95).bound == 5


def test_a_change_of_the_publishes_leaves_a_rise_on_trial():
    run = Run(max_publish_every=2).go(10, waits=0.3, effective=0.95)
    assert run.bound == 5
    run.go(11, waits=0.3, stalled=0.2, effective=0.95)
    assert run.values == {BOUND: 5, PUBLISH_EVERY: 2}
    assert "before the bound rose" in run.go(11, waits=0.3, stalled=0.2, effective=0.95).reasons[-1]


def test_a_setting_that_the_user_holds_stays_also_in_a_collapse():
    run = Run(bound=6, min=2, max_publish_every=3)
    run.steering.hold(BOUND)
    run.go(100, waits=0.5, reward=noisy(0.6)).go(100, stalled=0.2, effective=0.05, reward=noisy(0.1))
    assert run.values == {BOUND: 6, PUBLISH_EVERY: 3}
    assert len(run.alarms) == 1
    run.steering.hold(PUBLISH_EVERY)
    assert run.go(100).values == {BOUND: 6, PUBLISH_EVERY: 3}


def test_old_data_is_compared_with_the_youngest_that_is_there():
    steering, bounds = StalenessSteering(StalenessControl(window=2), publish_every=1), [4]
    for step in range(1, 60):
        share = 0.6 if step > 1 else 1.0  # all data, once training has begun
        ages = ("0",) if step == 1 else ("2", "3-4")
        figures = {age: TokenMetrics(num_tokens=50, effective_share=share) for age in ages}
        now = msgspec.structs.replace(ROW, step=step, by_staleness=figures)
        found, _ = steering.observe(now, spare=0, waited_s=0.0, bound=bounds[-1], publish_every=1)
        bounds += [change.value for change in found]
    assert bounds == [4], "no data is better than the oldest"


def test_old_data_without_effect_lowers_the_bound_to_its_least():
    assert Run(min=2).go(300, effective=0.5).bound == 2
    assert Run().go(300, effective=0.5, fresh=0.6).bound == 4, "fresh data is hardly better: it is no staleness"
    assert Run().go(300, effective=math.nan).bound == 1


def test_the_bound_stays_where_waits_cost_less_than_old_data():
    assert Run().go(300, waits=0.12, effective=0.86).bound == 4


def test_batches_that_lie_ready_lower_the_bound_until_none_does():
    run = Run(bound=6).go(300, spare=lambda run: max(0, run.bound - 3))
    assert (run.bound, run.turns) == (3, 0)
    assert Run(bound=6, min=2).go(300, spare=9).bound == 2
    assert Run(bound=6).go(300, spare=9, waits=0.05).bound == 6, "the learner waits although batches lie ready"


def test_publishes_that_delay_the_learner_become_rarer_within_the_limit():
    assert Run(max_publish_every=3).go(200, stalled=0.2).values == {BOUND: 4, PUBLISH_EVERY: 3}
    assert Run().go(200, stalled=0.2).values[PUBLISH_EVERY] == 1, "no limit is given"
    run = Run(max_publish_every=3).go(200, stalled=0.2)
    assert run.go(200, stalled=0.0).values[PUBLISH_EVERY] == 1


def noisy(level):
    return lambda run: level + 0.02 * (-1) ** run.step


def test_a_reward_that_falls_on_data_without_signal_is_one_alarm_and_the_least_bound():
    run = Run(bound=6, min=2, least_effective=0.04).go(40, reward=noisy(0.6), effective=0.9)
    run.go(4, reward=noisy(0.6), effective=0.05)
    assert run.bound == 6
    run.go(8, reward=noisy(0.1), effective=0.05)
    assert run.bound == 2
    assert len(run.alarms) == 1
    assert "lower learner.lr or staleness.max_staleness" in run.alarms[0]
    assert "\n" not in run.alarms[0]
    assert run.go(30, waits=0.5, reward=noisy(0.1)).bound == 2, "it rests"


def test_a_reward_that_falls_on_sound_data_or_within_its_noise_is_no_collapse():
    assert not Run().go(40, reward=noisy(0.6)).go(40, reward=noisy(0.1), effective=0.9).alarms
    assert not Run().go(40, reward=noisy(0.6)).go(40, reward=noisy(0.5), effective=0.05).alarms
    swings = {"reward": lambda run: 0.5 + 0.4 * (-1) ** run.step}
    assert not Run().go(40, **swings, effective=0.05).go(3, reward=0.1, effective=0.05).alarms


def test_steps_of_data_from_before_a_change_do_not_decide():
    run = Run(bound=8, window=2).go(9 + 2, effective=0.1)
    assert run.bound == 7, "after the first 1 + 8 steps, and a window of 2"
    assert run.go(8 + 1, effective=0.1).bound == 7
    assert run.go(1, effective=0.1).bound == 6


def test_a_learner_without_figures_by_staleness_is_steered_by_waits_alone():
    steering, bound = StalenessSteering(StalenessControl(window=2), publish_every=1), 2
    bare = msgspec.structs.replace(ROW, reward=math.nan)
    for _ in range(8):
        changes, alarm = steering.observe(bare, spare=0, waited_s=1.0, bound=bound, publish_every=1)
        assert not alarm
        bound = changes[0].value if changes else bound
    assert bound == 3
