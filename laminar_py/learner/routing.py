"""Router replay: experts that the engine chose, forced in training of mixture models. Called by `model`'s forward.

A sampler and a learner that compute a little differently choose other experts for some tokens, and the policy that
is trained is then not the one that drew them. With the choice replayed, weights of the chosen experts come from
the learner's own router, so its gradient is kept. R3, Ma et al. 2025.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laminar_py.config.section import ConfigError
from laminar_py.records.batch import MicroBatch

RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(logits [T, E], weights [T, k], experts [T, k]) of transformers' routers."""

Hook: TypeAlias = Callable[[nn.Module, object, RouterOutput], RouterOutput]

KNOWN = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")  # softmax over all experts, then the k largest


class RouterReplay:
    """Hooks on all routers of a model; without `force` they change nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self._name = model.config.model_type
        self._renormalises = bool(getattr(model.config, "norm_topk_prob", self._name == "mixtral"))
        self._forced: Tensor | None = None  # [T, layers, k], -1: the router's own; stays for the backward pass
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(self._hook(layer))

    def force(self, batch: MicroBatch, *, device: torch.device) -> None:
        """Replay what is recorded in this microbatch, in its forward and backward passes."""
        self._forced = None
        if batch.experts is None:
            return
        if self._name not in KNOWN:
            raise ConfigError(
                f"rollout.record=routed_experts: routers of {self._name} models cannot be replayed; leave it out"
            )
        layers = batch.experts.shape[1]
        assert layers == len(self._routers), f"experts of {layers} layers for {len(self._routers)} routers"
        self._forced = torch.tensor(batch.experts, dtype=torch.long, device=device)

    def _hook(self, layer: int) -> Hook:
        def replay(router: nn.Module, _: object, output: RouterOutput) -> RouterOutput:
            if self._forced is None:
                return output
            logits, weights, own = output
            recorded = self._forced[:, layer]
            experts = torch.where(recorded < 0, own, recorded)
            chosen = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, experts)
            if self._renormalises:
                chosen = chosen / chosen.sum(-1, keepdim=True)
            return logits, chosen.to(weights.dtype), experts

        return replay
