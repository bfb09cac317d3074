"""Alarms on data: groups of copies, rewards without information, uneven drops, batches in part. Pure."""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from laminar_py.config.algorithm import Advantage, AlgorithmConfig
from laminar_py.config.changes import BOUND
from laminar_py.config.rollout import StalenessConfig, StalePolicy
from laminar_py.learner.losses.advantages import STD_FLOOR
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.events import (
    Assigned,
    Consumed,
    Cut,
    Dropped,
    Evaluated,
    Finished,
    Ready,
    Scored,
    SettingChanged,
    Stepped,
)
from laminar_py.records.proofs import Alarm
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import Cap, DropReason, Kind, Prompt

ODDS = 1e9  # at which a test decides: in a sound run it errs after a billion observations or more
ROUNDING = 1e-4  # of rewards by token in fp32
LIVE_GROUPS = 8192  # most groups whose responses are compared


class GroupCheck:
    """Tests whether the `size` samples of a group are draws of their own, or copies of each other.

    A test by betting: a sample that equals its group's sample 0, whose probability is p, multiplies the odds by
    (1/2 + p/2) / p, any other sample by 1/2. For draws of their own the mean of a factor is 1. Odds below 1 begin
    again at 1, so that a failure that begins late is found as soon. A group counts once it is whole, since equal
    samples end at the same time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: OrderedDict[str, dict[int, tuple[int, float]]] = (
            OrderedDict()
        )  # group -> sample -> digest, log p
        self._odds = 0.0  # in logs

    def observe(self, score: Score, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take the score of a training response."""
        if row.kind is not Kind.TRAIN or not score.response_digest:
            return ()
        if (group := self._open.get(row.group_id)) is None:
            group = self._open[row.group_id] = {}
            if len(self._open) > LIVE_GROUPS:
                self._open.popitem(last=False)
        group[row.sample_index] = (score.response_digest, score.response_logprob)
        if len(group) < self._size:
            return ()
        del self._open[row.group_id]
        digest, logprob = group[min(group)]
        copies = [other for other, _ in group.values()].count(digest) - 1
        of_copy = math.log(0.5 + 0.5 * math.exp(logprob)) - logprob
        self._odds = max(0.0, self._odds + copies * of_copy + (self._size - 1 - copies) * math.log(0.5))
        if self._odds <= math.log(ODDS):
            return ()
        self._odds = 0.0
        words = (
            f"the samples of a group are copies, up to {row.group_id} (version {row.last_version}): one seed draws"
            " all; look at the engine's seeds"
        )
        return (Alarm("groups", f"replica-{row.replica}", words),)


@dataclass(slots=True, kw_only=True)
class _Rewards:
    """Rewards of a task so far."""

    count: int = 0
    least: float = math.inf
    largest: float = -math.inf
    groups: int = 0  # in which both rewards and lengths differ
    products: float = 0.0  # of centred rewards and lengths within groups
    rewards: float = 0.0  # squares
    lengths: float = 0.0


DIFFERS = 3  # of a group: rewards (1) and lengths (2)


@dataclass(slots=True, kw_only=True)
class _Group:
    """Means over the members of a group so far."""

    task: str
    reward: float = 0.0
    length: float = 0.0
    count: int = 0
    differs: int = 0


