"""Scoring of a run: finished trajectories to the stage, and the failures of the reward. Owned by the controller.

The loop that takes the scores in is `controller.score`. A response that cannot be scored is reported at once,
before RL by trials of the reward; a run in which nothing can be scored ends.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest

from laminar_py.config.reward import RewardConfig
from laminar_py.config.run import RunConfig
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.evaluations import set_of
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.scoring import (
    NO_IDS,
    NO_LOGPROBS,
    PartialResponse,
    Score,
    ScoringRequest,
    Unfinished,
    Unscored,
)
from laminar_py.records.spans import num_turns
from laminar_py.records.trajectory import Prompt, Status
from laminar_py.reward.failures import ScoreFailures, trials
from laminar_py.reward.stage import ScoringStage
from laminar_py.runtime.preflight.inputs import Inputs
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.scorers import Scorers
from laminar_py.runtime.workers.servers import RewardServers

log = logging.getLogger(__name__)

OUTAGE_REST_S = 5.0  # of a scorer between responses in an outage
LOOK_S = 1.0  # between two looks at responses that still generate
AT_A_TIME = 8  # of these responses, some 100 kB of ids


def max_scored(config: RunConfig, inputs: Inputs) -> int:
    """Trajectories that can wait for a score: live ones, all of evaluations, and a trial."""
    sets = inputs.sets
    answers = sum(config.eval.sets[name].samples * len(prompts) for name, prompts in sets.items())
    evaluations = (2 + config.num_evaluations) * answers + len(inputs.first_of_tasks)
    return config.capacity + config.rollout.group_size + evaluations + 1


class Scoring:
    """Scoring stage, its processes, and the servers that they ask where the run launches some.

    `deliver` returns once scores were taken in. `say` takes lines for the user, `end` the reason why the run
    cannot go on: nothing can be scored. An evaluation alone has nothing that `trains`. In an outage each scorer
    tries one response, which is dropped where that fails, and rests; all others wait, and the first value ends the
    rest of all scorers.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        payload: PayloadHosts,
        deliver: Callable[[Sequence[Score]], Awaitable[None]],
        say: Callable[[str], None],
        end: Callable[[str], None],
        trains: bool = True,
    ) -> None:
        config, inputs = incarnation.config, incarnation.inputs
        self.failures = ScoreFailures(config.reward.title, step=config.trajectories_per_step, trains=trains)
        self._scorers = Scorers(incarnation, payload=payload)
        self._servers = RewardServers(incarnation, tell=self._scorers.tell)
        self._scheduler = scheduler
        self._stats = incarnation.stats
        self._clock = incarnation.clock
        self._reward = config.reward
        self._foresight = Foresight(config.reward)
        self._most = max_scored(config, inputs)
        self._say = say
        self._end = end
        self._deliver_to = deliver
        encode, end_id = inputs.tokenizer.encode, inputs.tokenizer.eos_ids[0]
        tried = (prompt for prompt in inputs.first_of_tasks if config.reward.of_task(prompt.task))
        self._trials = deque(trials(tried, encode=encode, end=end_id))
        self._complaints = set[str]()
        self._scored = asyncio.Event()  # set outside an outage
        self._stage: ScoringStage | None = None

    def spawn(self) -> None:
        """Start the processes; `start` starts what runs in them."""
        self._scorers.spawn()
        self._servers.spawn()

    async def start(self) -> None:
        """Bring the processes up, and have the reward tried. Raises ConfigError where it cannot be loaded."""
        self._stage = ScoringStage(
            await self._scorers.start(),
            queue=self._most,
            wanted=self._wanted,
            deliver=self._deliver,
            restart=self._scorers.restart,
            one_by_one=lambda: self.failures.is_outage,
        )
        self._try_next()

    async def run(self) -> None:
        """Serve until cancelled; scorers wait for servers that start. Raises RunFailedError if one never does."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ready.run(), name="scoring-stage")
            tasks.create_task(self._servers.keep(), name="keep-reward-servers")
            if self._foresight.is_wanted:
                tasks.create_task(self._look_ahead(), name="look-ahead")

    async def close(self) -> None:
        """End what scorers hold."""
        await self._scorers.close()

    def grow(self, queue: int) -> None:
        """Let as many wait as a larger fleet finishes."""
        self._ready.grow(queue)

    def grow_by(self, number: int) -> None:
        """Let so many more wait, which an earlier incarnation left."""
        self._ready.grow(self._most + number)

    def submit(self, trajectory: FinishedTrajectory, prompt: Prompt) -> None:
        """Take it up as soon as a scorer is free."""
        self._ready.submit_response(
            Unscored(
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

    async def _look_ahead(self) -> None:
        """Show scorers what still generates, a little now and then."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._ready.look_ahead(self._foresight.choose(self._scheduler.book.live))

    @property
    def waits(self) -> str:
        """Words on responses without a score, e.g. "scores of 64 responses, the oldest 35 s"; "" without any."""
        if self._stage is None or not self._stage.num_unscored:
            return ""
        return f"scores of {self._stage.num_unscored} responses, the oldest {self._stage.oldest_s:.0f} s"

    @property
    def _ready(self) -> ScoringStage:
        assert self._stage is not None, "scoring is used after `start`"
        return self._stage

    def _try_next(self) -> None:
        """Have the reward tried once more; one at a time, since it may hang, and be told of at the first."""
        if self._trials:
            self._ready.submit_response(Unscored(request=self._trials[0].request))

    def _wanted(self, trajectory_id: str) -> bool:
        return self._is_trial(trajectory_id) or self._scheduler.is_live(trajectory_id)

    def _is_trial(self, trajectory_id: str) -> bool:
        return bool(self._trials) and trajectory_id == self._trials[0].request.trajectory_id

    def without_trials(self, scores: Sequence[Score]) -> list[Score]:
        """Scores of responses; those of the reward's trials are taken in here."""
        rest: list[Score] = []
        for score in scores:
            if self._is_trial(score.trajectory_id):
                self._tried(score)
            else:
                rest.append(score)
        return rest

    def note(self, score: Score, trajectory: LiveTrajectory) -> None:
        """Count a score of a response: its value in the figures, its failure towards an outage or a fault."""
        line = self.failures.add(
            score,
            task=trajectory.prompt.task,
            trains=trajectory.trains,
            own_reward=set_of(trajectory.group_id) in self._reward.by_set,
            now_s=self._clock.now(),
        )
        if line is not None:
            self._tell(line)
        if (fault := self.failures.fault) is not None:
            self._end(fault)
        if trajectory.trains and score.value is not None:
            self._stats.scored(score.value, score.terms, trajectory.length)
            if trajectory.environment_s:
                self._stats.turned(num_turns(trajectory.token_spans), trajectory.environment_s)

    def _tried(self, score: Score) -> None:
        trial = self._trials.popleft()
        self.failures.add_trial(score)
        if score.value is None and score.detail not in self._complaints:
            self._complaints.add(score.detail)
            self._tell(trial.complaint(score, title=self._reward.title))
        self._try_next()

    async def _deliver(self, scores: Sequence[Score]) -> None:
        """Have scores taken in, then rest in an outage; the scorer gets no other response meanwhile."""
        await self._deliver_to(scores)
        if not self.failures.is_outage:
            self._scored.set()
            return
        self._scored.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTAGE_REST_S):
                await self._scored.wait()

    def _tell(self, line: str) -> None:
        log.warning("%s", line)
        self._say(line)


