"""Plans of 21 fleets: how each is set up and what happens to it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a fleet; probabilities are for each tick of about a quarter of a second."""

    seed: int = 0
    ticks: int = 130
    # ---- what is decided by
    replicas: int = 4
    group_size: int = 4
    batch: int = 4  # groups
    capacity: int = 16  # groups
    schedule: str = "async"
    max_staleness: int | None = None
    policies: tuple[str, ...] = ()
    on_new_weights: str = "drain"  # resume, in_place
    without_signal: str = "train"
    deadline_s: float | None = None
    min_survivors: int = 2
    max_seconds: float | None = None
    teaches: bool = False
    by_token: bool = False  # scores of tokens, without a teacher
    refers: bool = False
    overlong: int | None = None
    advantage: str = "group_std"
    aggregation: str = "sequence_mean"
    packs: bool = True
    max_tokens: int = 160
    ranks: int = 2
    by_id: bool = False
    repack: str = "none"  # paper, predictive: plans carried out by the script; migration-*: by the real rounds
    repack_s: float = 0.9
    slow_s: float = 0.61  # that replicas take at times to promise, or to give up
    max_stall_s: float = 0.03
    # ---- replicas
    takes: int = 12  # trajectories under one version, or in flight
    slots: int = 8
    kv: int = 600
    cap: int = 96
    median: float = 11.0
    sigma: float = 1.0
    load_s: float = 0.4
    records: bool = False
    # ---- what happens
    keep: int = 3  # versions that relays hold
    step_s: float = 1.1
    publish_every: int = 1
    checkpoint_every: int = 3
    score_s: float = 0.3
    graded: bool = False
    flat: float = 0.25  # share of groups whose rewards are all equal
    p_fail: float = 0.03
    p_refuse: float = 0.0
    p_death: float = 0.0
    p_cut: float = 0.4  # of the deaths: the engine alone, with a last report
    p_betray: float = 0.0  # of the moves: a destination dies over them
    p_learner: float = 0.0  # of the steps: the learner dies over it
    p_echo: float = 0.05
    p_quiet: float = 0.3
    p_forget: float = 0.0  # a version is on no relay any more
    evaluations: tuple[tuple[int, int | None], ...] = ()  # (tick, how many versions back; None: whatever is idle)
    pauses: tuple[tuple[int, int], ...] = ()  # (tick, ticks)
    retires: tuple[int, ...] = ()
    controller_deaths: tuple[int, ...] = ()
    loses_checkpoint: bool = False  # with each of them the newest
    abandons: tuple[int, ...] = ()  # nobody waits for evaluations any more
    record_s: float = 0.0  # until what is published is on record


HARD = {"p_death": 0.05, "p_learner": 0.1, "p_refuse": 0.02, "p_fail": 0.06}
DROP, REWEIGHT, WAIT = ("drop",), ("reweight",), ("wait",)

