"""Microbatches of finished trajectories, balanced over ranks."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.learner.packing.balance import attention_share as attention_share
    from laminar_py.learner.packing.balance import bundle_size as bundle_size
    from laminar_py.learner.packing.balance import group_size as group_size
    from laminar_py.learner.packing.balance import sequence_cost as sequence_cost
    from laminar_py.learner.packing.layout import RowSize as RowSize
    from laminar_py.learner.packing.packer import Packed as Packed
    from laminar_py.learner.packing.packer import pack as pack
else:
    __getattr__ = public_names(__name__)