class RewardsCheck:
    """Names a task whose reward never varied, or that follows the length of responses alone."""

    LEAST = 256  # responses of a task
    LEAST_GROUPS = 32
    EVERY = 32  # responses between tests
    ALONE = 0.98  # correlation with length within groups

    def __init__(self, task_of: Callable[[LiveTrajectory], str]) -> None:
        self._task_of = task_of
        self._by_task: defaultdict[str, _Rewards] = defaultdict(_Rewards)
        self._open: OrderedDict[str, _Group] = OrderedDict()
        self._last: list[tuple[LiveTrajectory, float]] = []  # responses and rewards that are not added yet
        self._varied = False  # before the run was resumed

    def restore(self, rewards: tuple[float, float]) -> None:
        """Take the worst and the best training reward of a run that resumes."""
        self._varied = rewards[0] < rewards[1]

    def scored(self, event: Scored, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take the reward of a training response."""
        self._last.append((row, event.reward))
        return self._add() if len(self._last) >= self.EVERY else ()

    def _add(self) -> list[Alarm]:
        """Add the last responses to the sums of their tasks, by Welford's update, and test these tasks."""
        tasks = set()
        for row, reward in self._last:
            if (group := self._open.get(row.group_id)) is None:
                group = self._open[row.group_id] = _Group(task=self._task_of(row))
                if len(self._open) > LIVE_GROUPS:
                    self._open.popitem(last=False)
            tasks.add(group.task)
            seen = self._by_task[group.task]
            seen.count += 1
            if not seen.least <= reward <= seen.largest:
                seen.least, seen.largest = min(seen.least, reward), max(seen.largest, reward)
            by_reward, by_length = reward - group.reward, row.length - group.length
            count = group.count + 1
            share = group.count / count
            seen.products += share * by_reward * by_length
            seen.rewards += share * by_reward * by_reward
            seen.lengths += share * by_length * by_length
            group.count = count
            group.reward += by_reward / count
            group.length += by_length / count
            if group.differs < DIFFERS and share:
                group.differs |= (by_reward != 0) + 2 * (by_length != 0)
                seen.groups += group.differs == DIFFERS
        self._last.clear()
        return [alarm for task in sorted(tasks) for alarm in self._test(task, self._by_task[task])]

    def _test(self, task: str, seen: _Rewards) -> Iterable[Alarm]:
        words = ""
        if seen.count >= self.LEAST and seen.least == seen.largest and not self._varied:
            words = f"is {seen.least:g} for each of {seen.count} responses; look at it, or leave the source out"
        elif seen.groups >= self.LEAST_GROUPS:
            correlation = seen.products / math.sqrt(seen.rewards * seen.lengths)
            if abs(correlation) > self.ALONE:
                ways = "rises" if correlation > 0 else "falls"
                within = f"(correlation {correlation:.3f} within {seen.groups} groups)"
                words = f"{ways} with the length of responses alone {within}; look at it"
        return (Alarm("rewards", f"task {task!r}" if task else "run", f"the reward {words}"),) if words else ()


# VERSION_LOST takes the responses under way at a stop, mostly long ones, and their prompts are issued again
NOT_COUNTED = frozenset(
    {DropReason.NO_SIGNAL, DropReason.RUN_ENDED, DropReason.GROUP_LOST, DropReason.VERSION_LOST}
)


class CoverageCheck:
    """Tests whether drops take one task, or long responses, more than others.

    Every `EVERY` ended trajectories it compares shares of drops by task, and between responses above and below the
    median length, with a normal test of two shares at `SIGMAS`. A difference must also be large (`FACTOR`).
    """

    EVERY = 256
    SIGMAS = 7.0
    FACTOR = 2.0
    LEAST_SHARE = 0.05  # of drops, below which nothing is starved

    def __init__(self, task_of: Callable[[LiveTrajectory], str]) -> None:
        self._task_of = task_of
        self._ended: Counter[tuple[str, bool]] = Counter()  # (task, dropped) -> trajectories
        self._last: list[tuple[LiveTrajectory, Consumed | Dropped]] = []  # since the last test
        self._reasons: Counter[DropReason] = Counter()

    def consumed(self, event: Consumed | Dropped, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take the end of a training trajectory."""
        self._last.append((row, event))
        return self._test() if len(self._last) >= self.EVERY else ()

    def dropped(self, event: Dropped, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take a drop of a training trajectory."""
        return () if event.reason in NOT_COUNTED else self.consumed(event, row)

    def _test(self) -> Iterator[Alarm]:
        last, self._last = self._last, []
        self._reasons.update(event.reason for _, event in last if isinstance(event, Dropped))
        self._ended.update((self._task_of(row), isinstance(event, Dropped)) for row, event in last)
        tasks = {task for task, _ in self._ended}
        all_kept = sum(number for (_, dropped), number in self._ended.items() if not dropped)
        all_dropped = sum(self._ended.values()) - all_kept
        for task in tasks if len(tasks) > 1 else ():
            mine = (self._ended[task, True], self._ended[task, False])
            others = (all_dropped - mine[0], all_kept - mine[1])
            if self._differs(mine, others):
                yield self._alarm(f"task {task!r}", "", mine, others)
        lengths = sorted((row.length, isinstance(event, Dropped)) for row, event in last)
        middle = lengths[len(lengths) // 2][0]
        longer = [dropped for length, dropped in lengths if length > middle]
        shorter = [dropped for length, dropped in lengths if length <= middle]
        long, short = ((sum(them), len(them) - sum(them)) for them in (longer, shorter))
        if self._differs(long, short):
            yield self._alarm("long responses", f"above {middle} tokens ", long, short)

    def _differs(self, mine: tuple[int, int], others: tuple[int, int]) -> bool:
        """Whether the first share of drops is surely and much above the second."""
        count, other = sum(mine), sum(others)
        if not count or not other:
            return False
        share, of_others = mine[0] / count, others[0] / other
        pooled = (mine[0] + others[0]) / (count + other)
        deviation = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / other))
        is_much = share > max(self.FACTOR * of_others, self.LEAST_SHARE)
        return is_much and share - of_others > self.SIGMAS * deviation

    def _alarm(self, who: str, where: str, mine: tuple[int, int], others: tuple[int, int]) -> Alarm:
        reason = self._reasons.most_common(1)[0][0]
        return Alarm(
            "coverage",
            who,
            f"{where}{mine[0]} of {sum(mine)} dropped, of others {others[0]} of {sum(others)}, most of them for"
            f" {reason}; raise that limit, or the run trains on the rest alone",
        )


class AdvantageCheck:
    """Names advantages that do not follow from the rewards of their group.

    In a group of K two advantages differ by the scale times the difference of rewards, or K / (K - 1) times as
    much by `leave_one_out`. `algorithm` (None: any) says which, whether a cost of length also counts, and whether
    a group's advantages add up to 0.
    """

    AGREES = 1e-3

    def __init__(self, algorithm: AlgorithmConfig | None) -> None:
        self._costs = 0.0 if algorithm is not None and algorithm.overlong_tokens is None else 1.0
        self._leaves_out = algorithm is None or algorithm.advantage is Advantage.LEAVE_ONE_OUT
        self._divides = algorithm is not None and algorithm.advantage is Advantage.GROUP_STD
        self._is_centred = algorithm is not None and algorithm.advantage in CENTRED
        # group -> members with their advantages
        self._open: defaultdict[str, list[tuple[LiveTrajectory, Ready]]] = defaultdict(list)

    def ready(self, event: Ready, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take the advantage of a training trajectory."""
        self._open[row.group_id].append((row, event))
        return ()

    def ended(self, event: Consumed | Dropped, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take the end of a training trajectory; the first of a group tests the group."""
        members = self._open.pop(row.group_id, ())
        if not members or any(ready.roles or member.earned is not None for member, ready in members):
            return ()  # rewards by token or role are not compared
        if (fault := self._fault(members, row.group_id)) is None:
            return ()
        who, what = fault
        return (Alarm("scores", "controller", f"the advantage of {who} is {what}; look at algorithm.advantage"),)

    def _fault(self, members: Sequence[tuple[LiveTrajectory, Ready]], group: str) -> tuple[str, str] | None:
        """Return a member or group whose advantage does not follow from the rewards, and words on it."""
        rewards = [member.reward or 0.0 for member, _ in members]
        least = min(rewards)
        first = members[rewards.index(least)][1]
        noise = self.AGREES * max(1.0, *[abs(ready.advantage) for _, ready in members])
        ratio = len(members) / max(1, len(members) - 1) if self._leaves_out else 1.0
        for reward, (_, ready) in zip(rewards, members, strict=True):
            gap, expected = ready.advantage - first.advantage, ready.advantage_scale * (reward - least)
            margin = ready.advantage_scale * self._costs + noise
            if not expected - margin <= gap <= expected * ratio + margin:
                words = f"{gap:.3g} above {first.trajectory_id}'s, and their rewards make it {expected:.3g}"
                return ready.trajectory_id, words
        unit, scale = self._unit(rewards), first.advantage_scale
        if unit is not None and scale and abs(scale / unit - 1) > self.AGREES:
            return group, f"{scale:.4g} times its reward, and not {unit:.4g}"
        total = sum([ready.advantage for _, ready in members])
        if self._is_centred and abs(total) > noise * len(members):
            return group, f"{total:.3g} in the sum over the group, and not 0"
        return None

    def _unit(self, rewards: Sequence[float]) -> float | None:
        """Return the advantage of one unit of reward by definition, None if it is not known here."""
        if self._costs or not self._is_centred or len(rewards) < 2:
            return None
        if not self._divides:
            return 1.0
        mean = sum(rewards) / len(rewards)
        squares = sum([(reward - mean) ** 2 for reward in rewards])
        return 1 / (math.sqrt(squares / (len(rewards) - 1)) + STD_FLOOR)


CENTRED = (Advantage.GROUP_STD, Advantage.GROUP_MEAN, Advantage.LEAVE_ONE_OUT)


class StalenessCheck:
    """Names a consumed trajectory beyond the bound that `staleness` enforces by `drop`."""

    def __init__(self, staleness: StalenessConfig | None) -> None:
        drops = staleness is not None and StalePolicy.DROP in staleness.policies
        self._bound = staleness.max_staleness if staleness is not None and drops else None

    def changed(self, event: SettingChanged, row: None) -> Iterable[Alarm]:
        """Take a change of a setting, perhaps of the bound."""
        if event.name == BOUND and self._bound is not None:
            self._bound = event.value
        return ()

    def consumed(self, event: Consumed, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take a training trajectory that was trained on."""
        if self._bound is None or event.staleness <= self._bound:
            return ()
        words = (
            f"step {event.step} trained on {event.trajectory_id}, whose staleness is {event.staleness} and the"
            f" bound {self._bound}; look at staleness.policies"
        )
        return (Alarm("scores", "controller", words),)


class LengthCheck:
    """Names a response that its engine ended as full before the run's limit of new tokens.

    Responses of an environment may also end by the room for its messages, so they are left out.
    """

    def __init__(self, *, has_environment: bool) -> None:
        self._has_environment = has_environment
        self._cut: Cut | None = None  # the last by the limit of tokens

    def was_cut(self, event: Cut, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take a cut of a response."""
        self._cut = event if event.cap is Cap.TOKENS and not self._has_environment else None
        return ()

    def finished(self, event: Finished, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take the end of a response, which its cut precedes."""
        cut, self._cut = self._cut, None
        if cut is None or cut.trajectory_id != row.id:
            return ()
        if event.length >= cut.value:
            return ()
        words = (
            f"ended {row.id} (version {row.last_version}) as full at {event.length} tokens, and max_new_tokens is"
            f" {cut.value:g}; look at the server's own limits"
        )
        return (Alarm("sampling", f"replica-{row.replica}", words),)


class BatchCheck:
    """Names a step that consumed a group with members still under way, or a failed reward that counts."""

    def __init__(self) -> None:
        self._open: defaultdict[str, set[str]] = defaultdict(set)  # group -> members neither consumed nor dropped
        self._step: set[str] = set()  # groups of the present step

    def restore(self, live: Iterable[LiveTrajectory]) -> None:
        """Take the live trajectories of a run that resumes."""
        for row in live:
            if row.kind is Kind.TRAIN:
                self._open[row.group_id].add(row.id)

    def opened(self, event: object, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take a training trajectory that was issued, or is ready again."""
        self._open[row.group_id].add(row.id)
        return ()

    def consumed(self, event: Consumed, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take a training trajectory that was trained on."""
        self._open[row.group_id].discard(row.id)
        self._step.add(row.group_id)
        return ()

    def dropped(self, event: Dropped, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take a drop of a training trajectory."""
        members = self._open[row.group_id]
        members.discard(row.id)
        if not members and row.group_id not in self._step:
            del self._open[row.group_id]
        return ()

    def stepped(self, event: Stepped, row: None) -> Iterable[Alarm]:
        """End a step."""
        parts = sorted(group for group in self._step if self._open[group])
        for group in self._step:
            self._open.pop(group, None)
        self._step.clear()
        if not parts:
            return ()
        words = (
            f"step {event.step} trained on a part of group {parts[0]} and of {len(parts) - 1} more, as if they"
            " were whole; --resume"
        )
        return (Alarm("scores", "controller", words),)


def score_alarms(
    score: Score, row: LiveTrajectory, *, weights: Mapping[str, float] | None = None
) -> Sequence[Alarm]:
    """Alarms on a score whose reward function raised or was late and that has a value all the same, that is of
    another response, or that is not the sum of its terms by their `weights`, which are by name."""
    found, who = [], score.trajectory_id
    if score.value is not None and weights:
        parts = [weights.get(term.name, math.nan) * term.value for term in score.terms]
        total = sum(parts)  # NaN with an unknown term, and then the comparison is false
        if parts and abs(score.value - total) > ROUNDING * max(1.0, *map(abs, parts)):
            found.append(f"{who} has the reward {score.value:.6g}, and its terms add up to {total:.6g}")
    if score.length is not None and score.length != row.length:
        of_another = f"has {row.length} tokens, and its reward is of a response of {score.length}"
        found.append(f"{who} {of_another}; look at what the scorer reads")
    if score.raised and score.failure is None:
        found.append(f"{who}: a reward function failed, and its response counts as {score.value:g}; let it fail")
    return [Alarm("scores", "scorer", message) for message in found] if found else ()


@dataclass(slots=True)
class EvaluationCheck:
    """Names an evaluation whose answers have another version than it says, whose problem is trained on, or which
    leaves problems or answers out.

    `problems` says how many problems each set has; sets without a number are not counted.
    """

    prompt_of: Callable[[LiveTrajectory], Prompt | None]
    problems: Mapping[str, int] = field(default_factory=dict)
    _held_out: dict[bytes, str] = field(default_factory=dict)  # ids of evaluated prompts -> pass
    # by pass: version of each answer with a score, None of each other
    _answers: defaultdict[str, list[int | None]] = field(default_factory=lambda: defaultdict(list))

    def assigned(self, event: Assigned, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take an assignment in an evaluation, and note its problem."""
        if key := self._key(row):
            self._held_out.setdefault(key, row.group_id)
        return ()

    def consumed(self, event: Consumed, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take an answer in an evaluation."""
        self._answers[row.group_id].append(event.version)
        return ()

    def dropped(self, event: Dropped, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take an answer in an evaluation that has no score."""
        self._answers[row.group_id].append(None)
        return ()

    def evaluated(self, event: Evaluated, row: None) -> Iterable[Alarm]:
        """End an evaluation."""
        # a pass that a resume continued has answers from before, which were not seen here
        answers, figures = self._answers.pop(event.pass_id, []), event.figures
        unscored = answers.count(None)
        scored, versions = len(answers) - unscored, {version for version in answers if version is not None}
        expected = self.problems.get(event.set_name, figures.problems)
        counted = figures.problems * figures.samples - figures.unscored
        if versions - {event.version}:
            words = f"says version {event.version}, and its answers have {sorted(versions)}"
        elif figures.problems != expected:
            words = f"has {figures.problems} problems, and its set has {expected}"
        elif counted < scored or figures.unscored < unscored:
            words = f"counts {counted} scored answers and {figures.unscored} others of {scored} and {unscored}"
        else:
            return ()
        return (Alarm("evaluation", f"pass {event.pass_id}", f"{words}; evaluate again with `laminar eval`"),)

    def trained(self, event: Assigned, row: LiveTrajectory) -> Iterable[Alarm]:
        """Take an assignment for training, and name a problem of an evaluation."""
        if not self._held_out or not (key := self._key(row)) or not (of_pass := self._held_out.get(key)):
            return ()
        self._held_out[key] = ""
        words = (
            f"its problem {row.prompt_id} is trained on, too (group {row.group_id}); take it out of one of them"
        )
        return (Alarm("evaluation", f"pass {of_pass}", words),)

    def _key(self, row: LiveTrajectory) -> bytes:
        """The problem of a group's first sample; b"" for another sample or an unknown prompt."""
        if row.sample_index or (prompt := self.prompt_of(row)) is None or not len(prompt.ids):
            return b""
        return b"\0".join((prompt.ids.tobytes(), prompt.answer.encode(), prompt.fields_json))
