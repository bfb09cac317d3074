"""Look-ahead: which of the next ready groups make up a step so that it fills its microbatches. Pure.

Called by `control.consumption`. All ranks get equally many microbatches, so a step costs whole multiples of
ranks * max_tokens tokens; a group that comes too early for a good fit may be passed over, but not for long.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SPARE = 0.04  # of a unit: what packing leaves empty of a step, however many units it has
WORTH = 0.005  # share of a step's microbatches that an exchange must fill


def choose(tokens: Sequence[int], *, due: Sequence[bool], count: int, unit: int) -> list[int]:
    """Indices, ascending, of the `count` groups that a step takes out of a window that holds at least so many.

    The window is in staleness order. `due` groups are never passed over: none is left out for a later one. `unit`
    is ranks * max_tokens. Groups are exchanged for later ones one pair at a time, each time the best pair, as long
    as that wastes less. With one unit of 100, `choose([60, 50, 35], due=[False] * 3, count=2, unit=100)` is
    `[0, 2]`.
    """
    assert len(tokens) == len(due) >= count, f"{count} groups out of {len(tokens)}, {len(due)}"
    taken = list(range(count))
    left = list(range(count, _reach(due, count)))
    sizes = np.array(tokens, np.int64)
    for _ in range(len(left)):
        leaving = np.array([index for index in taken if not due[index]], np.int64)
        if not leaving.size:
            break
        now = sizes[taken].sum(keepdims=True)
        totals = now - sizes[leaving][:, None] + sizes[left][None, :]
        allowed = leaving[:, None] < np.array(left)[None, :]
        wastes = np.where(allowed, _waste(totals, unit), 1.0)
        out, into = divmod(int(wastes.argmin()), len(left))
        if wastes[out, into] > _waste(now, unit)[0] - WORTH:
            break
        taken.remove(int(leaving[out]))
        taken.append(left[into])
        left[into] = int(leaving[out])
    return sorted(taken)


def _reach(due: Sequence[bool], count: int) -> int:
    """End of the window: nothing that lies behind a due group may be taken in its place."""
    for index in range(count, len(due)):
        if due[index]:
            return index + 1
    return len(due)


def _waste(totals: npt.NDArray[np.int64], unit: int) -> npt.NDArray[np.float64]:
    """Share of the microbatches of a step with so many tokens that stays empty."""
    filled = totals / unit
    wasted: npt.NDArray[np.float64] = 1 - filled / np.ceil(filled + SPARE)
    return wasted
