"""Planners by name. A planner is one file and a line here, or a class that an installed package announces."""

from laminar_py.config.registry import Registry
from laminar_py.repack.planner import PlannerFactory

PLANNERS = Registry(
    PlannerFactory,  # type: ignore[type-abstract]
    field="repack.planner",
    group="laminar_py.planners",
    built_in={
        "paper": "laminar_py.repack.paper:PaperPlanner",
        "predictive": "laminar_py.repack.predictive:PredictivePlanner",
    },
)
