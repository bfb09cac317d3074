"""Texts that the model wrote, as every view gets them: rows of a list, and one response with all beside it.

Made by `reading`; shown by `laminar samples`, `laminar audit RUN show`, the report and the dashboard. Text stands
here as the model wrote it, whatever it contains: who shows it escapes it (`records.host`, HTML).
"""

from enum import StrEnum

import msgspec

from laminar_py.records.evaluations import set_of
from laminar_py.records.scoring import TermValue
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Status


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a list, e.g. sample "g3.1" of prompt "p17", 41 tokens long, that step 12 trained on.

    What is not known yet, or never was, is None.
    """

    number: int  # 1, 2, 3, ... in the order of issue
    id: str
    prompt_id: str
    group_id: str  # of an evaluation: its pass
    kind: Kind
    status: Status
    step: int | None  # the learner step that trained on it; none trains on an evaluation
    staleness: int | None  # learner steps
    oldest_version: int | None
    newest_version: int | None
    reward: float | None
    advantage: float | None
    length: int  # response tokens on record
    finish_reason: FinishReason | None
    cap: str | None  # the cap that cut it: `tokens` or `seconds`
    drop_reason: DropReason | None
    drop_detail: str | None

    @property
    def set_name(self) -> str:
        """Evaluation set that it answers; "" of what is for training."""
        return set_of(self.group_id) if self.kind is Kind.EVAL else ""


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Response tokens [start, end) that one replica made under one version.

    E.g. `TokenSpan(version=7, replica=2, start=0, end=41)`.
    """

    version: int | None  # None where an environment wrote them
    replica: int | None  # None: not on record
    start: int
    end: int
    kv_version: int | None = None  # version of the KV cache, where it is an older one


class PromptVisit(msgspec.Struct, frozen=True, kw_only=True):
    """Visit of a prompt: its samples in one group, or in one pass of an evaluation.

    E.g. `PromptVisit(group_id="g40", number=321, samples=8, scored=8, mean_reward=0.25, solved=0.25, ...)`.
    """

    group_id: str
    kind: Kind
    number: int  # of its first trajectory: places visits in the order of issue
    step: int | None  # the last learner step that trained on one of them
    version: int | None  # the oldest in them
    samples: int
    scored: int
    mean_reward: float | None  # over those that are scored; None without any
    solved: float | None  # share of those that are scored whose reward is at least `data.solved_at`
    mean_length: float  # response tokens


class FullSample(msgspec.Struct, frozen=True, kw_only=True):
    """A response as text, with its problem, its reward, its group and the other visits of its prompt.

    E.g. to "2+2=" the tokens `["4", "<eos>"]` of ids `[6, 1]`. L is the number of response tokens so far.
    """

    row: SampleRow
    prompt: str  # as the model got it
    answer: str
    task: str
    tokens: list[str]  # [L] texts, whose join is the response; bytes of a character stand where they complete it
    ids_only: str  # why `tokens` are ids and no text, in one line; "" where they are text
    ids: list[int]  # [L]
    logprobs: list[float | None]  # [L] of the policy that sampled them; None where not finite
    spans: list[TokenSpan]  # cover [0, L)
    terms: list[TermValue]  # of the reward, with what each verifier said; empty where none is on record
    columns: dict[str, list[float | None]]  # numbers per token that are on record, by name, each [L]
    siblings: list[SampleRow]  # samples of its prompt in its group, itself among them, in the order of issue
    history: list[PromptVisit]  # visits of its prompt, its own among them, in the order of issue
    lost: str = ""  # why its tokens cannot be read, in one line: then L is 0

    @property
    def text(self) -> str:
        """The response, special tokens included."""
        return "".join(self.tokens)


class SampleOrder(StrEnum):
    """Orders of a list; trajectories without the number that it goes by are left out."""

    CONTRAST = "contrast"  # of each of the newest groups with scores the best one, and the worst if it differs
    NEWEST = "newest"
    OLDEST = "oldest"
    BEST = "best"
    WORST = "worst"
    LONGEST = "longest"
    SHORTEST = "shortest"
    STALEST = "stalest"


class Colour(StrEnum):
    """Meanings of a token's colour."""

    VERSION = "version"  # of the weights that made it
    LOGPROB = "logprob"
    NONE = "none"
