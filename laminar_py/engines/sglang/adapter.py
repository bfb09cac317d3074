"""Adapters on an SGLang server, and the adapter that new requests use. Called by `SGLangEngine`.

The server holds the base from its start. The name of an adapter on the server has the client, the version and a
count. A request keeps its adapter to its end, so the version of its tokens is the adapter's version. The client
unloads an adapter only after its last request, since the server would load it again for another request
(`tests/engines/sglang/test_lora.py`).
"""

import asyncio
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from laminar_py.engines.checks import WeightsLayout, weights_layout
from laminar_py.engines.sglang.http import ServerConnection
from laminar_py.engines.sglang.stream import Stream
from laminar_py.engines.sglang.wire import WeightsChecksums
from laminar_py.records.engine import RefusedError
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.records.weights import PREFIX, check_base, read_adapter_config


class _Loaded(msgspec.Struct):
    """The server's answer: the folder of each loaded adapter, by name."""

    loaded_adapters: dict[str, str]


class ServerAdapters:
    """The adapters of one client on a server that serves the weights in `base`.

    E.g. `ServerAdapters(server, client="3f9a01bc", base=Path("/models/qwen"), limit_s=600)`. If a load
    takes more than `limit_s` seconds, the server counts as lost.
    """

    def __init__(self, server: ServerConnection, *, client: str, base: Path | None, limit_s: float) -> None:
        self.current: str | None = None  # adapter that new requests name
        self._connection = server
        self._limit_s = limit_s
        self._client = client
        self._count = itertools.count()  # tells loads of the same version apart
        self._base = base
        self._checked: str | None = None  # revision of the base after a successful check
        self._layout: WeightsLayout | None = None  # the same for every adapter

    async def load(self, path: Path, version: int, *, ending: Sequence[Stream]) -> None:
        """Load the adapter in `path` as `version` for new requests. Unload the old one after the `ending` streams.

        Raises `RefusedError` if the adapter does not fit, or the server has another base than the learner.
        """
        config = await asyncio.to_thread(read_adapter_config, path)
        if config.revision != self._checked:
            if self._base is None:
                raise RefusedError(
                    f"version {version} in {path} is an adapter, and the server has no base weights"
                )
            await asyncio.to_thread(check_base, self._base, config)
            self._checked = config.revision
        layout = await asyncio.to_thread(weights_layout, path, before=self._layout)
        name = f"{self._client}-{version}-{next(self._count)}"
        fields = {"lora_name": name, "lora_path": str(path)}
        answer = await self._connection.post_and_decode(
            "load_lora_adapter", _Loaded, limit_s=self._limit_s, **fields
        )
        if answer.loaded_adapters.get(name) != str(path):
            raise RefusedError(
                f"version {version} in {path}: the server reports only adapters {list(answer.loaded_adapters)}"
            )
        self._layout = layout
        for stream in ending:
            await stream.ended.wait()
        if self.current is not None:
            await self._unload(self.current)
        self.current = name

    async def _unload(self, name: str) -> None:
        """Unload an adapter. If the server refuses, its list of adapters is wrong: mark the server as lost."""
        try:
            await self._connection.post("unload_lora_adapter", lora_name=name)
        except RefusedError as error:
            raise self._connection.lose(str(error)) from None


ADAPTERS = "laminar.adapters/"  # as in `plugin/laminar_changes.py`
_FACTOR = re.compile(r"\.lora_[AB]\.weight$")


def adapter_checksum(answer: WeightsChecksums, name: str) -> WeightsChecksum:
    """Take the hashes of adapter `name` from a server's answer, by the names of the matrices that it changes.

    A server without our plugin hashes none: then the total is empty. An adapter that is not there has the total of
    no tensors, so two versions in a row that did not arrive are equal.
    """
    hashes: dict[str, str] = {}
    for number, rank in enumerate(answer.ranks):
        if ADAPTERS not in rank.checksums:
            return WeightsChecksum("")
        for tensor, value in sorted(rank.checksums.items()):
            if tensor.startswith(own := f"{ADAPTERS}{name}/"):
                matrix = _FACTOR.sub(".weight", tensor.removeprefix(own).removeprefix(PREFIX))
                place = f"{number}/{matrix}" if number else matrix
                hashes[place] = hashes.get(place, "") + value
    return WeightsChecksum(blake3("".join(f"{one} " for one in hashes.items()).encode()).hexdigest(), hashes)
