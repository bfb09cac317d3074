"""Diagnosis of a run: its bottleneck by name, the evidence, and the bottleneck that would follow.

A bottleneck's gain is the goodput without the bottleneck over the goodput with it, so a bottleneck that another
bottleneck hides gains nothing. The terminal, the page, `/metrics` and `laminar advise` show the diagnosis.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from laminar_lab.report.mean_step import MeanStep, StepStage, compose, predict
from laminar_py.config.rollout import Schedule
from laminar_py.config.run import RunConfig

WORTH = 1.1  # goodput without a bottleneck over the present, below which nothing limits a run
MOST_GAIN = 100  # above it the number says nothing
WORTH_MENTIONING = 0.05  # share that a bound on staleness costs, below which the bound fits
SPARSE = 0.5  # share of groups without any success above which sparse rewards may be the bottleneck
LEAST_S = 0.005  # of a stage, below which a line leaves the stage out
FEW_ACCEPTED = 0.2  # of the drafted tokens, below which drafts hardly pay for their passes
NO_STEP = "no learner step was completed, so what limits the run is unknown"


class Bottleneck(StrEnum):
    """Resource or condition that limits a run; `MEANINGS` explains each to the user."""

    GENERATION = "generation"
    LONG_TAIL = "long tail"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    REFERENCE = "reference"
    WEIGHTS = "weights"
    LEARNER = "learner"
    FRESHNESS = "freshness"
    STALE_DATA = "stale data"
    SPARSE_REWARD = "sparse reward"
    CPU = "cpu cores"


STAGE_OF = {Bottleneck(stage): stage for stage in StepStage}  # a bottleneck that is a stage has the stage's name
MEANINGS = {
    Bottleneck.GENERATION: "Replicas generate as fast as they can, and the rest of the run waits for them.",
    Bottleneck.LONG_TAIL: "A few long responses keep replicas nearly empty while all else waits for the last one.",
    Bottleneck.ENVIRONMENT: "Trajectories wait for their environments, and too few others fill the slots.",
    Bottleneck.REWARD: "Responses are finished faster than they are scored.",
    Bottleneck.REFERENCE: "The pass of the reference or the teacher takes more of a step than any other work.",
    Bottleneck.WEIGHTS: "New weights travel to the replicas for so long that replicas are empty meanwhile.",
    Bottleneck.LEARNER: "Trajectories are there faster than the learner trains on them.",
    Bottleneck.FRESHNESS: "The bound on staleness keeps replicas from starting new work, though no stage is busy.",
    Bottleneck.STALE_DATA: "The weights are so far from the sampling policy that much of the data counts little.",
    Bottleneck.SPARSE_REWARD: "Most responses never succeed, and teach nothing.",
    Bottleneck.CPU: "Processes fill the machine's cores: more processes would share the cores, and be no faster.",
}
BALANCED = "The stages keep pace with each other: no single one of them, if it were free, would save a tenth."
HOW = {
    Schedule.SYNC: "one after another",
    Schedule.ONE_STEP: "a batch ahead",
    Schedule.ASYNC: "side by side",
}


@dataclass(frozen=True, slots=True)
class JudgedBottleneck:
    """A bottleneck with its gain, e.g. LEARNER with 1.3: goodput would be 1.3 times as high without it."""

    bottleneck: Bottleneck
    gain: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The mean step, the bottleneck that binds it, and the bottleneck that would bind without the first."""

    mean_step: MeanStep
    binding: JudgedBottleneck
    next: JudgedBottleneck
    max_staleness: int | None
    idle: float | None  # share of goodput lost to idle replicas and stale drops; None: no bound is set

    @property
    def is_balanced(self) -> bool:
        """Whether no bottleneck costs 10 % of the goodput."""
        return self.binding.gain < WORTH

    @property
    def verdict(self) -> str:
        """The bottleneck in two or three words, e.g. "GENERATION", or "NOTHING BY 10 %"."""
        return "NOTHING BY 10 %" if self.is_balanced else str(self.binding.bottleneck).upper()

    @property
    def describe_gain(self) -> str:
        """E.g. "at most 1.30 x"."""
        gain = self.binding.gain
        return f"at most {gain:.2f} x" if gain < MOST_GAIN else f"more than {MOST_GAIN} x"

    @property
    def evidence(self) -> str:
        """Evidence for the verdict: of the bottleneck, or the shares of the two busiest stages."""
        step, binding = self.mean_step, self.binding
        if not self.is_balanced:
            return binding.evidence
        shares = {stage: step.times.seconds_of(stage) / max(step.measured_s, 1e-9) for stage in StepStage}
        busiest = sorted(shares, key=lambda stage: -shares[stage])[:2]
        busy = ", ".join(f"{stage} takes {min(shares[stage], 1.0):.0%} of a step" for stage in busiest)
        return f"{busy}; without {binding.bottleneck} {self.describe_gain} the goodput"


