"""Scoring of a run: finished trajectories go to the scoring stage, and failures of the reward are counted.

Owned by the controller, whose loop `collect_scores` records the scores. A response that cannot be scored is
reported at once. Before RL, trials of the reward find such errors. A run in which no response can be scored ends.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from laminar_py.config.run import RunConfig
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.observe.live import ShownSample, View
from laminar_py.records.evaluations import set_of
from laminar_py.records.host import counted
from laminar_py.records.scoring import NO_IDS, NO_LOGPROBS, Score, ScoringRequest, Unscored
from laminar_py.records.spans import num_turns
from laminar_py.records.trajectory import FinishReason, Kind, Prompt, TrajectoryRef
from laminar_py.reward.failures import ScoreFailures, trials
from laminar_py.reward.stage import ScoringStage
from laminar_py.runtime.preflight.inputs import Inputs
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.scorers import RewardServers, Scorers
from laminar_py.runtime.workers.segments import RunSegments

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 15.0  # between samples on the user's terminal
OUTAGE_REST_S = 5.0  # pause of a scorer between responses in an outage


def max_scored(config: RunConfig, inputs: Inputs) -> int:
    """Return the most trajectories that can wait for a score: live ones, evaluation answers, and one trial."""
    sets = inputs.sets
    answers = sum(config.eval.sets[name].samples * len(prompts) for name, prompts in sets.items())
    evaluations = (2 + config.num_evaluations) * answers
    return config.capacity + config.rollout.group_size + evaluations + 1


class Scoring:
    """The scoring stage, its processes, and the servers that the run launches for its terms.

    `deliver` returns once scores are taken in. `view` shows warnings and samples to the user. `end` ends the run
    with a reason, since nothing can be scored. `laminar eval` does not train (`trains`). In an outage each scorer
    tries one response at a time, which is dropped if it fails, and then pauses; the first score ends the pause of
    all scorers.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        segments: RunSegments,
        deliver: Callable[[Sequence[Score]], Awaitable[None]],
        view: View,
        end: Callable[[str], None],
        trains: bool = True,
    ) -> None:
        config, inputs = incarnation.config, incarnation.inputs
        self.failures = ScoreFailures(config.reward.title, step=config.new_per_step, trains=trains)
        self._scorers = Scorers(incarnation, segments=segments)
        self._servers = RewardServers(incarnation, publish=self._scorers.publish_addresses)
        self._scheduler = scheduler
        self._stats = incarnation.stats
        self._clock = incarnation.clock
        self._reward = config.reward
        self.most = max_scored(config, inputs)  # trajectories that can wait at the start
        self._view = view
        self._sampled_s = -math.inf  # when the last sample was asked for
        self._end = end
        self._on_scores = deliver
        self.check: Callable[[Score, LiveTrajectory], None] = lambda score, trajectory: None  # for alarms
        encode, end_id = inputs.tokenizer.encode, inputs.tokenizer.eos_ids[0]
        tried = (prompt for prompt in inputs.first_of_tasks if config.reward.of_task(prompt.task))
        self._trials = deque(trials(tried, encode=encode, end=end_id))
        self._reported = set[str]()
        self._scored = asyncio.Event()  # set by a delivery outside an outage
        self._stage: ScoringStage | None = None

    def spawn(self) -> None:
        """Start the processes of scorers and reward servers; `start` loads the scorers into their processes."""
        self._scorers.spawn()
        self._servers.spawn()

    async def start(self) -> None:
        """Start the scorers, and begin the trials of the reward. Raises ConfigError if it cannot be loaded."""
        self._stage = ScoringStage(
            await self._scorers.start(),
            queue=self.most,
            wanted=self._is_wanted,
            deliver=self._deliver,
            restart=self._scorers.restart,
            one_by_one=lambda: self.failures.is_outage,
        )
        self._begin_next_trial()

    async def run(self) -> None:
        """Run the stage and the reward servers until cancelled. Raises RunFailedError if a server never starts."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._open_stage.run(), name="scoring-stage")
            tasks.create_task(self._servers.keep(), name="keep-reward-servers")

    async def close(self) -> None:
        """End processes and sandboxes of the scorers."""
        await self._scorers.close()

    def grow(self, queue: int) -> None:
        """Enlarge the queue to `queue` trajectories, for a larger fleet, also of an earlier incarnation."""
        self._open_stage.grow(queue)

    def submit_response(self, trajectory: TrajectoryRef, prompt: Prompt) -> None:
        """Queue a finished response for a score."""
        wants_sample = trajectory.kind is Kind.TRAIN and self._is_sample_due()
        self._open_stage.submit_response(
            Unscored(
                wants_sample=wants_sample,
                tokens=trajectory.tokens,
                request=ScoringRequest(
                    trajectory_id=trajectory.id,
                    prompt=prompt.text,
                    response="",
                    answer=prompt.answer,
                    task=prompt.task,
                    set_name=set_of(trajectory.group_id),
                    finish_reason=trajectory.finish_reason,
                    prompt_ids=prompt.ids,
                    response_ids=NO_IDS,
                    logprobs=NO_LOGPROBS,
                    fields_json=prompt.fields_json,
                ),
            )
        )

    def _is_sample_due(self) -> bool:
        """Whether the view shows samples and needs one; the next is due `SAMPLE_EVERY_S` later."""
        now = self._clock.now()
        if not self._view.shows_samples or now - self._sampled_s < SAMPLE_EVERY_S:
            return False
        self._sampled_s = now
        return True

    @property
    def waits(self) -> str:
        """State of responses without a score, e.g. "scores of 64 responses, the oldest 35 s"; "" without any."""
        if self._stage is None or not self._stage.num_unscored:
            return ""
        return (
            f"scores of {counted(self._stage.num_unscored, 'response')}, the oldest {self._stage.oldest_s:.0f} s"
        )

    @property
    def _open_stage(self) -> ScoringStage:
        """The stage, once `start` has made it."""
        assert self._stage is not None, "scoring is used after `start`"
        return self._stage

    def _begin_next_trial(self) -> None:
        """Begin the next trial of the reward; one at a time, so that a hanging reward is reported once."""
        if self._trials:
            self._open_stage.submit_response(Unscored(request=self._trials[0].request))

    def _is_wanted(self, trajectory_id: str) -> bool:
        return self._is_trial(trajectory_id) or self._scheduler.is_live(trajectory_id)

    def _is_trial(self, trajectory_id: str) -> bool:
        return bool(self._trials) and trajectory_id == self._trials[0].request.trajectory_id

    def finish_trials(self, scores: Sequence[Score]) -> list[Score]:
        """Process the score of a trial, if `scores` has it, and return the other scores."""
        rest: list[Score] = []
        for score in scores:
            if self._is_trial(score.trajectory_id):
                self._finish_trial(score)
            else:
                rest.append(score)
        return rest

    def count_score(self, score: Score, trajectory: LiveTrajectory) -> None:
        """Count a response's score or failure; warn of a first failure or an outage, end the run for a fault."""
        self.check(score, trajectory)
        line = self.failures.add_score(
            score,
            task=trajectory.prompt.task,
            trains=trajectory.trains,
            own_reward=set_of(trajectory.group_id) in self._reward.by_set,
            now_s=self._clock.now(),
        )
        if line is not None:
            self._warn_user(line)
        if (fault := self.failures.fault) is not None:
            self._end(fault)
        if trajectory.trains and score.value is not None:
            cut = trajectory.finish_reason is FinishReason.LENGTH
            self._stats.add_score(score.value, score.terms, trajectory.length, cut=cut)
            if score.sample:
                self._view.sample(ShownSample(trajectory.prompt.text, score.sample, score.value))
            if trajectory.environment_s:
                self._stats.add_turns(num_turns(trajectory.token_spans), trajectory.environment_s)

    def _finish_trial(self, score: Score) -> None:
        """Count the score of the running trial, warn once of each fault, and begin the next trial."""
        trial = self._trials.popleft()
        self.failures.add_trial(score)
        fault, line = score.detail, trial.complaint(score.detail, title=self._reward.title)
        if score.value is not None:
            fault = line = self._reward.verdict_fault(trial.request.task, score.terms)
        if fault and fault not in self._reported:
            self._reported.add(fault)
            self._warn_user(line)
        self._begin_next_trial()

    async def _deliver(self, scores: Sequence[Score]) -> None:
        """Deliver scores. In an outage, then pause this scorer until the outage ends, at most `OUTAGE_REST_S`."""
        await self._on_scores(scores)
        if not self.failures.is_outage:
            self._scored.set()
            return
        self._scored.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTAGE_REST_S):
                await self._scored.wait()

    def _warn_user(self, line: str) -> None:
        log.warning("%s", line)
        self._view.notice(line)
