"""Verdicts of the term `math` and of its library alone on pairs of response and reference it was not tuned on.

The pairs are those of `tests/reward/verifiers`, each with its verdict.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from laminar_lab.bench.report import Row
from laminar_lab.bench.reward.mathematics import request
from laminar_py.config import ConfigError
from laminar_py.config.reward import REWARDS
from laminar_py.records import Reward

ROWS = "math_right_unseen math_mistaken_unseen math_library_right_unseen math_library_mistaken_unseen"
PAIRS = Path(__file__).parents[3] / "tests" / "reward" / "verifiers" / "pairs_unseen.jsonl"


class LabelledPair(msgspec.Struct, frozen=True, kw_only=True):
    r"""Line of the file, e.g. a response `$\boxed{105}$` to the reference `1.05`, which is not right."""

    kind: str
    response: str
    reference: str
    right: bool
    why: str


def rows() -> list[Row]:
    """Share of right verdicts, and wrong responses that were accepted. Ten seconds."""
    if not PAIRS.is_file():
        raise ConfigError(f"{PAIRS}: no such file; run this in the project's folder")
    pairs = [msgspec.json.decode(line, type=LabelledPair) for line in PAIRS.read_text().splitlines()]
    num_wrong = sum(not pair.right for pair in pairs)
    conditions = f"{len(pairs)} pairs of {len({pair.kind for pair in pairs})} kinds, {num_wrong} of them wrong"
    return [
        *_judged("math", pairs, _verifier(), conditions),
        *_judged("math_library", pairs, _library, f"math-verify alone, as it is documented; {conditions}"),
    ]


def _judged(
    name: str, pairs: Sequence[LabelledPair], accepts: Callable[[LabelledPair], bool], conditions: str
) -> list[Row]:
    accepted = [accepts(pair) for pair in pairs]
    right = sum(pair.right == verdict for pair, verdict in zip(pairs, accepted, strict=True))
    mistaken = sum(verdict and not pair.right for pair, verdict in zip(pairs, accepted, strict=True))
    return [
        Row(f"{name}_right_unseen", right / len(pairs), "share of all pairs", conditions),
        Row(f"{name}_mistaken_unseen", float(mistaken), "wrong responses accepted", conditions),
    ]


def _verifier() -> Callable[[LabelledPair], bool]:
    """The term as a scorer has it."""
    kind = REWARDS.get("math")
    assert kind.make is not None, "the term is a function"
    judge = kind.make(kind.settings.model_validate({"kind": "math"}))

    def accepts(pair: LabelledPair) -> bool:
        reward = judge(request(pair.response, pair.reference))
        assert isinstance(reward, Reward), "it says why, too"
        return reward.value == 1.0

    return accepts


def _library(pair: LabelledPair) -> bool:
    import math_verify  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    reference, given = math_verify.parse(f"${pair.reference}$"), math_verify.parse(pair.response)
    return bool(math_verify.verify(reference, given))
