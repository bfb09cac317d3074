"""Settings to change against the bottleneck of a run, the best first, and predicted steps with other settings.

`laminar advise` prints them. Cheap and certain changes come before changes that cost devices or freshness.
Predictions use the formula of `compose`.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from laminar_lab.plan.placements import MOST_RUNNING, RESERVE_SHARE
from laminar_lab.report.diagnosis import WORTH, Bottleneck, Diagnosis, describe_cost, without_bottleneck
from laminar_lab.report.mean_step import MeanStep, StageTimes, StepStage, compose, predict
from laminar_py.config.algorithm import Correction, Objective, ReferencePass
from laminar_py.config.cluster import Device, LeaseCache, LeaseSwitch
from laminar_py.config.engine import Speculation
from laminar_py.config.learner import Recompute
from laminar_py.config.rollout import NO_PLANNER, OnNewWeights, Schedule, StalePolicy, WithoutSignal
from laminar_py.config.run import RunConfig

LONG_MICROBATCH_S = 1.0  # on CPUs; what a microbatch costs beside its tokens takes hundredths of it
MANY_MICROBATCHES = 4  # of a rank in a step; a rank with more may gain from larger microbatches
LEAST_GROWTH = 1.25  # of a decode batch that is worth a change
MOST_WORKER_GROWTH = 8  # most reward workers that one remedy advises, over the present number
FULL_ROOM_SHARE = 0.5  # of the room for turns; above this share, turns wait for room
TURNS_PER_PROCESS = 4  # above so many turns at a time, turns of an environment process may delay each other
CROWDED_SHARE = 0.3  # of the time with waiting requests; above this share, a larger decode batch may help
WIDEST_BOUND = 8  # largest bound on staleness that a remedy advises
FIRST_BOUND = 4  # bound on staleness that a remedy advises to a run without a bound
MOST_LOST_SHARE = 0.25  # of the effective sample size, by old data; above this share, no wider bound is advised
REFERENCE_SHARE = 0.1  # of a learner's step; above this share, the reference pass may leave the learner
OTHER_MACHINES = "cluster.address"
SPECULATION = "rollout.engine.speculation"
TAIL_SPEEDUP = 2.0  # by drafts, of an engine with one sequence and no earlier answers, as measured on three tasks:
# 2.3, 2.0 and 2.9 (`experiments/speculation`). With four it was 0.9 to 1.1, and 2.4 to 3.3 with earlier answers.
LEAST_TIMEOUT_S = 0.1  # shortest limit that a remedy advises; jitter of the machine would cut below it
STAGE_OF_SETTING = {  # settings that divide the seconds of a stage by as much as they grow
    "rollout.replicas": StepStage.GENERATION,
    "rollout.max_batch": StepStage.GENERATION,
    "environment.workers": StepStage.ENVIRONMENT,
    "environment.at_once": StepStage.ENVIRONMENT,
    "reward.workers": StepStage.REWARD,
    "learner.world_size": StepStage.LEARNER,
    "rollout.engine.learner_devices": StepStage.LEARNER,
    "packer.max_tokens": StepStage.LEARNER,
}
# shorten waits for environments, if these are the bottleneck
IN_FLIGHT_SETTINGS = ("rollout.batch_per_replica", "rollout.max_batch")


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting to change, e.g. `Remedy("reward.workers", "1 -> 4", "scorers are busy all the time")`."""

    key: str
    change: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.change} ({self.why})"

    @property
    def old(self) -> str:
        """Value before, e.g. 1."""
        return self.change.partition(" -> ")[0]

    @property
    def new(self) -> str:
        """Value to set, e.g. 4; where there is a choice, the first."""
        return self.change.partition(" -> ")[2].partition(",")[0]


def remedies(bottleneck: Bottleneck, config: RunConfig, step: MeanStep) -> tuple[Remedy, ...]:
    """Return the remedies for one bottleneck; try the first one first."""
    found = tuple(_BY_BOTTLENECK[bottleneck](config, step))
    if config.schedule is Schedule.ASYNC:
        return found
    why = "stages work side by side, and no batch waits for its longest trajectory"
    return (Remedy("schedule", f"{config.schedule} -> async", why), *found)


@dataclass(frozen=True, slots=True)
class Advice:
    """Remedies that are worth it, each with the most goodput that it gives, over the present goodput."""

    gains: tuple[tuple[Remedy, float], ...]
    without: str  # line for an advice without remedies


