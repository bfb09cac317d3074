"""Surveys of pretend replicas, for planners."""

from laminar_py.records.replica import Survey, TrajectorySummary
from laminar_py.repack.signals import EngineSpeed

SPEED = EngineSpeed(step_s=0.02, step_s_per_sequence=0.0, step_s_per_token=8e-8, prefill_tokens_per_s=25_000.0)
KV, SLOTS, PROMPT = 120_000, 64, 400


def make_survey(replica, lengths, *, waiting=0, continued=(), version=7, can_move=True, kv=KV, slots=SLOTS):
    """A replica that runs responses of these lengths; `waiting` have not begun, `continued` wait with theirs."""
    running = tuple(
        TrajectorySummary(trajectory_id=f"r{replica}.{i}", context=PROMPT + n, length=n)
        for i, n in enumerate(lengths)
    )
    moved = tuple(
        TrajectorySummary(trajectory_id=f"c{replica}.{i}", context=PROMPT + n, length=n)
        for i, n in enumerate(continued)
    )
    fresh = tuple(
        TrajectorySummary(trajectory_id=f"w{replica}.{i}", context=PROMPT, length=0) for i in range(waiting)
    )
    used = sum(held.context for held in running)
    return Survey(
        replica=replica,
        version=version,
        slots=slots,
        kv_used=used,
        kv_capacity=kv,
        running=running,
        waiting=moved + fresh,
        can_move=can_move,
    )


def after(group, moves):
    """(KV tokens, sequences) of each replica when all that runs and moves has arrived."""
    out = {survey.replica: [survey.kv_used, len(survey.running)] for survey in group}
    for move in moves:
        if move.prefill:
            out[move.source][0] -= move.prefill
            out[move.source][1] -= 1
            out[move.destination][0] += move.prefill
            out[move.destination][1] += 1
    return out
