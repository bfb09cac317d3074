"""A score as the weighted sum of the terms of a reward. Pure; `scorer` has the terms called."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from laminar_py.config.reward import TermConfig
from laminar_py.records.columns import TOKEN_REWARDS, Array, Column, Source, TokenValues, token_values
from laminar_py.records.roles import RoleCredit
from laminar_py.records.scoring import Score, TermValue
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.environment import EnvironmentTerm
from laminar_py.reward.outcome import LARGEST, Outcome


def add_up(
    trajectory_id: str,
    outcomes: Sequence[tuple[TermConfig, Outcome]],
    *,
    columns: Sequence[Column],
    roles: Sequence[RoleCredit] = (),
    length: int,
    at_once: float,
) -> tuple[Score, dict[str, TokenValues]]:
    """Score of a response of `length` tokens, from a scorer that works on `at_once` like it at the same time.

    With it columns [L] that its terms gave. The first term without a value leaves it without one.

    Where a term has a number for each token the sum has too, and those with one number are added at the last.
    `columns` are wanted of any of the terms; `roles` have rewards of the environment.
    """

    def score(value: float | None, **fields: Any) -> Score:
        elapsed_s = sum(outcome.elapsed_s for _, outcome in outcomes)
        return Score(trajectory_id=trajectory_id, value=value, elapsed_s=elapsed_s, at_once=at_once, **fields)

    def failed(reason: DropReason, detail: str) -> tuple[Score, dict[str, TokenValues]]:
        return score(None, failure=reason, detail=detail), {}

    for term, outcome in outcomes:
        if outcome.failure is not None:
            name = f"{term.title}: " if len(outcomes) > 1 else ""
            return failed(outcome.failure, f"{name}{outcome.detail}")
    twice = _column_given_twice(outcomes)
    if twice is not None:
        detail = f"two terms gave the column {twice!r}; leave it to one of them"
        return failed(DropReason.REWARD_FAILED, detail)
    given = {name: values for _, outcome in outcomes for name, values in outcome.columns.items()}
    missing = [c.name for c in columns if c.source is Source.SCORER and c.name not in given]
    if missing:
        detail = f"the reward function gave no column {missing[0]!r}, which the algorithm needs"
        return failed(DropReason.REWARD_FAILED, detail)
    tokens = _token_rewards(outcomes, length) if TOKEN_REWARDS in given else None
    if tokens is not None:
        given[TOKEN_REWARDS] = token_values(tokens)
    value = float(tokens.sum()) if tokens is not None else sum(term.weight * _value(of) for term, of in outcomes)
    if tokens is not None and roles:
        detail = "roles have rewards of their own, and a term gave one for each token; leave that out"
        return failed(DropReason.REWARD_FAILED, detail)
    if not abs(value) <= LARGEST:
        detail = f"its terms add up to {value:g}; keep the sum below {LARGEST:g}"
        return failed(DropReason.REWARD_FAILED, detail)
    return score(value, terms=_term_values(outcomes), roles=_with_terms(roles, outcomes)), given


def _with_terms(
    roles: Sequence[RoleCredit], outcomes: Sequence[tuple[TermConfig, Outcome]]
) -> tuple[RoleCredit, ...]:
    """Credit of roles where the environment's reward is a term: what the others gave is added to each."""
    weights = [term.weight for term, _ in outcomes if isinstance(term, EnvironmentTerm)]
    rest = sum(term.weight * _value(of) for term, of in outcomes if not isinstance(term, EnvironmentTerm))
    if not weights:
        return ()
    return tuple(msgspec.structs.replace(role, reward=sum(weights) * role.reward + rest) for role in roles)


def _column_given_twice(outcomes: Sequence[tuple[TermConfig, Outcome]]) -> str | None:
    """A column other than the token rewards, which add up, that two terms gave."""
    names = Counter(name for _, outcome in outcomes for name in outcome.columns if name != TOKEN_REWARDS)
    return next((name for name, times in names.items() if times > 1), None)


def _token_rewards(outcomes: Sequence[tuple[TermConfig, Outcome]], length: int) -> Array:
    total = np.zeros(length, np.float32)
    with np.errstate(over="ignore"):
        for term, outcome in outcomes:
            values = outcome.columns.get(TOKEN_REWARDS)
            if values is not None:
                total += np.float32(term.weight) * values.array
            else:
                total[-1] += np.float32(term.weight * _value(outcome))
    return total


def _value(outcome: Outcome) -> float:
    assert outcome.value is not None, "a term without a value has a failure"
    return outcome.value


def _term_values(outcomes: Sequence[tuple[TermConfig, Outcome]]) -> list[TermValue]:
    """Record of the terms: the value of each, or the numbers that its function named, with the term where two
    have the same name."""
    named = [(term, outcome, outcome.named or {term.title: _value(outcome)}) for term, outcome in outcomes]
    times = Counter(name for _, _, values in named for name in values)
    return [
        TermValue(
            name=name if times[name] == 1 else f"{term.title}.{name}",
            value=value,
            elapsed_s=outcome.elapsed_s,
            text=outcome.text,
            said=outcome.said,
        )
        for term, outcome, values in named
        for name, value in values.items()
    ]