def diagnose(step: MeanStep, config: RunConfig) -> Diagnosis:
    """Return the bottleneck with the largest gain, and the bottleneck that would follow it."""
    gains = _gains(step)
    bottleneck = _largest(gains, step)
    after = without_bottleneck(bottleneck, step)
    later = {name: gain for name, gain in _gains(after).items() if name is not bottleneck}
    following = _largest(later, after)
    bound, idle = config.staleness.max_staleness, None
    if step.schedule is Schedule.ASYNC:
        idle = 0.0 if bound is None else 1 - 1 / max(gains[Bottleneck.FRESHNESS], 1.0)
    return Diagnosis(
        mean_step=step,
        binding=JudgedBottleneck(bottleneck, gains[bottleneck], find_evidence(bottleneck, step)),
        next=JudgedBottleneck(following, later[following], find_evidence(following, step)),
        max_staleness=bound,
        idle=idle,
    )


def without_bottleneck(bottleneck: Bottleneck, step: MeanStep) -> MeanStep:
    """Return the mean step as it would be without a bottleneck; without full cores means with twice the cores."""
    times = step.times
    shortest_s = min(step.cpu_s, step.measured_s) if step.cores_full else 0.0
    match bottleneck:
        case Bottleneck.CPU:
            return replace(step, measured_s=step.measured_s - shortest_s / 2, cpu_s=0.0) if shortest_s else step
        case Bottleneck.STALE_DATA:
            return replace(step, age=replace(step.age, lost=0.0))
        case Bottleneck.SPARSE_REWARD:
            return replace(step, hopeless_share=0.0) if step.hopeless_share > SPARSE else step
        case Bottleneck.FRESHNESS if step.schedule is Schedule.ASYNC:
            composed = compose(step.schedule, times)
            measured = min(max(composed, shortest_s), step.measured_s)
            return replace(step, measured_s=measured, held_s=0.0, stale_share=0.0)
        case Bottleneck.FRESHNESS:
            return replace(step, stale_share=0.0)
        case Bottleneck.LONG_TAIL:
            then = times.without_tail()
        case Bottleneck.REFERENCE if step.reference_in_learner:
            then = replace(times, learner_s=max(0.0, times.learner_s - step.reference_s))
        case _:
            then = times.without(STAGE_OF[bottleneck])
    measured = predict(step.schedule, measured_s=step.measured_s, now=times, then=then)
    return replace(step, times=then, measured_s=max(measured, shortest_s))


def _gains(step: MeanStep) -> dict[Bottleneck, float]:
    """Return for each bottleneck the goodput without it over the goodput now."""
    now = _useful_share(step) / max(step.measured_s, 1e-9)
    gains = {}
    for bottleneck in Bottleneck:
        without = without_bottleneck(bottleneck, step)
        gains[bottleneck] = _useful_share(without) / max(without.measured_s, 1e-9) / max(now, 1e-12)
    return gains


