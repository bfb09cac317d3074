"""The process of a host's store."""

import errno
import logging
from pathlib import Path

from laminar_py.ledger.database import segments_path
from laminar_py.ledger.segments.moves import NAME, note_move
from laminar_py.ledger.segments.wire import make_address
from laminar_py.records.codec import decode
from laminar_py.runtime.workers.processes.setup import PartActor, open_part
from laminar_py.runtime.workers.specs import StoreSpec

log = logging.getLogger(__name__)


class StoreActor(PartActor):
    """Shell of a host's store."""

    async def start(self, data: bytes) -> str:
        """Serve; the store's address."""
        from laminar_py.ledger.segments.store import PieceStore, listen

        spec = decode(StoreSpec, data)
        open_part(spec, spec.name)
        try:
            listener = await listen(spec.host, spec.port, patience_s=spec.patience_s)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not spec.port:
                raise
            log.warning("port %d stays taken; another one is served on", spec.port)
            listener = await listen(spec.host)
        self._store = PieceStore(segments_path(Path(spec.run_dir)), key=bytes.fromhex(spec.key))
        await self._store.start(listener)
        before = make_address(spec.host, spec.port) if spec.port else None
        note_move(Path(spec.run_dir) / NAME, before=before, address=self._store.address)
        return self._store.address

    async def ping(self) -> None:
        """Answer, which one that hangs does not."""
