"""The data-parallel ranks of a learner, or one alone: sums over them. Used in a step.

Invariant: every rank makes every call, in the same order, since each of them is a collective.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """Ranks of `mesh`; without a mesh this process is alone, on the CPU, and every sum is its own number."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.device = torch.device(mesh.device_type if mesh else "cpu")

    @property
    def num(self) -> int:
        """Processes."""
        return self.mesh.size() if self.mesh else 1

    @property
    def leads(self) -> bool:
        """True on the first rank."""
        return self.mesh is None or self.mesh.get_rank() == 0

    def total(self, value: float) -> float:
        """Sum of a number over ranks."""
        return self._over(value, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """Maximum of a number over ranks."""
        return self._over(value, dist.ReduceOp.MAX)

    def reduce(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Sum a tensor over ranks, or what else is asked for, in place."""
        if self.mesh:
            dist.all_reduce(tensor, op=how, group=self.mesh.get_group())

    def _over(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        if not self.mesh:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        self.reduce(tensor, how)
        return float(tensor)