def advise_changes(diagnosis: Diagnosis, config: RunConfig, *, handed_over: float = 0.0) -> Advice:
    """Return the remedies against the bottleneck with their predicted gains; try the first one first.

    Remedies against hand-overs of shared devices follow; these take the share `handed_over` of the time.
    """
    bottleneck, step = diagnosis.binding.bottleneck, diagnosis.mean_step
    useful = diagnosis.binding.gain * without_bottleneck(bottleneck, step).measured_s / max(step.measured_s, 1e-9)
    gains, most = [], 1.0
    for one in remedies(bottleneck, config, step):
        removes = scaled_by(bottleneck, one) is None
        faster = step.measured_s / max(what_if_set(step, bottleneck, one), 1e-9)
        gain = faster * useful if removes else faster
        most = max(most, gain)
        if gain >= WORTH:
            gains.append((one, gain))
    at_once = 1.0 / max(1.0 - handed_over, 1e-9)  # goodput if devices changed hands in no time
    gains += [(one, at_once) for one in _cheaper_turns(config) if at_once >= WORTH]
    balanced = f"the stages are balanced: no change of one of them gives more than {most:.2f} x"
    held = "no setting of this run on this machine removes what limits it"
    if not config.gpus and [one.key for one, _ in gains] == [OTHER_MACHINES]:  # no setting for a laptop
        gains, held = [], f"{held}; more cores or a GPU would, or a Ray cluster ({OTHER_MACHINES})"
    return Advice(tuple(gains), balanced if diagnosis.binding.gain < WORTH else held)


def _cheaper_turns(config: RunConfig) -> Iterator[Remedy]:
    """Yield a KV cache that stays on shared devices, unless a new adapter drops it anyway; then longer turns."""
    lease = config.cluster.lease
    if config.lease_cache is LeaseCache.RELEASE and config.learner.lora is None:
        why = "no response computes its cache again; `laminar doctor` says if both fit"
        yield Remedy("cluster.lease.cache", "release -> keep", why)
    if lease.switch is LeaseSwitch.READY and config.schedule is Schedule.ASYNC:
        yield Remedy("cluster.lease.switch", "ready -> tail", "fewer turns, with older data")


