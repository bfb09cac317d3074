"""Why a run learns slowly, whatever its speed: answers that are cut, groups without signal, tools never called.

Each finding has its figure and a remedy. The terminal shows them beside the diagnosis of speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from laminar_lab.report.trajectories import CAPS, Trajectories
from laminar_py.config.data import PromptOrder
from laminar_py.config.rollout import WithoutSignal
from laminar_py.config.run import RunConfig
from laminar_py.records.metrics import StepRow
from laminar_py.records.trajectory import Cap, Kind

LEAST = 64  # finished trajectories, below which nothing is judged
CUT, CUT_IN_TRAINING = 0.1, 0.3  # shares of responses at the cap above which it hides what a model can do
WITHOUT_SIGNAL = 0.5  # of the groups
ONE_SIDED = 0.8  # of the groups without signal that have the same reward
PROMPTS = 0.7  # of the learner's tokens


@dataclass(frozen=True, slots=True)
class LearningFinding:
    """A cause of slow learning and a remedy, e.g. `LearningFinding("51% of the answers are cut", "raise ...")`."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def learning_findings(
    config: RunConfig, trajectories: Trajectories, steps: Sequence[StepRow]
) -> tuple[LearningFinding, ...]:
    """Return the causes of slow learning in a run."""
    finished = trajectories.where(trajectories.finish >= 0)
    training = finished.where(finished.is_kind(Kind.TRAIN))
    evaluation = finished.where(finished.is_kind(Kind.EVAL))
    return (
        *_tools(config, training),
        *_cut(config, evaluation, training),
        *_signal(config, training),
        *_prompts(steps),
    )


def _tools(config: RunConfig, training: Trajectories) -> Iterator[LearningFinding]:
    called = config.environment is not None and config.environment.calls_tools
    if called and len(training) >= LEAST and (training.turns <= 1).all():
        remedy = "look at a prompt (`laminar data CONFIG`) and a response (`laminar samples RUN`)"
        warm = "a model that has never seen such calls needs demonstrations in warm_start"
        yield LearningFinding(f"no turn of {len(training):,} trajectories called a tool", f"{remedy}; {warm}")


def _cut(config: RunConfig, evaluation: Trajectories, training: Trajectories) -> Iterator[LearningFinding]:
    cap = config.rollout.sampling.max_new_tokens
    room = f"raise it, and rollout.max_len={config.rollout.max_len} with it"
    if (share := _share_cut(evaluation)) > CUT:
        setting = f"rollout.sampling.max_new_tokens={cap}, or eval.sets.NAME.max_new_tokens"
        yield LearningFinding(
            f"{share:.0%} of the evaluation's answers were cut by the cap on tokens", f"{setting}; {room}"
        )
    if (share := _share_cut(training)) > CUT_IN_TRAINING:
        what = f"{share:.0%} of the training responses end at rollout.sampling.max_new_tokens={cap}"
        yield LearningFinding(what, f"{room}, or set algorithm.truncated=mask so that they are not punished")


def _share_cut(finished: Trajectories) -> float:
    """Share of trajectories that the cap on tokens cut; 0 for too few."""
    if len(finished) < LEAST:
        return 0.0
    return float((finished.cap == CAPS.index(Cap.TOKENS)).mean())


def _signal(config: RunConfig, training: Trajectories) -> Iterator[LearningFinding]:
    scored = training.where(np.isfinite(training.reward))
    if len(scored) < LEAST or config.rollout.group_size < 2:
        return
    worst, best = np.full(scored.group.max() + 1, np.inf), np.full(scored.group.max() + 1, -np.inf)
    np.minimum.at(worst, scored.group, scored.reward)
    np.maximum.at(best, scored.group, scored.reward)
    known = np.bincount(scored.group, minlength=len(worst)) >= config.rollout.group_size  # whole groups alone
    if not known.any():
        return
    equal = known & (worst == best)
    share = equal.sum() / known.sum()
    if share <= WITHOUT_SIGNAL or config.algorithm.learns_from_equal_rewards:
        return
    what = f"{share:.0%} of the groups have equal rewards and teach nothing"
    is_varied = scored.reward.max() > scored.reward.min()
    solved = (worst[equal] == scored.reward.max()).mean() if is_varied else 0.0
    if solved > ONE_SIDED:
        yield LearningFinding(f"{what}, most of them solved", f"add harder problems{_order(config)}")
    elif solved < 1 - ONE_SIDED:
        size = config.rollout.group_size
        larger = f"rollout.group_size {size} -> {2 * size}"
        yield LearningFinding(f"{what}, most of them without a success", f"add easier problems, or {larger}")
    else:
        yield LearningFinding(what, _order(config)[2:] or "choose problems that are solved now and then")


def _order(config: RunConfig) -> str:
    """Words on settings that draw fewer such groups, beginning with a comma; "" if they are set."""
    if config.data.order is not PromptOrder.SIGNAL:
        return ", data.order=signal"
    refills = config.rollout.without_signal is WithoutSignal.REFILL or config.algorithm.trains_on_all_groups
    return "" if refills else ", rollout.without_signal=refill"


def _prompts(steps: Sequence[StepRow]) -> Iterator[LearningFinding]:
    computed = sum(row.learner_tokens_per_s * row.learner_s for row in steps if row.learner_s > 0)
    responses = steps[-1].trained_tokens if steps else 0
    if computed > 0 and (share := 1 - responses / computed) > PROMPTS:
        yield LearningFinding(
            f"prompts are {share:.0%} of the tokens that the learner computes",
            "shorten them (data.chat.system, examples in prompts), or let responses be longer",
        )