_PLANS = [
    # async, drain
    Plan(repack="predictive", evaluations=((20, None), (60, 0), (90, 2))),
    Plan(
        replicas=6,
        max_staleness=0,
        policies=WAIT,
        repack="migration-predictive",
        p_death=0.03,
        p_learner=0.3,
        step_s=0.6,
        median=8.0,
        evaluations=((30, None),),
    ),
    Plan(
        replicas=8,
        batch=6,
        capacity=30,
        max_staleness=4,
        takes=8,
        slots=16,
        kv=900,
        max_stall_s=0.045,
        policies=("wait", "drop"),
        repack="migration-predictive",
        controller_deaths=(60,),
        p_betray=0.5,
        record_s=0.7,
        ticks=110,
        **HARD,
    ),
    Plan(replicas=2, max_staleness=0, policies=DROP, takes=24, ranks=1, p_learner=0.15),
    Plan(
        replicas=5,
        max_staleness=2,
        policies=REWEIGHT,
        repack="paper",
        p_death=0.03,
        p_betray=0.5,
        publish_every=2,
    ),
    Plan(
        replicas=12,
        group_size=3,
        batch=8,
        capacity=40,
        takes=9,
        slots=6,
        repack="migration-paper",
        ticks=90,
        controller_deaths=(45,),
        p_death=0.06,
        pauses=((30, 6),),
    ),
    # deadlines, survivors
    Plan(
        deadline_s=1.5,
        sigma=1.5,
        evaluations=((40, None),),
        without_signal="skip",
        repack="predictive",
        p_fail=0.1,
    ),
    Plan(
        replicas=3,
        deadline_s=1.6,
        min_survivors=3,
        sigma=1.4,
        without_signal="refill",
        keep=1,
        p_death=0.12,
        p_forget=0.2,
        batch=2,
        step_s=0.5,
        controller_deaths=(70,),
    ),
    Plan(
        replicas=5,
        deadline_s=1.2,
        refers=True,
        without_signal="refill",
        on_new_weights="resume",
        score_s=0.6,
        group_size=3,
        batch=1,
        capacity=12,
        ranks=4,
        controller_deaths=(50, 95),
        loses_checkpoint=True,
        **HARD,
    ),
    # one_step and sync
    Plan(schedule="one_step", capacity=8, evaluations=((25, None), (70, 1)), p_death=0.02, repack="paper"),
    Plan(
        schedule="one_step",
        replicas=6,
        capacity=10,
        on_new_weights="resume",
        without_signal="skip",
        flat=0.5,
        p_learner=0.1,
        controller_deaths=(65,),
    ),
    Plan(schedule="sync", replicas=3, by_id=True, repack="predictive", takes=16, evaluations=((50, 0),)),
    Plan(
        schedule="sync",
        replicas=7,
        batch=7,
        by_id=True,
        deadline_s=2.5,
        on_new_weights="in_place",
        p_death=0.03,
        p_learner=0.1,
        without_signal="refill",
        controller_deaths=(80,),
    ),
    # resume and in place
    Plan(
        seed=1000,
        on_new_weights="resume",
        replicas=5,
        max_staleness=2,
        policies=DROP,
        p_death=0.05,
        records=True,
        by_token=True,
        ticks=100,
        repack="predictive",
        slow_s=0.9,
    ),
    Plan(
        on_new_weights="in_place",
        replicas=4,
        max_staleness=0,
        policies=REWEIGHT,
        evaluations=((20, None), (55, None), (80, 3)),
        max_seconds=2.5,
        sigma=1.5,
        repack="paper",
        pauses=((60, 8),),
        abandons=(57,),
    ),
    Plan(
        on_new_weights="resume",
        replicas=9,
        group_size=2,
        batch=8,
        capacity=48,
        repack="migration-predictive",
        records=True,
        controller_deaths=(50,),
        refers=True,
        without_signal="skip",
        flat=0.4,
        p_death=0.04,
        ticks=100,
    ),
    # weights that are lost, replicas that are replaced
    Plan(
        replicas=4,
        keep=1,
        p_death=0.1,
        p_forget=0.1,
        step_s=0.5,
        batch=2,
        evaluations=((30, 1), (60, None), (80, 2)),
        retires=(64,),
        p_betray=0.4,
        slow_s=1.6,
        record_s=0.9,
        controller_deaths=(104,),
        repack="predictive",
    ),
    Plan(
        seed=1018,
        replicas=2,
        keep=2,
        p_death=0.07,
        repack="predictive",
        slow_s=1.3,
        p_forget=0.05,
        max_staleness=2,
        policies=("wait", "reweight"),
        batch=3,
        step_s=0.6,
        teaches=True,
        advantage="none",
        aggregation="token_mean",
        controller_deaths=(40, 90),
        evaluations=((35, 0), (36, 0), (37, None), (86, 0), (87, 1), (100, None)),
    ),
    Plan(
        replicas=10,
        batch=6,
        capacity=30,
        packs=False,
        graded=True,
        overlong=40,
        advantage="leave_one_out",
        repack="migration-paper",
        max_staleness=2,
        policies=DROP,
        p_refuse=0.02,
        ticks=80,
    ),
    Plan(
        replicas=2,
        group_size=3,
        batch=2,
        capacity=9,
        takes=12,
        slots=4,
        median=20.0,
        sigma=1.6,
        max_tokens=56,
        graded=True,
        overlong=30,
        advantage="batch_std",
        aggregation="constant",
        repack="predictive",
        controller_deaths=(66,),
        evaluations=((64, None),),
        p_learner=0.2,
    ),
]

_PLANS.append(replace(_PLANS[17], seed=1050))  # two replicas, one of which outruns the other while it waits
PLANS = [replace(plan, seed=plan.seed or index) for index, plan in enumerate(_PLANS)]
