"""A student learns from reward, from a teacher, or from both: `python experiments/distill/run.py [--json]`.

The student is the quickstart's model after its warm start. The teacher is the same model after a longer run of the
quickstart, which this script makes once. For each seed (`--seeds N`) three runs have the same seconds of RL
(`--seconds S`): reward alone (GRPO), the teacher alone (reverse KL of each token), and the sum of both. The
weights at moments of RL are kept and evaluated greedily on the held-out problems when RL is over. The figure is
the seconds to 0.9 of the teacher's own accuracy. Draws `experiments/distill/out/curves.png`. A second start
measures only the missing runs.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from laminar_lab.bench.report import Ratio, Row, show, spread
from laminar_lab.bench.runs import LAMINAR, KeptResults, call, drawing, make_parser, train

HERE = Path(__file__).parent
CONFIG = Path("configs/quickstart.yaml")
KEPT = Path(".cache/distill")
SEEDS, SECONDS, TEACHER_STEPS = 3, 60, 300
TEACHER_SEED = 1000  # of none of the students
SHARE = 0.9  # of the teacher's accuracy
MARKS = 20  # evaluations of a run
REST_S = 400.0  # that a run may take for its start, the warm start and the evaluations
ASKS = ["algorithm.teacher={teacher}", "rollout.without_signal=train"]
WAYS = {
    "reward": [],
    "teacher": ["algorithm.name=distill", *ASKS],
    "both": ["algorithm.teacher_coef=1.0", *ASKS],
}


class Teacher(msgspec.Struct, frozen=True):
    """A folder, and its accuracy on the held-out problems."""

    folder: str
    accuracy: float


class Learned(msgspec.Struct, frozen=True):
    """The curve of a run: seconds of RL and accuracy."""

    folder: str
    curve: list[tuple[float, float]]

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of RL until an evaluation first has that accuracy; None if none has."""
        return next((seconds for seconds, found in self.curve if found >= accuracy), None)


def make_teacher(kept: KeptResults, steps: int) -> Teacher:
    """Train a teacher, unless one is kept, and export it."""
    settings = ["name=distill-teacher", f"seed={TEACHER_SEED}", f"steps={steps}", f"eval.every_steps={steps}"]
    done = kept.run(f"teacher-{steps}", partial(train, CONFIG, settings))
    folder = KEPT / "teachers" / f"{done.folder.name}-{steps}"
    if not (folder / "config.json").is_file():
        call([*LAMINAR, "export", str(done.folder), str(folder)])
    return Teacher(str(folder), done.curve[-1][1])


def learn(way: str, seed: int, teacher: Teacher, seconds: int) -> Learned:
    """One run of a student."""
    marks = [round(seconds * (mark + 1) / MARKS, 1) for mark in range(MARKS)]
    settings = [
        *(setting.format(teacher=teacher.folder) for setting in WAYS[way]),
        "name=distill",
        f"seed={seed}",
        "steps=100000",
        f"max_rl_seconds={seconds}",
        f"eval.at_seconds={marks}",
        "eval.every_steps=null",
        "eval.deferred=true",
    ]
    done = train(CONFIG, settings, limit_s=seconds + REST_S)
    return Learned(str(done.folder), done.curve)


def rows(found: Mapping[str, Sequence[Learned]], teacher: Teacher, seconds: int) -> list[Row]:
    """Make the rows: seconds to the share of the teacher's accuracy, over reward alone, and last accuracies."""
    target = SHARE * teacher.accuracy
    setting = (
        f"quickstart, {len(found['reward'])} seeds, {seconds} s of RL each; the teacher solves"
        f" {teacher.accuracy:.3f} of the held-out problems, so the target is {target:.3f}"
    )
    times = {way: [one.seconds_to(target) for one in runs] for way, runs in found.items()}
    reached = {way: [time for time in each if time is not None] for way, each in times.items()}
    table = []
    for way, each in times.items():
        whole = len(reached[way]) == len(each)
        words = spread(reached[way], ".1f") if whole else f"{len(reached[way])} of {len(each)} seeds reached it"
        value = median(reached[way]) if whole else None
        table.append(Row(f"seconds_to_target_{way}", value, "s of RL", f"{setting}; {way}: {words}"))
    for way in ("teacher", "both"):
        if all(len(reached[one]) == len(times[one]) for one in ("reward", way)):
            table.append(Ratio.between(reached[way], reached["reward"]).row(f"{way}_over_reward", setting))
    for way, runs in found.items():
        last = [one.curve[-1][1] for one in runs]
        table.append(Row(f"accuracy_{way}", median(last), "share of 300", f"at the end; {spread(last, '.3f')}"))
    return table


def draw(found: Mapping[str, Sequence[Learned]], teacher: Teacher, path: Path) -> None:
    """Draw the curve of each run, and a line at the target."""
    with drawing(path) as axes:
        for color, (way, runs) in enumerate(found.items()):
            for number, run in enumerate(runs):
                axes.plot(*zip(*run.curve, strict=True), color=f"C{color}", label=None if number else way)
        axes.axhline(SHARE * teacher.accuracy, linestyle=":", color="gray", label=f"{SHARE} of the teacher")
        axes.set(xlabel="seconds of RL", ylabel="held-out accuracy", ylim=(0, 1.02))
        axes.legend()


def main() -> None:
    """Run all that is missing, draw and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each way, with seeds 0, 1, ...")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of RL in each run")
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS, help="of the teacher's own RL")
    args = parser.parse_args()
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings=f"{args.seconds} s, {args.teacher_steps} steps")
    teacher = make_teacher(kept, args.teacher_steps)
    found: dict[str, list[Learned]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        first = seed % len(WAYS)  # in turn, since a machine may grow slower
        for way in [*WAYS][first:] + [*WAYS][:first]:
            work = partial(learn, way, seed, teacher, args.seconds)
            found[way].append(kept.get(f"{way}-{seed}", Learned, work))
    draw(found, teacher, HERE / "out" / "curves.png")
    show("distill", rows(found, teacher, args.seconds), as_json=args.json)


if __name__ == "__main__":
    main()
