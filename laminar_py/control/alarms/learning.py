"""Alarms on a learner step: its proof must agree with the batch that the ledger records. Pure."""

from collections import deque
from collections.abc import Iterator

from laminar_py.config.algorithm import ALGORITHMS, Aggregation, AlgorithmConfig, Correction, Objective
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.rollout import SamplingConfig
from laminar_py.control.alarms.quantization import LEAST_FRESH
from laminar_py.control.consumption import StepBatch
from laminar_py.learner.schedule import lr_factor
from laminar_py.records.columns import Source
from laminar_py.records.metrics import StepMetrics
from laminar_py.records.proofs import Alarm, StepProof, id_sum
from laminar_py.records.spans import is_tree, sequences_of
from laminar_py.records.trajectory import TrajectoryRef

PLAIN = (Objective.CLIP, Objective.WEIGHTED)  # gradient -w A and penalties where nothing changed
OF_SEQUENCES = (Correction.SEQUENCE_MASK, Correction.NEGATIVE_MASK)  # a token's weight follows from others
SCALE = 0.2  # of the loss: ratios near 1 change it less
APART, OF_PENALTY = 1e-4, 0.1  # of advantages and penalties, where ratios are 1
MOVES = 8  # steps over which updates are counted
LEAST_MOVED, UPHILL = 32, 0.75  # of tensors
LEAST, COPIED = 256, 0.9  # of tokens
AGREES = 1e-3  # relative difference of sums in fp32
ROUNDING = 2.0**-16  # of log p + H in fp32: where the policy is sure, both are near 0, and logits are not
GAP_EXACT, GAP_ROUNDED = 2e-4, 0.2  # mean |engine - learner| of fresh tokens, in nats; in fp32 it is 1e-6
RESTART = "look for what changes the learner's {}, and --resume"


