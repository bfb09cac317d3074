"""Planners and packers on states that no fleet comes to by itself: random surveys and steps."""

from collections import defaultdict
from dataclasses import replace
from random import Random

from tests.tapes.plain import Look, Tape, luck
from tests.tapes.plans import Plan
from tests.tapes.production import Repacker, made, move_line, packed_lines, shares

ROUNDS = 4
TAILS = 14
SLOTS = 12


def write_pure(plan: Plan, tape: Tape) -> None:
    """Put down what planners and packers say to random questions."""
    random = luck(plan.seed, "pure")
    _write_plans(random, tape, rounds=ROUNDS, tails=False)
    _write_plans(random, tape, rounds=TAILS, tails=True)
    _write_steps(random, replace(plan, ranks=1 + plan.seed % 4, max_tokens=120), tape)
    tape.write("shares", shares([(64, 2, 90_000), (4096, 32, 7_000_000_000)]))


def _write_plans(random: Random, tape: Tape, *, rounds: int, tails: bool) -> None:
    """Rounds among replicas of any kind, or among such as have nothing that waits."""
    repacker = Repacker(400)
    for _ in range(rounds):
        for _ in range(random.randrange(12)):
            length = min(400, int(random.lognormvariate(4.0, 1.0)) + 1)
            repacker.ended(length, capped=length == 400)
        looks = [_look(random, index, tail=tails) for index in range(random.randint(2, 12))]
        some = [name for look in looks for name, _, _ in look.running if random.random() < 0.5]
        siblings = defaultdict[str, list[int]](list)
        siblings |= {name: [random.randint(1, 390) for _ in range(random.randint(1, 3))] for name in some}
        hungry, stall_s = random.random() < 0.85, random.choice([0.01, 0.04, 0.7])
        growth, roofline = random.choice([1, 8, 64]), random.choice([2, 3, 4, 12])
        costs = random.choice([8e-8, 8e-6, 4e-5]), random.choice([150.0, 600.0, 2500.0])
        stall_s = stall_s * 25_000 / costs[1]  # so many tokens, however fast
        for kind in ("paper", "predictive"):
            moves = repacker.moves(
                kind,
                looks,
                siblings.__getitem__,
                hungry=hungry,
                max_stall_s=stall_s,
                growth=growth,
                roofline=roofline,
                per_token_s=costs[0],
                prefill_per_s=costs[1],
            )
            tape.write(kind, len(looks), [move_line(move) for move in moves])
        repacker.seen([replace(look, kv_used=int(look.kv_used * random.uniform(0.9, 2.0))) for look in looks])


def _look(random: Random, index: int, *, tail: bool) -> Look:
    """Survey of a replica that is full, in its tail, or has a queue."""
    kv = random.choice([600, 2500])
    most = random.choice([1, 2, 4] if tail else [1, 2, 4, SLOTS])
    running = [_held(random, f"r{index}.{n}", random.randint(1, 390)) for n in range(random.randint(0, most))]
    while sum(context for _, context, _ in running) > kv:
        running.pop()
    queued = 0 if tail else random.choice([0, 0, 0, 1, 5])
    waiting = [_held(random, f"w{index}.{n}", random.choice([0, 0, 30])) for n in range(queued)]
    used = sum(context for _, context, _ in running)
    return Look(index, 7, SLOTS, used, kv, tuple(running), tuple(waiting), settled=random.random() < 0.9)


def _held(random: Random, name: str, length: int) -> tuple[str, int, int]:
    return name, length + random.randint(3, 40), length


def _write_steps(random: Random, plan: Plan, tape: Tape) -> None:
    for number in range(3):
        count, recorded = random.choice([0, 3, 20, 36]), random.random() < 0.5
        step = [
            made(
                f"g{number}x{place // 4}.{place % 4}",
                min(100, int(random.lognormvariate(2.6, 1.1)) + 1),
                prompt=random.randint(1, 20),
                version=random.randint(0, 4),
                advantage=random.randint(-8, 8) / 8,
                weight=random.choice([1.0, 1.0, 0.5]),
                recorded=recorded and random.random() < 0.7,
            )
            for place in range(count)
        ]
        packed_lines(tape, plan, step, version=5)
