"""Trial of a reward before there is a real response: what a mistake in it says is told while the learner starts.

Pure; `orchestrator.scoring` has the trials scored. Nothing that a trial says ends a run: a reward may well expect
more of a response than its answer. The first real responses do that, see `failures`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class Trial:
    """A made-up response, e.g. the right answer alone to prompt "p0"."""

    request: ScoringRequest
    text: str  # says what it is

    def complaint(self, score: Score, *, title: str) -> str:
        """Line for the user on a trial that has no value."""
        return f"reward.use={title}: fails on {self.text} (a trial, made up): {score.detail}"


def trials(prompts: Iterable[Prompt], *, encode: Callable[[str], IntArray], end: int) -> list[Trial]:
    """Trials of the reward with each prompt's answer alone, and with an empty response; `end` is the last id."""
    made: list[Trial] = []
    for prompt in prompts:
        of_task = f" of task {prompt.task!r}" if prompt.task else ""
        responses = {prompt.answer: "the right answer", "": "an empty response"}
        for answer, kind in responses.items():
            ids = np.append(encode(answer), end).astype(np.int32)
            request = ScoringRequest(
                trajectory_id=f"trial/{len(made)}",
                prompt=prompt.text,
                response="",
                answer=prompt.answer,
                task=prompt.task,
                finish_reason=FinishReason.STOP,
                prompt_ids=prompt.ids,
                response_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                fields_json=prompt.fields_json,
                environment_reward=float(bool(answer)),
            )
            made.append(Trial(request, f"{kind} to prompt {prompt.id!r}{of_task}"))
    return made
