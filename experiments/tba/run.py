"""Three algorithms on a sparse reward: `python experiments/tba/run.py [--json] [--seeds N]`, three runs a seed.

For each seed: trajectory balance with replay, GRPO and REINFORCE++, each for the same seconds of RL from the same
warm start. Draws `experiments/tba/out/curves.png`: success of the training responses over seconds, distinct right
answers found so far, and ages of the tokens that were trained. A second start measures only the missing runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from laminar_lab.bench.report import Row, show, spread
from laminar_lab.bench.runs import KeptResults, drawing, make_parser, train
from laminar_py.ledger import read_events, reading, trajectory_rows
from laminar_py.records import StepRow
from laminar_py.records.events import Scored

HERE = Path(__file__).parent
CONFIG = HERE / "tba.yaml"
SEEDS = 3
SECONDS = 300.0  # of RL in each run
LIMIT_S = 900.0  # of a run that should take 340
WINDOW = 1024  # responses over which success is a mean
LATE = 4096  # last responses, 128 to each puzzle
WANTED = 0.5
WITHOUT_REPLAY = {"buffer.replay.share": "0", "rollout.prompts_per_step": "16"}
ALGORITHMS: dict[str, Mapping[str, str]] = {
    "tba": {},
    "grpo": {"algorithm": "{name: grpo, clip_high: 0.28}", **WITHOUT_REPLAY},
    "reinforce_pp": {"algorithm": "{name: reinforce_pp}", **WITHOUT_REPLAY},
}


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """A run: success and distinct right answers over seconds, and how old its tokens were.

    The curves have a point for every `WINDOW` scored responses.
    """

    folder: str
    seconds: list[float]  # [points] since the first response was issued
    success: list[float]  # [points] mean reward of the last `WINDOW` responses
    found: list[int]  # [points] distinct right answers to all puzzles so far
    late: int  # distinct right answers among the last `LATE` responses
    ages: dict[str, int]  # trained tokens by age in learner steps, e.g. of "3-4"
    replayed: float  # share of the trajectories of all steps
    steps: int

    @property
    def start(self) -> float:
        """Success of the first responses."""
        return self.success[0]

    @property
    def end(self) -> float:
        """Success of the last responses."""
        return self.success[-1]

    @property
    def reached_s(self) -> float | None:
        """Seconds until success was `WANTED`; None if it never was."""
        pairs = zip(self.seconds, self.success, strict=True)
        return next((at_s for at_s, success in pairs if success >= WANTED), None)

    @property
    def off_policy(self) -> float:
        """Share of trained tokens that older weights than the learner's sampled."""
        total = sum(self.ages.values())
        return 1 - self.ages.get("0", 0) / total if total else 0.0


def search(seed: int, name: str, settings: Mapping[str, str]) -> Searched:
    """Make one run."""
    given = {"name": f"tba_{name}", "seed": str(seed), "max_rl_seconds": str(SECONDS), **settings}
    done = train(CONFIG, [f"{field}={value}" for field, value in given.items()], limit_s=LIMIT_S)
    return read_search(done.folder, done.steps)


def read_search(folder: Path, steps: Sequence[StepRow]) -> Searched:
    """Read the curves of a run from its ledger, in order of the scores."""
    with reading(folder) as connection:
        answers = {event.trajectory_id: event.answer for event in read_events(connection, Scored)}
        rows = list(trajectory_rows(connection, "kind = 'train' AND scored_s IS NOT NULL"))
    rows.sort(key=lambda row: row.scored_s or 0.0)
    began = min(row.issued_s or 0.0 for row in rows)
    right, seconds, success, found = set[tuple[str, str]](), list[float](), list[float](), list[int]()
    for end in range(WINDOW, len(rows) + 1, WINDOW):
        window = rows[end - WINDOW : end]
        right.update((row.prompt_id, answers[row.id]) for row in window if row.reward == 1)
        seconds.append((window[-1].scored_s or began) - began)
        success.append(sum(row.reward or 0.0 for row in window) / WINDOW)
        found.append(len(right))
    ages = Counter[str]()
    for step in steps:
        ages.update({bucket: figures.num_tokens for bucket, figures in step.by_staleness.items()})
    return Searched(
        folder=str(folder),
        seconds=seconds,
        success=success,
        found=found,
        late=len({(row.prompt_id, answers[row.id]) for row in rows[-LATE:] if row.reward == 1}),
        ages=dict(ages),
        replayed=sum(step.replay.trajectories for step in steps)
        / max(1, sum(step.trajectories for step in steps)),
        steps=len(steps),
    )


