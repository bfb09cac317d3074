"""Sampling masks and routed experts join their trajectories again, from the ledger, which alone keeps them.

Asked by the trainer for a step, and by the reference stage for a pass.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.payload import StoredRecording, stored_recordings
from laminar_py.records.trajectory import Trajectory


async def join_recordings(ledger: Ledger, run: Path, trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """Trajectories with what is recorded of them, by id; those without recordings are left out."""
    await ledger.commit()
    recorded = await asyncio.to_thread(_read, run, [one.id for one in trajectories])
    return {
        one.id: msgspec.structs.replace(
            one, sampling_mask=recorded[one.id].sampling_mask, routed_experts=recorded[one.id].routed_experts
        )
        for one in trajectories
        if one.id in recorded
    }


def _read(run: Path, trajectory_ids: Sequence[str]) -> dict[str, StoredRecording]:
    with reading(run) as connection:
        return stored_recordings(connection, trajectory_ids)
