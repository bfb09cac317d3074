"""References to the newest finished responses of each prompt, from which another replica may draft.

`control.state` owns them. They are hints: a resumed run begins without any, and a replica that cannot read one
drafts without it.
"""

from collections import OrderedDict, deque

from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.replica import EarlierResponse

MOST_SENT = 8  # responses of a prompt
MOST_KEPT = 2**16  # responses of all prompts


class EarlierResponses:
    """At most `MOST_SENT` responses of a prompt; the prompt that finished last comes last, and leaves last."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[str, deque[tuple[int | None, EarlierResponse]]] = OrderedDict()
        self._num_kept = 0

    def add(self, trajectory: LiveTrajectory) -> None:
        """Note a finished response, and the replica that has it."""
        prompt = trajectory.prompt.id
        kept = self._by_prompt.setdefault(prompt, deque(maxlen=MOST_SENT))
        self._by_prompt.move_to_end(prompt)
        self._num_kept -= len(kept)
        found = EarlierResponse(trajectory.id, trajectory.last_version or 0, trajectory.tokens)
        kept.append((trajectory.replica, found))
        self._num_kept += len(kept)
        while self._num_kept > MOST_KEPT:
            self._num_kept -= len(self._by_prompt.popitem(last=False)[1])

    def lost(self, replica: int) -> None:
        """Note that a replica's process ended, so that its successor gets these responses like any other."""
        for kept in self._by_prompt.values():
            for place, (owner, response) in enumerate(kept):
                if owner == replica:
                    kept[place] = (None, response)

    def for_replica(self, replica: int, prompt: str) -> tuple[EarlierResponse, ...]:
        """Return the responses to a prompt by its id that other replicas finished, the oldest first."""
        return tuple(response for owner, response in self._by_prompt.get(prompt, ()) if owner != replica)
