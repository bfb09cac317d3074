"""Three seeds of countdown: `python experiments/countdown/run.py [--json] [--seeds N]`, three runs each.

For each seed: RL with the schedule `async`, RL with `sync` for about as long, and supervised training alone on the
demonstrations of the warm start, for as many seconds of both cores as warm start and RL of `async` took. Accuracy
at the end of RL is greedy, on held-out problems that need more trials than any right demonstration has. It is held
against the better of two figures of the start, and of supervised training: the greedy accuracy, and the mean of
eight samples at temperature 1. Draws `experiments/countdown/out/curves.png`. A second start measures only
the missing runs.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import msgspec
import torch

from laminar_lab.bench.report import Row, show, spread
from laminar_lab.bench.runs import KeptResults, drawing, make_parser, train
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.config.run import RunConfig
from laminar_py.config.warm_start import WARM_STARTS
from laminar_py.observe.summary import EvaluationFigures
from laminar_py.runtime.preflight.inputs import prepare

HERE = Path(__file__).parent
CONFIG = HERE / "countdown.yaml"
KEPT = Path(".cache/countdown")
SEEDS = 3
STEPS = {Schedule.ASYNC: 260, Schedule.SYNC: 200}  # which take about as many seconds
CORES = 2  # that RL uses; supervised training uses one, for as many core seconds
LIMIT_S = 3_000.0  # of a run that should take 1,200
GREEDY = ("one_change", "two_changes", "short")  # sets
UNUSED = {"steps": "1"} | {f"eval.sets.{name}.every_steps": "null" for name in GREEDY}


class LostEvaluationError(Exception):
    """A run lacks points of its curve."""


class Imitated(msgspec.Struct, frozen=True, kw_only=True):
    """A warm start in the cache, e.g. 800 steps in 25 s of one core."""

    steps: int
    elapsed_s: float


class LongAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the held-out problems of both levels that are longer than demonstrated."""

    one_change: float
    two_changes: float

    @property
    def long(self) -> float:
        """Of both, which are equally many."""
        return (self.one_change + self.two_changes) / 2


class AccuracyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy accuracy after `rl_s` seconds of RL."""

    rl_s: float
    long: LongAccuracy
    short: float


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of eight samples of each problem at temperature 1."""

    mean: LongAccuracy
    any_of_8: LongAccuracy  # pass@8


class LearnedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Curve of a run. Supervised training alone is measured at the start of a run without RL."""

    folder: str
    rl_s: float
    curve: list[AccuracyPoint]
    start_sampled: Sampled
    end_sampled: Sampled

    @property
    def end(self) -> LongAccuracy:
        """Greedy accuracy after RL."""
        return self.curve[-1].long

    @property
    def start(self) -> LongAccuracy:
        """Accuracy before RL, by level that of greedy answers or of samples, whichever is higher."""
        greedy, sampled = self.curve[0].long, self.start_sampled.mean
        return LongAccuracy(
            one_change=max(greedy.one_change, sampled.one_change),
            two_changes=max(greedy.two_changes, sampled.two_changes),
        )


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one seed."""

    start: Imitated
    longer: Imitated  # supervised training for the core seconds of warm start and RL
    supervised: LearnedSearch
    rl: dict[Schedule, LearnedSearch]

    @property
    def time_ratio(self) -> float:
        """Seconds in which `async` has the final accuracy of `sync`, over those of `sync`.

        Infinite where `async` never has it, not a number where `sync` learned nothing.
        """
        wanted = self.rl[Schedule.SYNC].end.long
        sync_s = reaches(self.rl[Schedule.SYNC].curve, wanted)
        return reaches(self.rl[Schedule.ASYNC].curve, wanted) / sync_s if sync_s else math.nan


def reaches(curve: Sequence[AccuracyPoint], wanted: float) -> float:
    """Return the seconds of RL after which the curve first is that high; infinite if never."""
    for before, after in zip([curve[0], *curve], curve, strict=False):
        if after.long.long >= wanted:
            rise = after.long.long - before.long.long
            share = (wanted - before.long.long) / rise if rise > 0 else 1.0
            return before.rl_s + share * (after.rl_s - before.rl_s)
    return math.inf


def imitate(seed: int, steps: int) -> Imitated:
    """Train on the demonstrations alone and put the model where the run of that seed looks for it."""
    config = load_config(CONFIG, [f"seed={seed}", *warm_start_settings(seed, steps)])
    prepare(config)
    assert config.warm_start is not None, "countdown begins with a warm start"
    shutil.rmtree(config.warm_start.cache, ignore_errors=True)  # of a try that was cut off
    torch.set_num_threads(1)
    began = time.monotonic()
    WARM_STARTS.get(config.warm_start.kind).make(config, lambda step, steps, loss: None)
    return Imitated(steps=steps, elapsed_s=time.monotonic() - began)