def _generation(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield a larger decode batch where requests wait, then more replicas, then the remedies of the engine."""
    rollout = config.rollout
    if step.crowded_share > CROWDED_SHARE:
        yield from _larger_batch(config, step)
    has_room = rollout.engine.gpus or rollout.engine.hosts or _idle_cores(config, step) > 0
    if has_room:
        change = f"{rollout.replicas} -> {2 * rollout.replicas}"
        yield Remedy("rollout.replicas", change, "generation divides by their number")
    for setting, change, why in rollout.engine.remedies():
        yield Remedy(f"rollout.engine.{setting}", change, why)
    if not has_room:
        yield _other_machines(step)


def _larger_batch(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield a decode batch four times as large, or as large as the KV caches and a GPU's usual limit allow."""
    batch, use, engine = config.rollout.max_batch, step.use, config.rollout.engine
    largest = 4 * batch
    if use is not None and use.kv > 0:
        largest = min(largest, int(batch * RESERVE_SHARE * use.slots / use.kv))
    if engine.gpus or engine.emulates is not None:
        largest = min(largest, MOST_RUNNING)
    if largest < LEAST_GROWTH * batch:
        return
    change = f"{batch} -> {largest}"
    why = f"replicas have more than they decode at a time, {step.crowded_share:.0%} of the time"
    yield Remedy("rollout.max_batch", change, why)


def _long_tail(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield ways around the longest trajectories of a batch.

    First, replicas that drain may resume instead or repack stragglers, and engines may draft; then a wider
    staleness bound and a deadline of groups; at last a lower cap on response tokens, which changes the data.
    """
    rollout = config.rollout
    if rollout.on_new_weights is OnNewWeights.DRAIN:
        why = "partial rollout: a replica takes new prompts and weights beside its stragglers"
        if config.repacks:
            planner = config.repack.planner
            also = f": leave out repack.planner={planner} too" if planner is not None else ""
            why = f"{why}; repacking, which needs drain, ends with it{also}"
        yield Remedy("rollout.on_new_weights", "drain -> resume", why)
        if config.repack.planner == NO_PLANNER and rollout.replicas > 1:
            yield Remedy(
                "repack.planner",
                "none -> predictive",
                "stragglers move together, and other replicas load new weights",
            )
    if rollout.engine.drafts_exactly and rollout.engine.speculation is Speculation.NONE:
        why = "the last responses take several tokens in a pass, and stay the same; most where prompts come again"
        yield Remedy(SPECULATION, "none -> ngram", why)
    if config.schedule is Schedule.ASYNC:
        yield from _wider_bound(
            config, step, more=2, why="other groups continue while a group waits for its last response"
        )
    cap = rollout.sampling.max_new_tokens
    if rollout.group_deadline_s is None and step.group_p90_s > 0:
        why = "groups close without stragglers"
        yield Remedy("rollout.group_deadline_s", f"none -> {max(2 * step.group_p90_s, LEAST_TIMEOUT_S):.1f}", why)
    yield Remedy("rollout.sampling.max_new_tokens", f"below {cap}", "a cap on all, logged with each that it cuts")


def _environment(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield more room for turns where it is full, else more trajectories in flight; then faster turns."""
    environment = config.environment  # emulated ones have no room of their own
    room = math.inf if environment is None else environment.workers * environment.at_once
    away = f"about {step.away:.0f} are away at a time"
    is_full = step.away > FULL_ROOM_SHARE * room
    if environment is not None and is_full:  # more in flight would only wait longer
        at_once = environment.at_once
        yield Remedy("environment.at_once", f"{at_once} -> {2 * at_once}", f"{away}, and {room} may work")
    else:
        yield from _more_in_flight(config)
        yield from _wider_bound(config, step, more=2, why="more may be under way while environments work")
    if environment is not None and _idle_cores(config, step) > 0:
        workers = environment.workers
        if is_full or step.away > TURNS_PER_PROCESS * workers:
            why = f"{away}, which processes share"
            yield Remedy("environment.workers", f"{workers} -> {2 * workers}", why)
    why = f"p95 of a turn is {step.turn_p95_s:.2f} s"
    yield Remedy("environment", "faster turns, e.g. a cache of repeated calls", why)


def _more_in_flight(config: RunConfig) -> Iterator[Remedy]:
    """Yield twice as many trajectories in flight, with the setting that the policy for new weights reads."""
    rollout, why = config.rollout, "those that are away hold no slot, and others can have it"
    if rollout.on_new_weights is OnNewWeights.DRAIN:
        change = f"{rollout.batch_per_replica} -> {2 * rollout.batch_per_replica}"
        yield Remedy("rollout.batch_per_replica", change, why)
    else:  # a trajectory counts as running there while its environment works
        yield Remedy("rollout.max_batch", f"{rollout.max_batch} -> {2 * rollout.max_batch}", why)


def _reward(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield more reward workers as long as they find cores, then a shorter limit, then a cache.

    Enough workers make scoring as fast as generation or training, at most `MOST_WORKER_GROWTH` times as many.
    Workers that wait for servers need no core.
    """
    workers = config.reward.workers
    others = max(step.times.generation_s, step.times.learner_s, 1e-9)
    needed = max(min(math.ceil(workers * step.times.reward_s / others), MOST_WORKER_GROWTH * workers), 2 * workers)
    most = needed if config.reward.waits_for_servers else min(needed, workers + _idle_cores(config, step))
    if most > workers:
        yield Remedy("reward.workers", f"{workers} -> {most}", "scoring divides by their number")
    limit = max(2 * step.reward_p95_s, LEAST_TIMEOUT_S)
    if limit < config.reward.timeout_s:
        why = f"p95 of a reward is {step.reward_p95_s:.2f} s: a shorter limit frees workers from those that hang"
        yield Remedy("reward.timeout_s", f"{config.reward.timeout_s:g} -> {limit:.1f}", why)
    yield Remedy("reward.use", "cache its results", "samples of a prompt share their problem")


def _idle_cores(config: RunConfig, step: MeanStep) -> int:
    """Return the number of idle cores; a huge number where it is unknown, as on a cluster's machines."""
    if step.use is None or not step.use.cores or config.cluster.address is not None:
        return sys.maxsize
    return int(step.use.cores * (1 - step.use.cpu))


def _may_stage(config: RunConfig) -> bool:
    """Whether the reference pass is the learner's and may be a stage, which replay does not allow."""
    return config.algorithm.reference_pass is ReferencePass.LEARNER and not config.buffer.replay.share


def _may_correct(config: RunConfig) -> bool:
    """Whether the loss has no correction for older weights and may have one; trajectory balance needs none."""
    algorithm = config.algorithm
    return algorithm.correction is Correction.NONE and algorithm.objective is not Objective.BALANCE


def _reference(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield a reference pass outside of the learner, then none; for a teacher, a server or a smaller one."""
    algorithm = config.algorithm
    if algorithm.has_reference and _may_stage(config):
        yield Remedy("algorithm.reference_pass", "learner -> stage", "it runs beside scoring, off the learner")
    if algorithm.has_reference:
        yield Remedy("algorithm.kl_coef", f"{algorithm.kl_coef:g} -> 0", "without a KL term there is no pass")
    if algorithm.teacher is not None:
        yield Remedy("algorithm.teacher", f"{algorithm.teacher} -> a smaller one", "a shorter pass")


def _learner(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield less work in a step, then more GPUs for it, compilation and adapters."""
    learner, algorithm = config.learner, config.algorithm
    yield from _less_work(config, step)
    if config.rollout.engine.emulates is not None:  # of its learner nothing else can change
        change = f"{config.learner_ranks} -> {2 * config.learner_ranks}"
        yield Remedy("rollout.engine.learner_devices", change, "a step divides by it")
        return
    if (
        step.reference_in_learner
        and _may_stage(config)
        and step.reference_s > REFERENCE_SHARE * step.times.learner_s
    ):
        yield Remedy("algorithm.reference_pass", "learner -> stage", f"{step.reference_s:.2f} s of its step")
    if algorithm.updates_per_step > 1:
        yield Remedy("algorithm.updates_per_step", f"{algorithm.updates_per_step} -> 1", "fewer optimizer steps")
    on_gpus = config.learner_device is Device.CUDA
    if on_gpus or _idle_cores(config, step) > 0:
        change = f"{learner.world_size} -> {2 * learner.world_size}"
        yield Remedy("learner.world_size", change, "a step divides by it")
    if not learner.compile and on_gpus:
        yield Remedy("learner.compile", "false -> true", "faster layers")
    if learner.lora is None:
        yield Remedy("learner.lora.rank", "none -> 16", "gradients and optimizer for adapters alone")


def _less_work(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield larger microbatches where a rank has many, and activations that are computed once.

    A microbatch of more than a second on CPUs is large enough: another would take memory and save no time.
    """
    on_cores = config.learner_device is Device.CPU and config.rollout.engine.emulates is None
    is_long = on_cores and step.times.learner_s > LONG_MICROBATCH_S * step.microbatches
    if step.microbatches > MANY_MICROBATCHES and not is_long:
        change = f"{config.packer.max_tokens} -> {2 * config.packer.max_tokens}"
        why = f"a rank computes {step.microbatches:.0f} microbatches a step"
        yield Remedy("packer.max_tokens", change, why)
    if config.learner.recompute is not Recompute.NONE and config.rollout.engine.emulates is None:
        change = f"{config.learner.recompute} -> none"
        yield Remedy("learner.recompute", change, "activations are computed once")


def _weights(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield ways to bring a version to replicas sooner, or less often.

    The relay's shape comes first; then fewer or smaller versions; then a staleness bound that hides
    the transfer; the network itself comes last.
    """
    learner, relay = config.learner, config.relay
    if relay.fanout > 1:
        yield Remedy("relay.fanout", f"{relay.fanout} -> 1", "a chain takes least time")
    yield from _rarer_versions(config, step)
    if learner.lora is None:
        yield Remedy("learner.lora.rank", "none -> 16", "adapters are a few percent of the bytes")
    yield from _wider_bound(config, step, more=2, why="replicas continue under the previous version")
    yield Remedy("relay.host", f"{relay.host} -> an address of a faster network", "the links themselves are slow")


def _rarer_versions(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield half as many versions with the staleness bound that they need, unless data would be too old."""
    every, bound = 2 * config.learner.publish_every, config.staleness.enforced
    oldest = every - (config.schedule is not Schedule.ONE_STEP)
    if oldest <= WIDEST_BOUND and step.age.lost <= MOST_LOST_SHARE:
        needed = f", with staleness.max_staleness={oldest}" if bound is not None and bound < oldest else ""
        change = f"{config.learner.publish_every} -> {every}"
        yield Remedy("learner.publish_every", change, f"fewer versions travel{needed}")


def _wider_bound(config: RunConfig, step: MeanStep, *, more: int, why: str) -> Iterator[Remedy]:
    """Yield a staleness bound wider by `more`, unless it is at `WIDEST_BOUND` or the data is too old already."""
    bound = config.staleness.max_staleness
    if bound is not None and bound < WIDEST_BOUND and step.age.lost <= MOST_LOST_SHARE:
        yield Remedy("staleness.max_staleness", f"{bound} -> {min(bound + more, WIDEST_BOUND)}", why)


def _freshness(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield ways to let more trajectories begin within the staleness bound.

    A wider bound comes first, with corrections for older data; then smaller batches; then fewer replicas, because
    a bound at `WIDEST_BOUND` leaves no work for more.
    """
    bound, replicas = config.staleness.max_staleness, config.rollout.replicas
    capacity = Remedy("buffer.capacity", f"{config.capacity} -> {2 * config.capacity}", "it bounds what may begin")
    if bound is None and config.schedule is Schedule.ASYNC:
        yield capacity
    if bound is not None:
        why = f"useful staleness ends at about 4 to {WIDEST_BOUND}"
        yield from _wider_bound(config, step, more=max(2, bound), why=why)
        if _may_correct(config):
            why = "corrects for what older weights drew; or algorithm.name=decoupled_ppo"
            yield Remedy("algorithm.correction", "none -> tis", why)
        if step.stale_share > 0 and StalePolicy.DROP in config.staleness.policies:
            why = f"{step.stale_share:.0%} of the tokens were dropped as too old"
            yield Remedy("staleness.policies", "drop -> reweight", why)
    yield from _smaller_batches(config)
    if bound is not None and bound >= WIDEST_BOUND and replicas > 1:
        why = f"no more work fits within {bound}, and half of them would do it"
        yield Remedy("rollout.replicas", f"{replicas} -> {replicas // 2}", why)
    elif bound is not None and config.schedule is Schedule.ASYNC:
        yield capacity


def _smaller_batches(config: RunConfig) -> Iterator[Remedy]:
    """Yield half of the batch that a draining replica must finish before it takes new weights."""
    batch = config.rollout.batch_per_replica
    if config.rollout.on_new_weights is OnNewWeights.DRAIN and batch > config.rollout.group_size:
        yield Remedy("rollout.batch_per_replica", f"{batch} -> {batch // 2}", "replicas take new weights sooner")


def _stale_data(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield a narrower staleness bound with the publications that the bound needs, then corrections.

    A lower learning rate comes last, since it slows learning of all data.
    """
    bound, why = config.staleness.max_staleness, describe_cost(step)
    narrower = FIRST_BOUND if bound is None else max(min(bound // 2, WIDEST_BOUND), 1)
    every, rarest = config.learner.publish_every, narrower + (config.schedule is not Schedule.ONE_STEP)
    if every > rarest:
        yield Remedy("learner.publish_every", f"{every} -> {rarest}", f"{why}; the narrower bound needs it")
    if bound is None or narrower < bound:
        yield Remedy("staleness.max_staleness", f"{'none' if bound is None else bound} -> {narrower}", why)
    if _may_correct(config):
        yield Remedy("algorithm.correction", "none -> tis", "corrects for what older weights drew")
    yield from _smaller_batches(config)
    change = f"{config.learner.lr:g} -> {config.learner.lr / 2:g}"
    yield Remedy("learner.lr", change, "smaller steps keep the policy nearer to the sampling policy")


def _cpu(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield savings of work, and at last other machines, since more processes would share the same cores."""
    generation_s, learner_s = step.times.generation_s, step.times.learner_s
    if step.crowded_share > CROWDED_SHARE and generation_s >= learner_s:
        yield from _larger_batch(config, step)
    elif learner_s >= generation_s:
        yield from _less_work(config, step)
    replicas = config.rollout.replicas
    if replicas > 1:
        yield Remedy(
            "rollout.replicas", f"{replicas} -> {replicas // 2}", "as fast on full cores, with less memory"
        )
    yield _other_machines(step)


def _other_machines(step: MeanStep) -> Remedy:
    cores = step.use.cores if step.use is not None else 0
    why = f"its machines add cores; here {cores} are full, and more replicas, workers or ranks would share them"
    return Remedy(OTHER_MACHINES, "none -> address of a Ray cluster", why)


def _sparse(config: RunConfig, step: MeanStep) -> Iterator[Remedy]:
    """Yield ways to more groups with a success: larger groups, refilled steps, easier prompts."""
    size = config.rollout.group_size
    yield Remedy("rollout.group_size", f"{size} -> {2 * size}", "a wider search finds the first right answer")
    keeps_all = config.algorithm.trains_on_all_groups
    if not keeps_all and config.rollout.without_signal is not WithoutSignal.REFILL:
        change = f"{config.rollout.without_signal} -> refill"
        yield Remedy("rollout.without_signal", change, "steps are filled with groups that teach")
    yield Remedy("algorithm.name", f"{config.algorithm.name} -> tba", "an objective that learns off-policy")
    yield Remedy("data.train", "easier prompts first", f"{step.hopeless_share:.0%} of the groups had no success")


_BY_BOTTLENECK = {
    Bottleneck.GENERATION: _generation,
    Bottleneck.LONG_TAIL: _long_tail,
    Bottleneck.ENVIRONMENT: _environment,
    Bottleneck.REWARD: _reward,
    Bottleneck.REFERENCE: _reference,
    Bottleneck.WEIGHTS: _weights,
    Bottleneck.LEARNER: _learner,
    Bottleneck.FRESHNESS: _freshness,
    Bottleneck.STALE_DATA: _stale_data,
    Bottleneck.SPARSE_REWARD: _sparse,
    Bottleneck.CPU: _cpu,
}


# ---- predictions


def what_if(step: MeanStep, stage: StepStage, factor: float = 2.0) -> float:
    """Predict the seconds of a step with `factor` times as much of a stage, e.g. twice the replicas.

    A step never takes less than its work on all cores, since more processes share the cores.
    """
    times = step.times
    predicted = predict(step.schedule, measured_s=step.measured_s, now=times, then=times.faster(stage, factor))
    return max(predicted, min(step.cpu_s, step.measured_s))


def what_if_set(step: MeanStep, bottleneck: Bottleneck, remedy: Remedy) -> float:
    """Predict the seconds of a step with the new value of a remedy against a bottleneck.

    A remedy that scales no stage is taken to remove the bottleneck, so its prediction is the best case. On full
    cores fewer processes leave a step as it is, since they divide the same cores.
    """
    if remedy.key == SPECULATION:
        then = step.times.with_faster_tail(TAIL_SPEEDUP)
        predicted = predict(step.schedule, measured_s=step.measured_s, now=step.times, then=then)
        return max(predicted, min(step.cpu_s, step.measured_s))
    stage = scaled_by(bottleneck, remedy)
    if stage is not None:
        factor = float(remedy.new) / float(remedy.old)
        return step.measured_s if bottleneck is Bottleneck.CPU and factor < 1 else what_if(step, stage, factor)
    without_s = without_bottleneck(bottleneck, step).measured_s
    adds_cores = remedy.key == OTHER_MACHINES
    return without_s if adds_cores else max(without_s, min(step.cpu_s, step.measured_s))


def scaled_by(bottleneck: Bottleneck, remedy: Remedy) -> StepStage | None:
    """Return the stage whose seconds a remedy divides by the growth of its setting; None: no stage."""
    if bottleneck is Bottleneck.ENVIRONMENT and remedy.key in IN_FLIGHT_SETTINGS:
        return StepStage.ENVIRONMENT
    return STAGE_OF_SETTING.get(remedy.key)


def steps_under(step: MeanStep) -> dict[Schedule, tuple[float, StepStage]]:
    """Predict the seconds of a step under each schedule, and the stage that takes most of it."""
    found: dict[Schedule, tuple[float, StepStage]] = {}
    for schedule in Schedule:
        times = _times_under(schedule, step)
        own = schedule is step.schedule
        step_s = step.measured_s if own else max(compose(schedule, times), step.cpu_s)
        found[schedule] = step_s, max(StepStage, key=times.seconds_of)
    return found


def _times_under(schedule: Schedule, step: MeanStep) -> StageTimes:
    """Return the times of the stages under a schedule; a batch takes as long as its longest trajectory."""
    times = step.times
    if schedule in (step.schedule, Schedule.ASYNC):
        return times
    moved = max(times.weights_s, step.transfer_s + step.load_s)
    longer = max(1.0, step.longest_s / max(times.generation_s + times.environment_s, 1e-9))
    return replace(
        times,
        generation_s=times.generation_s * longer,
        environment_s=times.environment_s * longer,
        weights_s=moved,
    )
