"""Adapters on an SGLang server: which one new requests name. Called by `engines.sglang`.

The server holds the base from its start. An adapter's name there carries its version and whose it is, and a
request has the adapter that it names to its end; so a token's version is that of an adapter which the server
said it has. Invariant: an adapter is unloaded only when no request names it, for the server would load it again.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar_py.engines.sglang.http import Connection
from laminar_py.engines.sglang.stream import Stream
from laminar_py.engines.weight_folder import WeightsLayout, weights_layout
from laminar_py.records.engine import RefusedError
from laminar_py.records.weights import check_base, read_adapter_config


class _Loaded(msgspec.Struct):
    """The server's answer: all adapters that it has, by name, and where they came from."""

    loaded_adapters: dict[str, str]


class ServerAdapters:
    """Adapters that one client has put on a server, which serves the weights in `base`.

    E.g. `ServerAdapters(server, client="3f9a01bc", base=Path("/models/qwen"), limit_s=600)`: a load that takes
    longer than that loses the server.
    """

    def __init__(self, server: Connection, *, client: str, base: Path | None, limit_s: float) -> None:
        self.current: str | None = None  # that new requests name
        self._server = server
        self._limit_s = limit_s
        self._client = client
        self._count = itertools.count()  # a version may be loaded again
        self._base = base
        self._checked: str | None = None  # digest that it is known to have
        self._layout: WeightsLayout | None = None  # of every adapter here

    async def load(self, path: Path, version: int, *, ending: Sequence[Stream]) -> None:
        """Have new requests name the adapter in a version's folder; the one before goes with the `ending` streams.

        Raises `RefusedError` if it does not fit, or the server has another base than the learner.
        """
        config = await asyncio.to_thread(read_adapter_config, path)
        if config.revision != self._checked:
            if self._base is None:
                raise RefusedError(f"version {version} in {path} is an adapter, and the server was given no base")
            await asyncio.to_thread(check_base, self._base, config)
            self._checked = config.revision
        layout = await asyncio.to_thread(weights_layout, path)
        if self._layout not in (None, layout):
            raise RefusedError(
                f"version {version} in {path} has other tensors than the version before; publish the same"
            )
        name = f"{self._client}-{version}-{next(self._count)}"
        order = {"lora_name": name, "lora_path": str(path)}
        answer = await self._server.ask("load_lora_adapter", _Loaded, limit_s=self._limit_s, **order)
        if answer.loaded_adapters.get(name) != str(path):
            raise RefusedError(
                f"version {version} in {path}: the server has {list(answer.loaded_adapters)} instead"
            )
        self._layout = layout
        for stream in ending:
            await stream.ended.wait()
        if self.current is not None:
            await self._unload(self.current)
        self.current = name

    async def _unload(self, name: str) -> None:
        try:
            await self._server.post("unload_lora_adapter", lora_name=name)
        except RefusedError as error:  # it has lost track of what it holds
            raise self._server.lose(str(error)) from None