class StepCheck:
    """Compares the proof of each step with its batch.

    `exact` says that the learner computes in fp32; `learner`, `sampling` and the number of `steps` are the run's.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        learner: LearnerConfig,
        *,
        exact: bool,
        sampling: SamplingConfig,
        steps: int,
    ) -> None:
        self._algorithm = algorithm
        self._learner = learner
        self._steps = steps
        self._exact = exact
        self._constant = sampling.max_new_tokens
        self._reference = ""
        of_package = ALGORITHMS.get(algorithm.name).objective is not None
        self._is_plain = algorithm.objective in PLAIN and not of_package
        self._by_token = algorithm.correction not in OF_SEQUENCES
        self._refers_to_start = algorithm.has_reference and algorithm.reference is None
        self._moved: deque[tuple[int, int]] = deque(maxlen=MOVES)  # (moved, uphill) of the last steps

    def observe(
        self, batch: StepBatch, metrics: StepMetrics, *, step: int, made: int, compares: bool = True
    ) -> Iterator[Alarm]:
        """Take a step of the run, by which the learner has `made` so many: not those without trajectories.

        It `compares` if engines computed fresh tokens with the learner's weights.
        """
        proof = metrics.proof
        if proof is None:
            return
        faults = [*self._counts(batch, proof), *_drift(metrics, proof), *self._numbers(proof)]
        yield from (
            Alarm("step", "learner", f"step {step}: {fault}; {RESTART.format('batches')}") for fault in faults
        )
        if metrics.critic is not None and metrics.critic.not_finite:
            count, words = metrics.critic.not_finite, RESTART.format("critic")
            yield Alarm(
                "step", "learner", f"step {step}: the critic's values of {count:,} tokens are not finite; {words}"
            )
        if proof.still:
            yield Alarm(
                "optimizer",
                "learner",
                f"step {step}: {proof.still[0]} and {len(proof.still) - 1} more have gradients and do not change:"
                " they are not in the optimizer, or learner.lr (of a critic: algorithm.critic.lr) is too small for"
                " their type",
            )
        yield from self._updates(metrics, proof, step, made)
        yield from self._uphill(proof, step)
        if proof.reference and self._reference and proof.reference != self._reference:
            yield reference_alarm(step)
        self._reference = self._reference or proof.reference
        gap = GAP_EXACT if self._exact else GAP_ROUNDED
        if proof.fresh < LEAST_FRESH:
            return
        if step == 1 and self._refers_to_start and proof.reference_gap > gap:
            yield Alarm(
                "reference",
                "learner",
                f"step 1: the reference model is the policy's start, and its log-probabilities differ by"
                f" {proof.reference_gap:.3g} from the policy's; compare both models",
            )
        if compares and metrics.mismatch.mean > gap:
            yield Alarm(
                "probes",
                "learner",
                f"step {step}: log-probabilities of fresh tokens differ from the engines' by"
                f" {metrics.mismatch.mean:.3g} in the mean; engine and learner compute different models, or one"
                " hides numbers that are not finite",
            )

    def _counts(self, batch: StepBatch, proof: StepProof) -> Iterator[str]:
        """Faults in what the step trained on."""
        least, most = _tokens(batch)
        if proof.ids != id_sum(trajectory.id for trajectory in batch.trajectories):
            yield f"trained on other trajectories than the {len(batch.trajectories)} of its batch"
        elif not least <= proof.tokens <= most:
            yield f"trained on {proof.tokens:,} tokens, and its batch has {most:,}"
        weights = _weights(batch, self._algorithm.aggregation, constant=self._constant)
        expected = sum(weights)
        if abs(proof.weight - expected) > AGREES * max(expected, AGREES):
            yield f"its loss weights add up to {proof.weight:.6g}, and {expected:.6g} were packed"
        if not self._algorithm.normalises_step and not any(map(_has_token_advantages, batch.trajectories)):
            signals = [weight * item.advantage for weight, item in zip(weights, batch.trajectories, strict=True)]
            rewards = [item.reward or 0.0 for item in batch.trajectories]
            gains = [signal * reward for signal, reward in zip(signals, rewards, strict=True)]
            for found, parts, words in ((proof.signal, signals, ""), (proof.gain, gains, " times rewards")):
                if abs(found - sum(parts)) > AGREES * sum(map(abs, parts)) + AGREES * AGREES:
                    yield (
                        f"its loss weights times advantages{words} add up to {found:.4g}, and {sum(parts):.4g}"
                        " were recorded"
                    )
                    break
        if proof.unsure >= LEAST and proof.copied > COPIED * proof.unsure:
            yield f"{proof.copied:,} of {proof.unsure:,} recorded log-probabilities are the learner's own"

    def _numbers(self, proof: StepProof) -> Iterator[str]:
        """Faults in the gradients of a step."""
        if proof.not_finite:
            yield f"{proof.not_finite:,} tokens without finite numbers took part in an update"
        for sums in proof.gradients:
            bound = (0.01 if self._exact else 0.2) * sums.spread + ROUNDING * sums.size + 1e-9
            if not abs(sums.found - sums.expected) <= bound:
                yield (
                    f"the gradient is not that of its loss: {sums.found:.4g} in place of {sums.expected:.4g}, and"
                    f" rounding is {bound:.2g}; a rank, a microbatch or a factor is wrong"
                )
                return
            if self._is_plain and sums.scale is not None and abs(sums.scale - 1) > SCALE:
                yield f"its loss is {sums.scale:.3g} times that of its definition; a count of tokens is wrong"
                return
            exact = sums.exact
            if (
                self._is_plain
                and self._by_token
                and exact.apart > APART * exact.advantages + OF_PENALTY * exact.penalties
            ):
                yield (
                    f"the loss of tokens with ratio 1 has derivatives that differ by {exact.apart:.3g} from its"
                    f" definition's, whose advantages give {exact.advantages:.3g} and penalties"
                    f" {exact.penalties:.3g}; a sign or a factor is wrong"
                )
                return

    def _updates(self, metrics: StepMetrics, proof: StepProof, step: int, made: int) -> Iterator[Alarm]:
        """Name tensors that AdamW did not move as the settings say, and a rate that is not of the schedule."""
        fault = self._rate_fault("learner.lr", self._learner, metrics.learning_rate, made)
        critic = self._algorithm.critic
        if not fault and critic is not None and metrics.critic is not None:
            used, settings = metrics.critic.learning_rate, critic.optimizer(self._learner)
            fault = self._rate_fault("algorithm.critic.lr", settings, used, made)
        if not fault and proof.astray:
            fault = (
                f"{proof.astray[0]} and {len(proof.astray) - 1} more were not updated as AdamW does by learner.lr"
                " (of a critic: algorithm.critic.lr), betas, weight_decay and grad_clip, or not at all"
            )
        if fault:
            yield Alarm("optimizer", "learner", f"step {step}: {fault}; {RESTART.format('optimizer')}")

    def _rate_fault(self, field: str, settings: LearnerConfig, used: float, made: int) -> str:
        """Fault of a learning rate that is not of the schedule of `field`, or ""."""
        rate = settings.lr * lr_factor(made - 1, settings, total_steps=self._steps)
        if abs(used - rate) > AGREES * rate:  # no rate, NaN, is of a step without an update
            return f"its learning rate was {used:.4g}, and the schedule of {field} has {rate:.4g}"
        return ""

    def _uphill(self, proof: StepProof, step: int) -> Iterator[Alarm]:
        """Name an optimizer that follows gradients in place of descending them.

        A tensor's value with the largest gradient moves against it, unless momentum is stronger, which is rare.
        """
        self._moved.append((proof.moved, proof.uphill))
        moved, uphill = (sum(counts) for counts in zip(*self._moved, strict=True))
        if moved >= LEAST_MOVED and uphill > UPHILL * moved:
            self._moved.clear()
            yield Alarm(
                "optimizer",
                "learner",
                f"step {step}: {uphill} of {moved} tensors moved along their gradients, so the loss rises;"
                f" {RESTART.format('optimizer')}",
            )


def _drift(metrics: StepMetrics, proof: StepProof) -> Iterator[str]:
    """Faults in the log-probabilities to which the loss compares the policy's, if no update was skipped."""
    drift = metrics.tokens.kl_behaviour_k1 * proof.weight
    if not metrics.skipped and abs(drift - proof.drift) > AGREES * abs(proof.drift) + AGREES * AGREES:
        yield (
            f"its loss compares the policy with log-probabilities {drift:.4g} nats away, and the recorded ones are"
            f" {proof.drift:.4g} away"
        )


