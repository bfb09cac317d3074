"""The optimizer step: model, gradients, export of weights."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.learner.distributed import join_group as join_group
    from laminar_py.learner.distributed import leave_group as leave_group
    from laminar_py.learner.export import export_hf as export_hf
    from laminar_py.learner.layers import free_heap as free_heap
    from laminar_py.learner.marker import Architecture as Architecture
    from laminar_py.learner.marker import complete_checkpoint as complete_checkpoint
    from laminar_py.learner.marker import read_marker as read_marker
    from laminar_py.learner.model import check_model_folder as check_model_folder
    from laminar_py.learner.model import load_policy as load_policy
    from laminar_py.learner.model import policy_logprobs as policy_logprobs
    from laminar_py.learner.step import Learner as Learner
else:
    __getattr__ = public_names(__name__)