def _largest(gains: dict[Bottleneck, float], step: MeanStep) -> Bottleneck:
    """Return the bottleneck with the largest gain; among equal gains the one with most of the step."""
    times = step.times
    seconds = {bottleneck: times.seconds_of(stage) for bottleneck, stage in STAGE_OF.items()}
    seconds |= {Bottleneck.LONG_TAIL: times.tail_s, Bottleneck.GENERATION: times.generation_s - times.tail_s}
    return max(gains, key=lambda bottleneck: (round(gains[bottleneck], 2), seconds.get(bottleneck, 0.0)))


def _useful_share(step: MeanStep) -> float:
    return (1 - step.stale_share) * (1 - step.hopeless_share) * (1 - step.age.lost)


def find_evidence(bottleneck: Bottleneck, step: MeanStep) -> str:
    """Return the evidence for a bottleneck in one line."""
    times, whole_s = step.times, step.measured_s

    def share(seconds: float) -> str:
        return f"{seconds / whole_s:.0%}" if whole_s else "0%"

    match bottleneck:
        case Bottleneck.GENERATION:
            use = step.use
            filled = (
                ""
                if use is None
                else f", with {use.slots:.0%} of their slots and {use.kv:.0%} of their KV caches in use"
            )
            waits = f"the learner waits for a batch {share(step.waited_s)}"
            return f"replicas are busy {share(times.generation_s)} of the time{filled}; {waits}"
        case Bottleneck.LONG_TAIL:
            few = f"replicas have less than a quarter of their usual batch {share(times.tail_s)} of the time"
            return f"{few}, held by the last long responses; p95 of lengths is {step.length_ratio:.1f} x p50"
        case Bottleneck.ENVIRONMENT:
            waits = f"replicas wait for their trajectories' environments {share(times.environment_s)} of the time"
            return f"{waits}; about {step.away:.0f} are away at a time, p95 of a turn is {step.turn_p95_s:.2f} s"
        case Bottleneck.REWARD:
            busy = share(times.reward_s)
            return f"scorers are busy {busy} of the time; p95 of a reward is {step.reward_p95_s:.2f} s"
        case Bottleneck.REFERENCE:
            where = "in the learner" if step.reference_in_learner else "as a stage"
            return f"the reference model works {share(step.reference_s)} of the time, {where}"
        case Bottleneck.LEARNER:
            idle = share(step.held_s)
            busy = share(times.learner_s)
            return f"the learner is busy {busy} of the time; replicas are idle {idle}, with no room to begin"
        case Bottleneck.WEIGHTS:
            late, way = share(times.weights_s), f"{step.transfer_s:.2f} s"
            return f"replicas are idle {late} of the time, waiting for newer weights: {way} a step on the way"
        case Bottleneck.FRESHNESS:
            idle = share(step.held_s)
            held = f"replicas are idle {idle} of the time: nothing may begin, though no stage fills the step"
            if not step.stale_share:
                return held
            return f"{held}, and {step.stale_share:.0%} of the tokens are dropped as too old"
        case Bottleneck.STALE_DATA:
            return f"{describe_cost(step)}: {_describe_divergence(step)}"
        case Bottleneck.CPU:
            cpu, cores = (step.use.cpu, step.use.cores) if step.use is not None else (0.0, 0)
            longest = max(StepStage, key=times.seconds_of)
            return f"processes keep {cpu:.0%} of the {cores} cores busy; most of a step takes {longest}"
        case Bottleneck.SPARSE_REWARD:
            return f"in {step.hopeless_share:.0%} of the groups no member had any success"


