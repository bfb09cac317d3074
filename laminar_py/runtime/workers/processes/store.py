"""The process of a host's store."""

from pathlib import Path

from laminar_py.ledger.database import segments_path
from laminar_py.ledger.segments.wire import ADDRESSES, leave_address
from laminar_py.records.codec import decode
from laminar_py.runtime.workers.processes.setup import PartActor, open_part
from laminar_py.runtime.workers.specs import StoreSpec


class StoreActor(PartActor):
    """Shell of a host's store."""

    async def start(self, data: bytes) -> None:
        """Serve, and leave the address for readers."""
        from laminar_py.ledger.segments.store import PieceStore

        spec = decode(StoreSpec, data)
        open_part(spec, spec.name)
        self._store = PieceStore(segments_path(Path(spec.run_dir)), key=bytes.fromhex(spec.key))
        leave_address(Path(spec.run_dir) / ADDRESSES, spec.name, self._store.start(spec.host))

    async def ping(self) -> None:
        """Answer, which one that hangs does not."""
