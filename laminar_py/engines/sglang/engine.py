"""SGLang as an inference engine: `InferenceEngine` over one server's native HTTP API.

Called by a replica on its event loop. A request carries `client-version` as `extra_key`, so that it never finds
the prefix cache of another version, nor of an earlier run. Its name on the server is `rid#client-ticket#`,
because the server aborts by prefix. While paused, and before the first weights, the gate is here: nothing new
reaches the server.

With adapters, the server holds the base from its start. An adapter's name on the server carries its version and
its client, and a request keeps its adapter to its end, so the adapter gives the version of a token. The client
unloads an adapter only when no request names it: the server would load it again.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

import laminar_py.engines.sglang.wire as wire
from laminar_py.engines.requests import WeightsLayout, check_request, response_limit, weights_layout
from laminar_py.engines.sglang.http import Connection, CutOffError
from laminar_py.engines.sglang.stream import Served, Stream
from laminar_py.records.engine import (
    Delta,
    EngineLostError,
    EngineStatus,
    GenerateRequest,
    PauseMode,
    RefusedError,
)
from laminar_py.records.pieces import Recording
from laminar_py.records.trajectory import FinishReason
from laminar_py.records.weights import check_base, holds_adapter, read_adapter_config


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


log = logging.getLogger(__name__)

POLL_S = 0.5  # between two looks at the server's use, while it has requests
# an abort may overtake its request on the way to the server, so it is said again, each time after twice as long
ABORT_AGAIN_S, ABORT_AGAIN_MAX_S = 0.05, 1.0
FLUSH_AGAIN_S = 0.01
LOAD_S = 600.0
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class SGLangEngine:
    """Streams requests through the server at `url` once `load_weights` has given it weights.

    `watch_server` ends when the server's process does, if it is ours. A server that has requests and sends no
    token, or leaves a call unanswered, for `stall_timeout_s` is lost; loading and hashing weights may take
    `load_timeout_s`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        served: Served,
        stall_timeout_s: float,
        load_timeout_s: float = LOAD_S,
        watch_server: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._server = Connection(url, api_key=api_key, timeout_s=stall_timeout_s)
        self._served = served
        self._load_timeout_s = load_timeout_s
        self._watch_server = watch_server
        self._version = -1
        self._layout: WeightsLayout | None = None  # of the weights that it has
        self._paused: PauseMode | None = None  # as the caller sees it
        self._server_paused = False  # it generates nothing until it is continued
        self._gate = asyncio.Event()
        self._client = secrets.token_hex(4)
        self._adapters = ServerAdapters(
            self._server, client=self._client, base=served.base, limit_s=load_timeout_s
        )
        self._tickets = itertools.count()
        self._by_rid: dict[str, Stream] = {}  # those that may be aborted
        self._streams: set[Stream] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._use = wire.RankUse(0, 0, 0, 0)

    async def start(self) -> None:
        """Look at the server; `EngineLostError` if it does not answer."""
        await self._server.post("continue_generation")  # whoever had it before may have left it paused
        await self._poll_use()

    async def close(self) -> None:
        """End all streams and connections; the server stays."""
        for task in self._aborts:
            task.cancel()
        await self._server.close()

    # ---- streams

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """See `InferenceEngine.generate`. `RefusedError` names what cannot be served."""
        self._server.raise_if_lost()
        if request.rid in self._by_rid:
            raise ValueError(f"rid={request.rid}: is being generated already; abort it first")
        check_request(request, max_len=self._served.max_len, vocab=self._served.vocab)
        room = response_limit(request, max_len=self._served.max_len) - len(request.prefix_ids)
        if room <= 0:
            yield self._nothing(request.rid, FinishReason.LENGTH)
            return
        stream = Stream(
            served=self._served,
            request=request,
            wire_rid=f"{request.rid}#{self._client}-{next(self._tickets)}#",
            room=room,
        )
        self._streams.add(stream)
        self._by_rid[request.rid] = stream
        try:
            await self._enter(stream)
            if stream.aborting:
                self._forget(stream)
                yield self._nothing(request.rid, FinishReason.ABORT)
                return
            try:
                async for delta in self._deltas(stream):
                    yield delta
            except CutOffError as error:
                if not stream.aborting or Recording.ROUTED_EXPERTS in self._served.record:
                    raise self._server.lose(str(error)) from error
                # SGLang 0.5.23 fails over an abort that it joins with chunks that nobody has read yet (KeyError
                # 'text'). What came before stands; of experts, which come at the end, nothing would have come.
                self._forget(stream)
                yield self._nothing(request.rid, FinishReason.ABORT)
        finally:
            if self._forget(stream) and stream.submitted and not self._server.is_lost:
                self._abort_on_server(stream)

    async def _enter(self, stream: Stream) -> None:
        """Wait until the gate is open, unless it is aborted or the server lost meanwhile."""
        while not (self._gate.is_set() or stream.aborting):
            self._server.raise_if_lost()
            events = (self._gate, stream.ended, self._server.ended)
            waits = [asyncio.ensure_future(event.wait()) for event in events]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _deltas(self, stream: Stream) -> AsyncIterator[Delta]:
        rid, finished = stream.request.rid, False
        cache = f"{self._client}-{self._version}"
        body = stream.request_body(self._version, cache=cache, adapter=self._adapters.current)
        async for chunk in self._server.chunks(rid, body):
            meta = chunk.meta_info
            if chunk.error is not None or meta is None:
                fault = chunk.error or wire.WireFault("a chunk without meta_info")
                raise self._server.fault(rid, fault.code, fault.message)
            finish = meta.finish_reason
            if finish is not None and finish.type == FinishReason.ABORT and not stream.aborting:
                raise self._server.fault(rid, finish.status_code, finish.message)
            try:
                delta = stream.delta(chunk, meta)
            except wire.WireError as error:
                raise self._server.lose(f"sent {error}") from None
            if delta.finish_reason is not None:
                finished = True
                self._forget(stream)
            yield delta
        if not finished:
            raise self._server.lose(f"the stream of {rid} ended before its last token")

    def _nothing(self, rid: str, reason: FinishReason) -> Delta:
        return Delta(rid=rid, ids=_NO_IDS, logprobs=_NO_LOGPROBS, version=self._version, finish_reason=reason)

    def _forget(self, stream: Stream) -> bool:
        """Let go of a stream that has ended. False if that was done before."""
        if self._by_rid.get(stream.request.rid) is stream:
            del self._by_rid[stream.request.rid]
        stream.ended.set()
        if stream not in self._streams:
            return False
        self._streams.remove(stream)
        return True

    # ---- aborts and pauses

    async def abort(self, rid: str) -> None:
        """See `InferenceEngine.abort`. The rid may be used again at once; an unknown one is fine."""
        self._server.raise_if_lost()
        stream = self._by_rid.pop(rid, None)
        if stream is not None:
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        stream.aborting = True
        if stream.submitted:
            self._abort_on_server(stream)
        else:
            stream.ended.set()  # wakes it at the gate

    def _abort_on_server(self, stream: Stream) -> None:
        self._in_background(self._repeat_abort(stream))

    async def _repeat_abort(self, stream: Stream) -> None:
        """Until it has ended. One that was dropped has: once is enough, as the server sees its connection end."""
        patience_s = ABORT_AGAIN_S
        while True:
            await self._server.post("abort_request", rid=stream.wire_rid)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await stream.ended.wait()
                    return
            patience_s = min(2 * patience_s, ABORT_AGAIN_MAX_S)

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceEngine.pause`.

        ABORT ends the streams one by one behind the gate, which takes one round trip; the server's own pause by
        abort sleeps for a second between two looks.
        """
        self._server.raise_if_lost()
        self._gate.clear()
        self._paused = mode
        if mode is not PauseMode.ABORT:
            self._server_paused = True
            await self._server.post("pause_generation", mode=mode.value)
            return
        streams = list(self._by_rid.values())
        self._by_rid.clear()
        for stream in streams:
            self._abort(stream)
        await self._continue()  # what an earlier pause holds would not end

    async def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._server.raise_if_lost()
        await self._continue()
        self._paused = None
        self._open_gate()

    async def _continue(self) -> None:
        if self._server_paused:
            await self._server.post("continue_generation")
            self._server_paused = False
            self._server.touch()

    def _open_gate(self) -> None:
        if self._paused is None and self._version >= 0:
            self._gate.set()

    # ---- weights

    async def load_weights(self, path: Path, version: int) -> None:
        """See `InferenceEngine.load_weights`. `RuntimeError` if requests run, `RefusedError` of bad files."""
        self._server.raise_if_lost()
        running = [stream for stream in self._streams if stream.submitted]
        if running and self._paused is None:
            raise RuntimeError(f"version {version} cannot load while {len(running)} requests run; pause first")
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}; versions never go back")
        adapted = holds_adapter(path)
        if self._layout is not None if adapted else self._adapters.current is not None:
            kind = "an adapter" if adapted else "whole weights"
            raise RefusedError(
                f"version {version} in {path} is {kind}, unlike the version before; publish one kind in a run"
            )
        if adapted and running and self._paused is not PauseMode.ABORT:
            raise RuntimeError(
                f"version {version} is an adapter, and {len(running)} requests keep the one they began with; abort"
                " them"
            )
        self._gate.clear()  # what comes meanwhile enters under the new version
        try:
            if adapted:
                await self._adapters.load(path, version, ending=running)
            else:
                await self._load_whole(path, version, running)
            self._version = version
        finally:
            self._open_gate()

    async def _load_whole(self, path: Path, version: int, running: Sequence[Stream]) -> None:
        recomputes = self._paused is PauseMode.RETRACT
        layout = await asyncio.to_thread(weights_layout, path)
        if self._layout not in (None, layout):
            raise RefusedError(
                f"version {version} in {path} has other tensors than the version before; publish the same"
            )
        await self._update(path, version)
        if recomputes:
            await self._flush_cache()
        self._layout = layout
        for stream in running:
            stream.loaded(version, recomputed=recomputes)

    async def _update(self, path: Path, version: int) -> None:
        answer = await self._server.ask(
            "update_weights_from_disk",
            wire.UpdateAnswer,
            limit_s=self._load_timeout_s,
            model_path=str(path),
            load_format="auto",  # servers that we launch begin with random weights, which is another format
            weight_version=str(version),
            flush_cache=False,  # requests of another version have another `extra_key`
        )
        if not answer.success:
            raise RefusedError(f"version {version} in {path}: {answer.message}")

    async def _flush_cache(self) -> None:
        """Forget the KV cache of retracted requests; refused while the server's last step is under way."""
        try:
            async with asyncio.timeout(self._server.timeout_s):
                while True:
                    with suppress(RefusedError):
                        return await self._server.post("flush_cache")
                    await asyncio.sleep(FLUSH_AGAIN_S)
        except TimeoutError:
            raise self._server.lose(f"did not flush its cache in {self._server.timeout_s:g} s") from None

    async def checksum(self) -> str:
        """See `InferenceEngine.checksum`: the server hashes its own tensors, one hash for each GPU."""
        limit_s = self._load_timeout_s
        answer = await self._server.ask(
            "weights_checker", wire.WeightsChecksums, limit_s=limit_s, action="checksum"
        )
        return "-".join(rank.per_gpu_checksum for rank in answer.ranks)

    # ---- state

    def status(self) -> EngineStatus:
        """See `InferenceEngine.status`: requests as known here, the KV cache and what runs as last heard."""
        self._server.raise_if_lost()
        submitted = sum(stream.submitted for stream in self._streams)
        running = min(submitted, self._use.num_running_reqs)
        used = self._use.num_used_tokens if submitted else 0
        return EngineStatus(
            running=running,
            waiting=len(self._streams) - running,
            kv_used=used,
            kv_capacity=self._use.max_total_num_tokens,
            version=self._version,
        )

    async def watch(self) -> None:
        """See `InferenceEngine.watch`."""
        tasks = [asyncio.create_task(self._watch_use()), asyncio.create_task(self._server.ended.wait())]
        if self._watch_server is not None:
            tasks.append(asyncio.ensure_future(self._watch_server()))  # type: ignore[arg-type]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise self._server.lose(str(error)) from None
        finally:
            for task in tasks:
                task.cancel()
        raise self._server.lose("its process ended")

    async def _watch_use(self) -> None:
        """Look at the use while there are requests, and for a server that sends nothing any more."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._server_paused or not any(stream.submitted for stream in self._streams):
                self._server.touch()
            elif self._server.silent_s > self._server.timeout_s:
                self._server.lose(f"sent no token for {self._server.silent_s:.0f} s while requests run")
            else:
                await self._poll_use()

    async def _poll_use(self) -> None:
        ranks = (await self._server.get("v1/loads?include=core", wire.RankUses)).loads
        self._use = wire.RankUse(
            sum(rank.num_running_reqs for rank in ranks),
            sum(rank.num_waiting_reqs for rank in ranks),
            sum(rank.num_used_tokens for rank in ranks),
            sum(rank.max_total_num_tokens for rank in ranks),
        )

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        """Aborts that nobody waits for: one that fails loses the server, whose streams say so."""

        def done(task: asyncio.Task[None]) -> None:
            self._aborts.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, EngineLostError):
                log.error("an abort failed", exc_info=error)
                self._server.lose(f"an abort failed: {error}").__cause__ = error

        task = asyncio.create_task(work, name="abort")
        self._aborts.add(task)
        task.add_done_callback(done)