def warm_start_settings(seed: int, steps: int) -> list[str]:
    """Settings of a run whose warm start has so many steps."""
    return [f"warm_start.steps={steps}", f"warm_start.cache={KEPT / 'warm_start' / f'{seed}-{steps}'}"]


def learn(seed: int, start: Imitated, settings: dict[str, str]) -> LearnedSearch:
    """One run from a warm start that is in the cache; evaluations do not count as time of RL.

    Raises `LostEvaluationError` where an evaluation was given up, since a curve with holes misleads.
    """
    given = {"name": "countdown", "seed": str(seed), "eval.deferred": "true"} | settings
    chosen = [f"{name}={value}" for name, value in given.items()]
    done = train(CONFIG, [*chosen, *warm_start_settings(seed, start.steps)], limit_s=LIMIT_S)
    found = {(one.step, one.set_name): one for one in done.summary.evaluations}
    missing = expected_points(load_config(CONFIG, chosen)) - set(found)
    if missing:
        raise LostEvaluationError(f"{done.folder}: no evaluation of {', '.join(map(str, sorted(missing)))}")
    sampled = [step for step, name in found if name == "one_change_sampled"]
    return LearnedSearch(
        folder=str(done.folder),
        rl_s=done.summary.rl_seconds,
        curve=[
            AccuracyPoint(
                rl_s=short.rl_s,
                long=LongAccuracy(
                    one_change=found[step, "one_change"].mean, two_changes=found[step, "two_changes"].mean
                ),
                short=short.mean,
            )
            for (step, name), short in sorted(found.items())
            if name == "short"
        ],
        start_sampled=sampled_at(found, min(sampled)),
        end_sampled=sampled_at(found, max(sampled)),
    )


def expected_points(config: RunConfig) -> set[tuple[int, str]]:
    """Step and set of every evaluation of a run: before RL, at each interval, and after it."""
    last, every = config.steps, config.eval.intervals()
    return {
        (step, name) for name in config.eval.sets for step in (0, *range(0, last, every.get(name, last)), last)
    }


def sampled_at(found: Mapping[tuple[int, str], EvaluationFigures], step: int) -> Sampled:
    """Figures of the samples at a step of RL."""
    one, two = (found[step, name].figures for name in ("one_change_sampled", "two_changes_sampled"))
    return Sampled(
        mean=LongAccuracy(one_change=one.mean.value, two_changes=two.mean.value),
        any_of_8=LongAccuracy(one_change=one.pass_at[8].value, two_changes=two.pass_at[8].value),
    )


def begin(kept: KeptResults, seed: int) -> Imitated:
    """The warm start of a seed."""
    warm = load_config(CONFIG, []).warm_start
    assert warm is not None, "countdown begins with a warm start"
    return kept.get(f"start-{seed}", Imitated, partial(imitate, seed, warm.steps))


def learn_both(kept: KeptResults, seed: int, start: Imitated) -> dict[Schedule, LearnedSearch]:
    """RL with each schedule; every other seed in the other order, since a machine may grow slower, or faster."""
    return {
        schedule: kept.get(
            f"{schedule}-{seed}",
            LearnedSearch,
            partial(learn, seed, start, {"schedule": str(schedule), "steps": str(STEPS[schedule])}),
        )
        for schedule in list(STEPS)[:: 1 if seed % 2 == 0 else -1]
    }


def imitate_longer(kept: KeptResults, starts: Sequence[Imitated], seconds: Sequence[float]) -> list[Imitated]:
    """Supervised training for the core seconds of warm start and so many seconds of RL, seeds side by side."""

    def longer(seed: int) -> Imitated:
        start = starts[seed]
        steps = math.ceil(start.steps * (1 + CORES * seconds[seed] / start.elapsed_s))
        return kept.get(f"longer-{seed}", Imitated, lambda: processes.submit(imitate, seed, steps).result())

    with ProcessPoolExecutor(CORES, get_context("spawn")) as processes, ThreadPoolExecutor(CORES) as threads:
        return list(threads.map(longer, range(len(starts))))


