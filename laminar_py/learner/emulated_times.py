"""Time that an optimizer step takes on emulated GPUs. Pure; for the emulated learner and the simulator."""

import heapq
from collections.abc import Sequence

from laminar_py.config.emulated_profile import LearnerTimes
from laminar_py.learner.packing.balance import attention_share, sequence_cost


def emulated_step_s(times: LearnerTimes, lengths: Sequence[Sequence[int]], *, devices: int) -> float:
    """Emulated seconds: each microbatch runs whole on one device, and the busiest device is waited for.

    `lengths` are the tokens of each sequence of each microbatch.
    """
    share = attention_share(
        hidden_size=times.hidden_size, num_layers=times.num_layers, num_parameters=times.num_parameters
    )
    costs = [sum(sequence_cost(length, attention_share=share) for length in batch) for batch in lengths]
    busy = [0.0] * devices
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(busy, busy[0] + cost)  # to the device that has least
    return times.optimizer_s + max(busy) / times.train_tokens_per_s
