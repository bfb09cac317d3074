"""Alarms on a learner step: its proof must agree with the batch that the ledger records. Pure."""

from collections.abc import Iterator

from laminar_py.config.algorithm import ALGORITHMS, Aggregation, AlgorithmConfig, Objective
from laminar_py.control.consumption import StepBatch
from laminar_py.records.metrics import StepMetrics
from laminar_py.records.proofs import Alarm, id_sum
from laminar_py.records.spans import is_tree, sequences_of

PLAIN = (Objective.CLIP, Objective.SEQUENCE_CLIP, Objective.WEIGHTED)  # gradient -w A where nothing changed
SCALE = 0.2  # of the loss: penalties and ratios near 1 change it less
AGREES = 1e-3  # relative difference of sums in fp32
GAP_EXACT, GAP_ROUNDED = 0.005, 0.2  # mean |engine - learner| of fresh tokens, in nats
RESTART = "look for what changes the learner's {}, and --resume"


class StepCheck:
    """Compares the proof of each step with its batch.

    `exact` says that the learner computes in fp32, and `constant` is `rollout.sampling.max_new_tokens`.
    """

    def __init__(self, algorithm: AlgorithmConfig, *, exact: bool, constant: int) -> None:
        self._algorithm = algorithm
        self._exact = exact
        self._constant = constant
        self._reference = ""
        # the loss is the objective's alone, and a package's own objective may be any
        self._is_plain = algorithm.objective in PLAIN and ALGORITHMS.get(algorithm.name).objective is None

    def observe(self, batch: StepBatch, metrics: StepMetrics, *, step: int) -> Iterator[Alarm]:
        """Take a step that the learner made."""
        proof = metrics.proof
        if proof is None:
            return
        least, most = _tokens(batch)
        if proof.ids != id_sum(trajectory.id for trajectory in batch.trajectories):
            yield _of_step(step, f"trained on other trajectories than the {len(batch.trajectories)} of its batch")
        elif not least <= proof.tokens <= most:
            yield _of_step(step, f"trained on {proof.tokens:,} tokens, and its batch has {most:,}")
        expected = _weight(batch, self._algorithm.aggregation, constant=self._constant)
        if abs(proof.weight - expected) > AGREES * max(expected, AGREES):
            yield _of_step(step, f"its loss weights add up to {proof.weight:.6g}, and {expected:.6g} were packed")
        if proof.not_finite and metrics.skipped < metrics.updates:
            yield _of_step(step, f"{proof.not_finite:,} tokens without finite numbers took part in an update")
        for sums in proof.gradients:
            bound = (0.01 if self._exact else 0.2) * sums.spread + 1e-9
            if not abs(sums.found - sums.expected) <= bound and metrics.skipped < metrics.updates:
                yield _of_step(
                    step,
                    f"the gradient is not that of its loss: {sums.found:.4g} in place of {sums.expected:.4g}, and"
                    f" rounding is {bound:.2g}; a rank, a microbatch or a factor is wrong",
                )
                break
            if self._is_plain and sums.scale is not None and abs(sums.scale - 1) > SCALE:
                yield _of_step(
                    step, f"its loss is {sums.scale:.3g} times that of its definition; a count of tokens is wrong"
                )
                break
        if proof.still:
            yield Alarm(
                "optimizer",
                "learner",
                f"step {step}: {proof.still[0]} and {len(proof.still) - 1} more have gradients and do not change:"
                " they are not in the optimizer, or learner.lr is too small for their type",
            )
        if proof.reference and self._reference and proof.reference != self._reference:
            yield reference_alarm(step)
        self._reference = self._reference or proof.reference
        if metrics.mismatch.mean > (GAP_EXACT if self._exact else GAP_ROUNDED):
            yield Alarm(
                "probes",
                "learner",
                f"step {step}: log-probabilities of fresh tokens differ from the engines' by"
                f" {metrics.mismatch.mean:.3g} in the mean; engine and learner compute different models, or one"
                " hides numbers that are not finite",
            )


def reference_alarm(step: int) -> Alarm:
    """The alarm of a reference model that changed."""
    return Alarm(
        "reference", "learner", f"step {step}: the reference model changed; {RESTART.format('reference')}"
    )


def _of_step(step: int, fault: str) -> Alarm:
    return Alarm("step", "learner", f"step {step}: {fault}; {RESTART.format('batches')}")


def _tokens(batch: StepBatch) -> tuple[int, int]:
    """Least and most tokens with a loss weight: in a tree the first token of each sequence may have no row."""
    most, without_row = 0, 0
    for item in batch.trajectories:
        if item.weight > 0:
            most += item.num_trained
            without_row += len(sequences_of(item.spans)) if is_tree(item.spans) else 0
    return most - without_row, most


def _weight(batch: StepBatch, aggregation: Aggregation, *, constant: int) -> float:
    """Sum of the loss weights of a batch, by the definition of its aggregation."""
    trained = [(item.weight, item.num_trained) for item in batch.trajectories]
    count = len(trained) + len(batch.tokens_without_signal)
    if aggregation is Aggregation.TOKEN_MEAN:
        total = sum(tokens for _, tokens in trained) + sum(batch.tokens_without_signal)
        return sum(weight * tokens for weight, tokens in trained) / max(1, total)
    if aggregation is Aggregation.CONSTANT:
        return sum(weight * tokens for weight, tokens in trained) / (constant * count)
    return sum(weight for weight, tokens in trained if tokens) / count
