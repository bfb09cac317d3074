"""A request for tests: a 7B on two nodes of eight H100s."""

from dataclasses import replace

from laminar_lab.gpus import gpu_named
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_py.config.learner import LearnerConfig

LENGTHS = Lengths(median=1500, sigma=0.99, cap=16_384, prompt=400)


def make_request(*, size="7B", gpu="H100", nodes=2, per_node=8, **others) -> PlanRequest:
    name, shape = model_named(size)
    request = PlanRequest(
        model=name,
        shape=shape,
        fleet=GpuFleet(gpu=gpu_named(gpu), nodes=nodes, per_node=per_node),
        lengths=LENGTHS,
        prompts_per_step=32,
        group_size=16,
        learner=LearnerConfig(),
    )
    return replace(request, **others)