def measure(kept: KeptResults, num_seeds: int) -> list[SeedResult]:
    """Measure all that is not kept."""
    seeds = range(num_seeds)
    starts = [begin(kept, seed) for seed in seeds]
    rl = [learn_both(kept, seed, starts[seed]) for seed in seeds]
    longer = imitate_longer(kept, starts, [one[Schedule.ASYNC].rl_s for one in rl])
    supervised = [
        kept.get(f"supervised-{seed}", LearnedSearch, partial(learn, seed, longer[seed], UNUSED)) for seed in seeds
    ]
    return [
        SeedResult(start=starts[seed], longer=longer[seed], supervised=supervised[seed], rl=rl[seed])
        for seed in seeds
    ]


def describe(one: SeedResult) -> str:
    """Describe a seed: for each level the start greedy, by samples, by any of eight; the end; supervised."""
    run, supervised = one.rl[Schedule.ASYNC], one.supervised
    before, after = run.start_sampled, run.end
    greedy, alone, samples = run.curve[0].long, supervised.curve[0].long, supervised.start_sampled.mean
    return (
        f"one change {greedy.one_change:.3f} / {before.mean.one_change:.3f} / {before.any_of_8.one_change:.3f} ->"
        f" {after.one_change:.3f} (supervised {alone.one_change:.3f} / {samples.one_change:.3f}), two"
        f" {greedy.two_changes:.3f} / {before.mean.two_changes:.3f} / {before.any_of_8.two_changes:.3f} ->"
        f" {after.two_changes:.3f} ({alone.two_changes:.3f} / {samples.two_changes:.3f}); warm start"
        f" {one.start.elapsed_s:.0f} s, RL {run.rl_s:.0f} s, supervised {one.longer.elapsed_s:.0f} s of one core"
    )


def rows(seeds: Sequence[SeedResult]) -> list[Row]:
    """Make the rows of the worst of the seeds, and of the median times."""
    runs = [one.rl[Schedule.ASYNC] for one in seeds]
    each = "; ".join(f"seed {seed}: {describe(one)}" for seed, one in enumerate(seeds))
    setting = (
        f"countdown, {len(seeds)} seeds, async, start greedy / mean of 8 samples / any of 8 -> end greedy: {each}"
    )
    two = "as new_skill_gain, on the problems that need more trials than any demonstration"
    over = [run.end.long - one.supervised.start.long for run, one in zip(runs, seeds, strict=True)]
    over_any = [run.end.long - run.start_sampled.any_of_8.long for run in runs]
    ratios = [one.time_ratio for one in seeds]
    seconds = [one.start.elapsed_s + run.rl_s for one, run in zip(seeds, runs, strict=True)]
    return [
        Row("new_skill_gain", min(run.end.long - run.start.long for run in runs), "share of 200", setting),
        Row(
            "new_skill_gain_two_changes",
            min(run.end.two_changes - run.start.two_changes for run in runs),
            "share of 100",
            two,
        ),
        Row("new_skill_over_supervised", min(over), "share of 200", "end, above supervised training alone"),
        Row("new_skill_over_any_of_8", min(over_any), "share of 200", "end, above pass@8 of the start"),
        Row("countdown_short_end", min(run.curve[-1].short for run in runs), "share of 100", "short problems"),
        Row("countdown_seconds", max(seconds), "s", "warm start and RL of async"),
        Row(
            "countdown_async_over_sync_time",
            median(ratios) if math.isfinite(median(ratios)) else None,
            "x",
            f"{len(seeds)} seeds, seconds of RL to the accuracy on long problems that sync ends with: median and"
            f" range {spread(ratios, '.2f')}; inf where async never has it, nan where sync learned nothing",
        ),
    ]


def draw(seeds: Sequence[SeedResult], path: Path) -> None:
    """Draw both schedules for each seed, and a dotted line at the end of supervised training alone."""
    with drawing(path, size=(7, 4.5)) as axes:
        for seed, one in enumerate(seeds):
            for schedule, style in zip(STEPS, ("-", "--"), strict=True):
                curve = one.rl[schedule].curve
                minutes = [point.rl_s / 60 for point in curve]
                axes.plot(
                    minutes,
                    [point.long.long for point in curve],
                    style,
                    color=f"C{seed}",
                    label=f"{schedule}, seed {seed}",
                )
            axes.axhline(
                one.supervised.start.long, linestyle=":", color=f"C{seed}", label=f"supervised, seed {seed}"
            )
        axes.set(
            xlabel="minutes of RL", ylabel="accuracy on problems longer than demonstrated", ylim=(-0.02, 1.02)
        )
        axes.legend(fontsize="small")


def main() -> None:
    """Run the missing seeds, draw and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings="levels, greedy and sampled")
    seeds = measure(kept, args.seeds)
    draw(seeds, HERE / "out" / "curves.png")
    show("countdown", rows(seeds), as_json=args.json)


if __name__ == "__main__":
    main()
