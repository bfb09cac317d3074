"""The simulator against the real runtime: eight emulated replicas with turns, under one config.

Used by `experiments/multi_turn_tails/run.py --confirm`. Ray's processes, relays, ledger, controller and replicas
are real, and two emulated seconds pass in one; figures are of one window of both.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleets import CONFIG, PROMPTS, SAMPLES, config_of, turns_settings

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import train
from laminar_lab.simulate.run import simulate

COMPRESSION = 2
REPLICAS, LEARNER = 8, 4
WARM_S, COUNTED_S = 160.0, 400.0  # emulated
LATE_S = 240.0  # that a run may take beyond its RL on two cores


def settings_of(latency_s: float, *, seed: int) -> dict[str, object]:
    """Settings of the run, in seconds of two emulated ones."""
    return {
        "name": "multi-turn-tails",
        "seed": seed,
        "steps": 100_000,
        "max_rl_seconds": (WARM_S + COUNTED_S) / COMPRESSION + 1,
        "rollout.replicas": REPLICAS,
        "rollout.prompts_per_step": PROMPTS // 4,
        "rollout.batch_per_replica": PROMPTS // 4 // REPLICAS * SAMPLES,
        "buffer.capacity": 5 * PROMPTS // 4 * SAMPLES,
        "emulation.learner_devices": LEARNER,
        "emulation.compression": COMPRESSION,
        "simulation.publish_s": 0.17 / COMPRESSION,
        "repack.interval_s": 5 / COMPRESSION,
        "repack.max_stall_s": 1 / COMPRESSION,
        **turns_settings(latency_s),
    }


def confirmation(latency_s: float, *, seed: int) -> Iterator[Row]:
    """Generated tokens a second of either, and their ratio."""
    settings = settings_of(latency_s, seed=seed)
    simulated = _rate([(one.at_s, one.generated_tokens) for one in simulate(config_of(settings)).samples])
    with tempfile.TemporaryDirectory(prefix="laminar-turns-") as folder:
        given = [f"{key}={value}" for key, value in {**settings, "runs": folder}.items()]
        limit_s = (WARM_S + COUNTED_S) / COMPRESSION + LATE_S
        fleet = train(Path(CONFIG), given, limit_s=limit_s).fleet
    real = _rate([(row.rl_s, row.generated_tokens) for row in fleet])
    setting = (
        f"{REPLICAS} replicas, 8 turns, latency p50 {latency_s:g} s, {COUNTED_S:g} emulated s after {WARM_S:g},"
        f" compressed {COMPRESSION} times, seed {seed}"
    )
    yield Row("confirmed_real_over_simulated", real / simulated, "x generated tokens/s", setting)
    yield Row("confirmed_simulated_tokens_per_s", simulated, "generated tokens/s, emulated", setting)
    yield Row("confirmed_real_tokens_per_s", real, "generated tokens/s, emulated", setting)


def _rate(seen: Sequence[tuple[float, int]]) -> float:
    """Tokens of an emulated second, from what was there at moments of the run."""
    counted = [(at_s, tokens) for at_s, tokens in seen if at_s * COMPRESSION >= WARM_S]
    (first_s, first), (last_s, last) = counted[0], counted[-1]
    return (last - first) / (last_s - first_s) / COMPRESSION
