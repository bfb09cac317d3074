"""The microbatch: what packer and learner share.

T is the number of packed tokens, S of its sequences, R of the responses that these are of.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.columns import Array
from laminar_py.records.recordings import SamplingMask


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """S sequences packed without padding into T tokens.

    Two sequences of 3 and 2 tokens: `cu_seqlens [0, 3, 5]`, `position_ids [0, 1, 2, 0, 1]`. `labels[t]` is the
    token after `input_ids[t]` in the same sequence (0 at a sequence's end); the per-token arrays stand at
    the position that predicts the token, and `loss_weights` is 0 where nothing is learned.
    """

    input_ids: IntArray  # [T]
    cu_seqlens: IntArray  # [S + 1]
    position_ids: IntArray  # [T]
    labels: IntArray  # [T]
    loss_weights: FloatArray  # [T] over the step, all ranks together, they sum to 1, see `packing.packer`
    behaviour_logprobs: FloatArray  # [T]
    advantages: FloatArray  # [T]
    staleness: IntArray  # [T] learner steps since the weights that made the token
    responses: IntArray  # [S] place of the response that each sequence is of: several are a tree (`records.tree`)
    rewards: FloatArray  # [R] of whole responses
    groups: IntArray  # [R] place of each response's group in the step
    columns: dict[str, Array] = msgspec.field(default_factory=dict)  # by name, each [T], for the loss
    support: SamplingMask | None = None  # of T tokens; none of a token: it is the whole vocabulary
    experts: npt.NDArray[np.int16] | None = None  # [T, layers, k] as recorded, -1 where not

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, T."""
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each sequence."""
        lengths: list[int] = np.diff(self.cu_seqlens).tolist()
        return lengths
