"""The control plane of a run, built from its parts, in one process without sockets.

    reports, scores, deadlines -> Incoming -> WaitingQueue -> Dispatcher -> assignments
                                     |
                                     v
                                Consumption -> batches for the learner

All parts share one `ControlState`. The controller (or a simulator) owns the `TrajectoryScheduler`, passes reports
and scores to it, and sends its assignments to replicas.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.consumption import Consumption, StepBatch
from laminar_py.control.dispatcher import Dispatcher
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.groups import Credit
from laminar_py.control.incoming import Incoming
from laminar_py.control.settings import ControlSettings, max_groups
from laminar_py.control.state import ControlState, Phase, Recorder
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.segments.salvage import Salvaged
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.host import Clock
from laminar_py.records.scoring import GroupRewards
from laminar_py.records.trajectory import Kind, Prompt, TrajectoryRef


def check_scored(live: Iterable[LiveTrajectory], algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if a live training response was scored without a column that the algorithm needs."""
    for entry in live:
        scored = entry.kind is Kind.TRAIN and entry.reward is not None
        if scored and (column := entry.missing(algorithm.scored_columns)):
            raise ConfigError(
                f"algorithm.name={algorithm.name}: needs the column {column.name!r} in {column.dtype}, which"
                f" {entry.id} lacks; resume with the earlier algorithm, or start another run"
            )


class TrajectoryScheduler:
    """Moves every trajectory from issue to consumption.

    Callers use its parts directly: `incoming` for reports and scores, `dispatcher` for assignments, `consumption`
    for batches, `evaluations` for passes over held-out problems.

    The parts call back: `submit_for_scoring` queues a finished response for scorers, `submit_for_columns` for the
    frozen model of each column (none: {}). Their results come back by `incoming`. `on_issued` gets id and prompt
    of each new group, `on_rewards` the rewards of each closed group, `on_failing` the message with which the run
    must end.
    """

    def __init__(
        self,
        settings: ControlSettings,
        *,
        prompt_at: Callable[[int], Prompt],
        on_issued: Callable[[str, Prompt], None] = lambda group, prompt: None,
        on_rewards: Callable[[GroupRewards], None] = lambda rewards: None,
        on_failing: Callable[[str], None] = lambda message: None,
        recorder: Recorder,
        submit_for_scoring: Callable[[TrajectoryRef, Prompt], None],
        submit_for_columns: Mapping[str, Callable[[TrajectoryRef], None]] = {},
        credit: Credit,
        clock: Clock,
    ) -> None:
        self.state = state = ControlState(settings, recorder)
        self.views, self.moves = state.views, state.moves
        self.evaluations = Evaluations(state)
        self.consumption = Consumption(state)
        waiting = WaitingQueue(state, evaluations=self.evaluations)
        self.router = waiting.router
        self.incoming = Incoming(
            state,
            waiting=waiting,
            evaluations=self.evaluations,
            consumption=self.consumption,
            submit_for_scoring=submit_for_scoring,
            submit_for_columns=submit_for_columns,
            credit=credit,
            clock=clock,
            on_rewards=on_rewards,
            on_failing=on_failing,
        )
        self.dispatcher = Dispatcher(
            state, waiting=waiting, evaluations=self.evaluations, prompt_at=prompt_at, on_issued=on_issued
        )

    # ---- phases

    def admit(self) -> None:
        """Let replicas get training work, new groups included."""
        self.state.phase, self.state.before_rl = Phase.ADMITTING, False

    def continue_live(self) -> None:
        """Let replicas get live trajectories, but issue no new group."""
        self.state.phase = Phase.CONTINUING

    def pause(self) -> None:
        """Give replicas no training work, and end all moves."""
        self.state.phase = Phase.PAUSED
        self.moves.end_all()

    def end(self) -> None:
        """Give replicas no more work, and end all moves, because the run stops; a resumed run may continue."""
        self.state.phase = Phase.ENDING
        self.moves.end_all()

    def await_restore(self) -> None:
        """Give replicas nothing until `restore`, since a trajectory of a requested pass may already be live."""
        self.state.phase = Phase.RESTORING

    async def restore(self, recovered: Recovered, *, salvaged: Iterable[Salvaged] = ()) -> None:
        """Continue a crashed controller's trajectories, with `salvaged` tokens of replicas; allow evaluations."""
        await self.incoming.restore(recovered, salvaged)
        if self.state.phase is Phase.RESTORING:
            self.state.phase = Phase.PAUSED

    # ---- the fleet

    def leave(self, replica: int) -> None:
        """Give a replica no new work, and close all moves to it."""
        self.views.leave(replica)
        self.moves.leave(replica)

    def adopt(self, config: RunConfig) -> None:
        """Take over the changeable settings of `config`: capacity, staleness bound, steps between two versions.

        The bound must not change while the learner has a batch, whose weights follow the earlier bound (law 12).
        """
        settings, bound = self.state.settings, config.staleness.max_staleness
        admission = replace(
            settings.admission,
            capacity=max_groups(config),
            max_staleness=bound,
            publish_every=config.learner.publish_every,
        )
        assert bound == settings.bound.max_staleness or not self.state.num_in_step, "a batch is in the learner"
        treatment = replace(settings.bound, max_staleness=bound)
        self.state.settings = replace(settings, admission=admission, bound=treatment)

    # ---- between the parts

    async def next_batch(self, *, groups: int, version: int) -> StepBatch:
        """Wait for `groups` ready groups, and return them as a batch for a learner at `version`.

        Once enough are ready, `Incoming.drop_unscored` closes groups that wait only for late scores.
        """
        last_call = self.incoming.drop_unscored
        return await self.consumption.next_batch(groups=groups, version=version, last_call=last_call)

    def published(self, version: int) -> None:
        """Note that the learner published `version`."""
        self.state.newest_version = version
        self.state.ages.record_version(version)

    def is_live(self, trajectory_id: str) -> bool:
        """Return whether a trajectory is neither consumed nor dropped."""
        return trajectory_id in self.state.live
