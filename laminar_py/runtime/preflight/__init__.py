"""Checks before a run."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.preflight.inputs import Problems as Problems
    from laminar_py.runtime.preflight.inputs import check_engine as check_engine
    from laminar_py.runtime.preflight.inputs import check_inputs as check_inputs
    from laminar_py.runtime.preflight.inputs import check_model as check_model
    from laminar_py.runtime.preflight.inputs import check_shared_memory as check_shared_memory
    from laminar_py.runtime.preflight.inputs import check_warm_start as check_warm_start
    from laminar_py.runtime.preflight.inputs import num_parameters as num_parameters
    from laminar_py.runtime.preflight.inputs import prepare as prepare
    from laminar_py.runtime.preflight.inputs import prompt_room as prompt_room
    from laminar_py.runtime.preflight.inputs import read_problems as read_problems
    from laminar_py.runtime.preflight.inputs import shown_prompt as shown_prompt
    from laminar_py.runtime.preflight.node_checks import NODE_TIMEOUT_S as NODE_TIMEOUT_S
    from laminar_py.runtime.preflight.node_checks import node_faults as node_faults
    from laminar_py.runtime.preflight.rewards import check_functions as check_functions
    from laminar_py.runtime.preflight.rewards import check_problem as check_problem
    from laminar_py.runtime.preflight.rewards import check_problems as check_problems
    from laminar_py.runtime.preflight.rewards import check_terms as check_terms
    from laminar_py.runtime.preflight.rewards import log_folder as log_folder
else:
    __getattr__ = public_names(__name__)