class Foresight:
    """Choice of the responses that scorers see while these still generate; remembers how much it showed of each.

    Terms that work ahead (`config.reward.ForesightedReward`) see the responses first that have grown most, few at
    a time: a long one every so often, a short one perhaps not before its end. Only time depends on the choice.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self._shown: dict[str, int] = {}  # tokens, of live trajectories
        self.is_wanted = reward.looks_ahead

    def choose(self, live: Mapping[str, LiveTrajectory]) -> list[Unfinished]:
        """Beginnings of those that have grown most since they were shown, at most `AT_A_TIME`."""
        self._shown = {name: shown for name, shown in self._shown.items() if name in live}
        news = {
            name: trajectory.length - self._shown.get(name, 0)
            for name, trajectory in live.items()
            if trajectory.status is Status.RUNNING and self._looks_ahead(trajectory)
        }
        chosen = [live[name] for name in nlargest(AT_A_TIME, news, key=lambda name: news[name]) if news[name]]
        self._shown |= {trajectory.id: trajectory.length for trajectory in chosen}
        return [
            Unfinished(
                tokens=trajectory.tokens,
                response=PartialResponse(
                    trajectory_id=trajectory.id,
                    task=trajectory.prompt.task,
                    set_name=set_of(trajectory.group_id),
                    prompt_ids=trajectory.prompt.ids,
                    response_ids=NO_IDS,
                ),
            )
            for trajectory in chosen
        ]

    def _looks_ahead(self, trajectory: LiveTrajectory) -> bool:
        terms = self._reward.of_task(trajectory.prompt.task, set_name=set_of(trajectory.group_id))
        return any(term.looks_ahead for term in terms)