def measure(kept: KeptResults, num_seeds: int) -> dict[str, list[Searched]]:
    """Measure all that is not kept; another algorithm comes first for each seed, since a machine may change."""
    found: dict[str, list[Searched]] = {name: [] for name in ALGORITHMS}
    names = list(ALGORITHMS)
    for seed in range(num_seeds):
        first = seed % len(names)
        for name in names[first:] + names[:first]:
            work = partial(search, seed, name, ALGORITHMS[name])
            found[name].append(kept.get(f"{name}-{seed}", Searched, work))
    return found


def rows(found: Mapping[str, Sequence[Searched]]) -> list[Row]:
    """Make the rows of each algorithm: medians over seeds, and the seeds in the conditions."""
    made = []
    for name, runs in found.items():
        times = [one.reached_s for one in runs]
        reached = [time for time in times if time is not None]
        each = ", ".join("never" if time is None else f"{time:.0f} s" for time in times)
        setting = f"{name}, {len(runs)} seeds, {SECONDS:.0f} s of RL each"
        made += [
            Row(
                f"{name}_half_s",
                median(reached) if len(reached) == len(runs) else None,
                "s",
                f"{setting}: seconds until success is {WANTED:g} over {WINDOW} responses: {each}",
            ),
            Row(f"{name}_start", median(one.start for one in runs), "success", f"{setting}: first responses"),
            Row(f"{name}_end", median(one.end for one in runs), "success", f"{setting}: last responses"),
            Row(
                f"{name}_distinct",
                median(one.found[-1] for one in runs),
                "right answers",
                f"{setting}: distinct right answers found, {spread([one.found[-1] for one in runs])}",
            ),
            Row(
                f"{name}_distinct_late",
                median(one.late for one in runs),
                "right answers",
                f"{setting}: distinct ones among the last {LATE} responses, {spread([one.late for one in runs])}",
            ),
            Row(
                f"{name}_off_policy",
                median(one.off_policy for one in runs),
                "of trained tokens",
                f"{setting}: older than the learner, {describe_ages(runs)}",
            ),
            Row(
                f"{name}_replayed", median(one.replayed for one in runs), "of trajectories", f"{setting}: replays"
            ),
            Row(f"{name}_steps", median(one.steps for one in runs), "steps", setting),
        ]
    return made


def describe_ages(runs: Sequence[Searched]) -> str:
    """Describe shares of trained tokens by age in learner steps, over all seeds."""
    ages = sum((Counter(one.ages) for one in runs), Counter[str]())
    total = max(1, ages.total())
    order = sorted(ages, key=lambda bucket: int(bucket.rstrip("+").split("-")[0]))
    return ", ".join(f"{bucket}: {ages[bucket] / total:.0%}" for bucket in order)


def draw(found: Mapping[str, Sequence[Searched]], path: Path) -> None:
    """Draw success and distinct right answers of all runs over seconds, and the ages that balance trains on."""
    with drawing(path, columns=3, size=(15, 4)) as (success, distinct, ages):
        for place, (name, runs) in enumerate(found.items()):
            for seed, one in enumerate(runs):
                style = {"color": f"C{place}", "alpha": 1 - 0.25 * seed, "label": name if seed == 0 else None}
                success.plot(one.seconds, one.success, **style)
                distinct.plot(one.seconds, one.found, **style)
            total = sum((Counter(one.ages) for one in runs), Counter[str]())
            order = sorted(total, key=lambda bucket: int(bucket.rstrip("+").split("-")[0]))
            shares = [total[bucket] / max(1, total.total()) for bucket in order]
            ages.plot(order, shares, "o-", color=f"C{place}", label=name)
        success.set(xlabel="seconds of RL", ylabel=f"success, mean of {WINDOW} responses", ylim=(-0.02, 1.02))
        distinct.set(xlabel="seconds of RL", ylabel="distinct right answers found")
        ages.set(xlabel="age in learner steps", ylabel="share of trained tokens")
        success.legend()
        ages.legend()


def main() -> None:
    """Run the missing seeds, draw and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(Path(".cache") / HERE.name, sources=[HERE, CONFIG], settings=f"{SECONDS:g} s")
    found = measure(kept, args.seeds)
    draw(found, HERE / "out" / "curves.png")
    show("tba", rows(found), as_json=args.json)


if __name__ == "__main__":
    main()