def reference_alarm(step: int, source: Source = Source.REFERENCE) -> Alarm:
    """The alarm of a reference model, or of a teacher, that changed."""
    part = "learner" if source is Source.REFERENCE else str(source)
    return Alarm("reference", part, f"step {step}: the {source} model changed; {RESTART.format(source)}")


def _tokens(batch: StepBatch) -> tuple[int, int]:
    """Least and most tokens with a loss weight: in a tree the first token of each sequence may have no row."""
    most, without_row = 0, 0
    for item in batch.trajectories:
        if item.weight > 0:
            most += item.num_trained
            without_row += len(sequences_of(item.spans)) if is_tree(item.spans) else 0
    return most - without_row, most


def _has_token_advantages(item: TrajectoryRef) -> bool:
    """Whether the tokens of a trajectory may have different advantages, or not all of them rows."""
    return bool(item.roles) or item.earned is not None or is_tree(item.spans)


def _weights(batch: StepBatch, aggregation: Aggregation, *, constant: int) -> list[float]:
    """[trajectories] sum of the loss weights of each trajectory's tokens, by the definition of the aggregation."""
    trained = [(item.weight, item.num_trained) for item in batch.trajectories]
    count = len(trained) + len(batch.tokens_without_signal)
    if aggregation is Aggregation.TOKEN_MEAN:
        total = sum(tokens for _, tokens in trained) + sum(batch.tokens_without_signal)
        return [weight * tokens / max(1, total) for weight, tokens in trained]
    if aggregation is Aggregation.CONSTANT:
        return [weight * tokens / (constant * count) for weight, tokens in trained]
    return [weight / count if tokens else 0.0 for weight, tokens in trained]