def describe_diagnosis(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield lines with headings: the bottleneck, the bound on staleness, the use of engines, the stages."""
    binding, following, step = diagnosis.binding, diagnosis.next, diagnosis.mean_step
    yield "limited by", f"{diagnosis.verdict}: {diagnosis.evidence}"
    without = "with twice the cores" if binding.bottleneck is Bottleneck.CPU else "without it"
    gain = diagnosis.describe_gain
    then = f"then {following.bottleneck} limits, now: {following.evidence}"
    if not diagnosis.is_balanced:
        yield without, f"{gain} the goodput (useful trained tokens per second); {then}"
    if diagnosis.idle is not None:
        yield "staleness", _describe_bound(diagnosis.max_staleness, idle=diagnosis.idle, step=step)
    if step.use is not None:
        use = step.use
        engines = f"{use.slots:.0%} of the engines' slots, {use.kv:.0%} of their KV caches"
        yield "in use", f"{engines}, {use.cpu:.0%} of {use.cores} cores" if use.cores else engines
    if step.drafts.drafted:
        yield "drafts", _describe_drafts(step)
    why = "cluster.share=true" if step.in_turns else f"schedule={step.schedule}"
    stages = f"its stages, {HOW[step.schedule]} ({why}): {_describe_stages(step)}"
    yield "a step", f"takes {step.measured_s:.2f} s; {stages}"


def _describe_drafts(step: MeanStep) -> str:
    """Return how well drafts did in one line, with the remedy if they are useless."""
    counts = step.drafts
    share = counts.accepted / counts.drafted
    words = (
        f"{share:.0%} of the drafted tokens are accepted, {counts.accepted_per_pass:.2f} in a pass of a sequence"
    )
    if step.speedups:
        sizes = ", ".join(f"{speedup:.2f} x with {size}" for size, speedup in step.speedups.items())
        words = f"{words}; engines are faster by {sizes} sequences at a time"
    useless = "useless here: set rollout.engine.speculation=none"
    gains = max(step.speedups.values(), default=0.0) > 1
    return f"{words}; {useless}" if share < FEW_ACCEPTED and not gains else words


def _describe_bound(max_staleness: int | None, *, idle: float, step: MeanStep) -> str:
    """Return the two costs of the bound on staleness, the larger first, in one line."""
    lost, kl = describe_cost(step), _describe_divergence(step)
    if max_staleness is None:
        return f"staleness.max_staleness=null: nothing bounds staleness; {lost} ({kl})"
    costs = [f"{idle:.0%} of the goodput is lost to idle replicas and dropped work", lost]
    fit = "too tight"
    if max(idle, step.age.lost) < WORTH_MENTIONING:
        fit = "neither too tight nor too loose"
    elif idle < step.age.lost:
        fit, costs = "too loose", costs[::-1]
    if step.age.oldest > max_staleness:
        costs.append(f"data above it were up to {step.age.oldest} learner steps old")
    return f"staleness.max_staleness={max_staleness} is {fit}: {'; '.join(costs)} ({kl})"


def describe_cost(step: MeanStep) -> str:
    """Return the cost of old data in one phrase."""
    return f"old data costs {step.age.lost:.0%} of the effective sample size"


def _describe_divergence(step: MeanStep) -> str:
    """Return the KL divergence of old data in one phrase."""
    if not step.age.kl:
        return "KL by staleness is not on record"
    values, ages = ", ".join(f"{value:.1g}" for value in step.age.kl.values()), ", ".join(step.age.kl)
    return f"KL {values} nats at staleness {ages}"


def _describe_stages(step: MeanStep) -> str:
    """Return the seconds of each stage in one phrase."""
    times = {stage: step.times.seconds_of(stage) for stage in StepStage}
    shown = {stage: f"{stage} {seconds:.2f} s" for stage, seconds in times.items() if seconds >= LEAST_S}
    if StepStage.GENERATION in shown and step.times.tail_s >= LEAST_S:
        shown[StepStage.GENERATION] += f" ({step.times.tail_s:.2f} s of it with the last few responses)"
    if StepStage.LEARNER in shown and step.reference_in_learner and step.reference_s >= LEAST_S:
        shown[StepStage.LEARNER] += f" ({step.reference_s:.2f} s of it the reference model)"
    return ", ".join(shown.values()) or f"none takes {LEAST_S} s"
