"""SGLang as an inference engine: `InferenceEngine` over the native HTTP API of one server.

A replica calls it on its event loop. Each request carries `client-version` as `extra_key`, so it never finds the
prefix cache of another version or an earlier run. The server aborts all requests with a given prefix, so the
client names a request `rid#client-ticket#`. While the engine is paused, and before the first weights, the client
holds new requests at its own gate.
"""

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from laminar_py.engines.changes import check_changes, check_served
from laminar_py.engines.checks import WeightsLayout, check_load, check_request, response_limit, weights_layout
from laminar_py.engines.sglang.adapter import ServerAdapters, adapter_checksum
from laminar_py.engines.sglang.http import CutOffError, ServerConnection
from laminar_py.engines.sglang.stream import Served, Stream
from laminar_py.engines.sglang.wire import RankUse, RankUses, UpdateAnswer, WeightsChecksums, WireError, WireFault
from laminar_py.records.engine import (
    CheckedChanges,
    Delta,
    EngineLostError,
    EngineStatus,
    GenerateRequest,
    PauseMode,
    RefusedError,
)
from laminar_py.records.pieces import Recording
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.records.trajectory import FinishReason
from laminar_py.records.weights import holds_adapter

log = logging.getLogger(__name__)

POLL_S = 0.5  # between two reads of the server's load, while it has requests
# an abort can reach the server before its request, so repeat it, each time after twice the wait
ABORT_AGAIN_S, ABORT_AGAIN_MAX_S = 0.05, 1.0
FLUSH_AGAIN_S = 0.01
LOAD_S = 600.0
START_S = 900.0
CHANGES, TAKES_CHANGES = "laminar_changes", "[laminar: takes changes]"  # as in `plugin/laminar_changes.py`
HALF_CHANGED = "[laminar: half changed]"  # as there
SCALES = (".weight_scale", ".weight_scale_inv")  # names of tensors beside rounded weights
CACHE = ["kv_cache"]  # the tag of the memory that a release gives back
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class SGLangEngine:
    """Streams requests through the server at `url` once `load_weights` has given it weights.

    `watch_server` returns or raises when the process of a launched server ends. The server counts as lost if it
    has requests and sends no token, or leaves a call unanswered, for `stall_timeout_s` seconds; until its first
    token, when it compiles kernels, for `start_timeout_s`. Calls that load or hash weights may take
    `load_timeout_s` seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        served: Served,
        stall_timeout_s: float,
        load_timeout_s: float = LOAD_S,
        start_timeout_s: float = START_S,
        watch_server: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._connection = ServerConnection(
            url, api_key=api_key, timeout_s=stall_timeout_s, first_timeout_s=start_timeout_s
        )
        self._served = served
        self._load_timeout_s = load_timeout_s
        self._watch_server = watch_server
        self._version = -1
        self._layout: WeightsLayout | None = None  # of the loaded weights
        self._takes_changes = False  # the server's plugin knows the places of the loaded weights
        self._paused: PauseMode | None = None  # mode of the caller's last `pause`, None after `resume`
        self._server_paused = False  # the server itself is paused
        self._released = False  # the memory of its KV cache is given back
        self._gate = asyncio.Event()
        self._client = secrets.token_hex(4)
        self._adapters = ServerAdapters(
            self._connection, client=self._client, base=served.base, limit_s=load_timeout_s
        )
        self._tickets = itertools.count()
        self._by_rid: dict[str, Stream] = {}  # streams that `abort` can end
        self._streams: set[Stream] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._use = RankUse(0, 0, 0)

    async def start(self) -> None:
        """Connect to the server. Raises `EngineLostError` if it does not answer."""
        await self._connection.post("continue_generation")  # an earlier client may have paused the server
        await self._poll_use()

    async def close(self) -> None:
        """End all streams and connections. The server keeps running."""
        for task in self._aborts:
            task.cancel()
        await self._connection.close()

    # ---- streams

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the deltas of a request to its last. `RefusedError` if the server can never serve the request."""
        self._connection.raise_if_lost()
        if request.rid in self._by_rid:
            raise ValueError(f"rid={request.rid}: a request with this rid runs already; abort it first")
        check_request(request, max_len=self._served.max_len, vocab=self._served.vocab)
        room = response_limit(request, max_len=self._served.max_len) - len(request.prefix_ids)
        if room <= 0:
            yield self._empty_delta(request.rid, FinishReason.LENGTH)
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
                yield self._empty_delta(request.rid, FinishReason.ABORT)
                return
            try:
                async for delta in self._deltas(stream):
                    yield delta
            except CutOffError as error:
                if not stream.aborting or Recording.ROUTED_EXPERTS in self._served.record:
                    raise self._connection.lose(str(error)) from error
                # SGLang 0.5.23 fails (KeyError 'text') if it joins an abort with unread chunks. Earlier tokens
                # are valid. Experts come only at the end, so with experts the server counts as lost.
                self._forget(stream)
                yield self._empty_delta(request.rid, FinishReason.ABORT)
        finally:
            if self._forget(stream) and stream.submitted and not self._connection.is_lost:
                self._abort_on_server(stream)

    async def _enter(self, stream: Stream) -> None:
        """Wait for the open gate. Returns early if the stream is aborted; raises if the server is lost."""
        while not (self._gate.is_set() or stream.aborting):
            self._connection.raise_if_lost()
            events = (self._gate, stream.ended, self._connection.ended)
            waits = [asyncio.ensure_future(event.wait()) for event in events]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _deltas(self, stream: Stream) -> AsyncIterator[Delta]:
        """Yield the deltas of a stream until its last.

        A request that the server refuses raises `RefusedError`. A broken stream marks the server as lost, and
        raises `EngineLostError`.
        """
        rid, finished = stream.request.rid, False
        cache = f"{self._client}-{self._version}"
        body = stream.generate_body(self._version, cache=cache, adapter=self._adapters.current)
        async for chunk in self._connection.chunks(rid, body):
            meta = chunk.meta_info
            if chunk.error is not None or meta is None:
                fault = chunk.error or WireFault("a chunk without meta_info")
                raise self._connection.fault(rid, fault.code, fault.message)
            finish = meta.finish_reason
            if finish is not None and finish.type == FinishReason.ABORT and not stream.aborting:
                raise self._connection.fault(rid, finish.status_code, finish.message)
            try:
                delta = stream.delta(chunk, meta)
            except WireError as error:
                raise self._connection.lose(f"sent {error}") from None
            if delta.finish_reason is not None:
                finished = True
                self._forget(stream)
            yield delta
        if not finished:
            raise self._connection.lose(f"the stream of {rid} ended before its last token")

    def _empty_delta(self, rid: str, reason: FinishReason) -> Delta:
        """Make a last delta without tokens."""
        return Delta(rid=rid, ids=_NO_IDS, logprobs=_NO_LOGPROBS, version=self._version, finish_reason=reason)

    def _forget(self, stream: Stream) -> bool:
        """Remove a stream, free its rid and set its `ended`. Returns False if it was removed before."""
        if self._by_rid.get(stream.request.rid) is stream:
            del self._by_rid[stream.request.rid]
        stream.ended.set()
        if stream not in self._streams:
            return False
        self._streams.remove(stream)
        return True

    # ---- aborts and pauses

    async def abort(self, rid: str) -> None:
        """Start to end the request `rid` with ABORT. Its rid is free at once. Ignores an unknown rid."""
        self._connection.raise_if_lost()
        stream = self._by_rid.pop(rid, None)
        if stream is not None:
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        """Abort a request on the server, or at the gate if the server does not have it yet."""
        stream.aborting = True
        if stream.submitted:
            self._abort_on_server(stream)
        else:
            stream.ended.set()  # wakes the stream at the gate

    def _abort_on_server(self, stream: Stream) -> None:
        """Abort a request on the server, in a background task. If the task fails, the server counts as lost."""

        def done(task: asyncio.Task[None]) -> None:
            self._aborts.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, EngineLostError):
                log.error("an abort failed", exc_info=error)
                lost = self._connection.lose(f"an abort failed: {error}")
                lost.__cause__ = error

        task = asyncio.create_task(self._repeat_abort(stream), name="abort")
        self._aborts.add(task)
        task.add_done_callback(done)

    async def _repeat_abort(self, stream: Stream) -> None:
        """Send the abort until the stream has ended; once if the stream has ended before."""
        patience_s = ABORT_AGAIN_S
        while True:
            await self._connection.post("abort_request", rid=stream.wire_rid)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await stream.ended.wait()
                    return
            patience_s = min(2 * patience_s, ABORT_AGAIN_MAX_S)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, by `mode`; new requests wait at the gate.

        RELEASE is RETRACT where the server has no memory saver, as on CPUs; the memory is away until `resume`,
        through all pauses in between. ABORT closes the gate and aborts the streams one by one, in one round trip.
        The server's own pause by abort sleeps for a second between checks.
        """
        self._connection.raise_if_lost()
        self._gate.clear()
        self._paused = mode
        if mode is not PauseMode.ABORT:
            self._server_paused = True
            releases = mode is PauseMode.RELEASE
            await self._connection.post("pause_generation", mode=PauseMode.RETRACT if releases else mode)
            if releases:
                await self._release()
            return
        streams = list(self._by_rid.values())
        self._by_rid.clear()
        for stream in streams:
            self._abort(stream)
        if not self._released:  # then all requests are queued, and end at once
            await self._continue()  # running streams held by an earlier pause would not end

    async def resume(self) -> None:
        """Generate again after `pause`, and open the gate."""
        self._connection.raise_if_lost()
        await self._continue()
        self._paused = None
        self._open_gate()

    async def _release(self) -> None:
        """Have the paused server give the memory of its KV cache back; return once all its ranks have.

        A server would die of a release before the end of its last step; until then it refuses to flush its cache.
        Only the first rank answers. A weight update for drafts loads nothing, and all ranks meet in it.
        """
        if self._released:
            return
        await self._flush_cache()
        await self._connection.post("release_memory_occupation", tags=CACHE)
        self._released = True
        await self._connection.post("begin_weight_update", selector="draft")
        await self._connection.post("end_weight_update")

    async def _continue(self) -> None:
        """Resume the server if it is paused, and count its silence from now."""
        if self._released:
            await self._connection.post("resume_memory_occupation", tags=CACHE)
            self._released = False
        if self._server_paused:
            await self._connection.post("continue_generation")
            self._server_paused = False
            self._connection.touch()

    def _open_gate(self) -> None:
        """Let new requests through, unless the engine is paused or has no weights yet."""
        if self._paused is None and self._version >= 0:
            self._gate.set()

    # ---- weights

    async def load_weights(self, path: Path, version: int) -> None:
        """Load the version in `path`. `RuntimeError` while requests run unpaused, `RefusedError` for bad files."""
        running = self._check_load(version)
        adapted = holds_adapter(path)
        if self._layout is not None if adapted else self._adapters.current is not None:
            kind = "an adapter" if adapted else "whole weights"
            raise RefusedError(
                f"version {version} in {path} is {kind}, unlike the version before; publish one kind in a run"
            )
        if adapted and running and self._paused is not PauseMode.ABORT:
            raise RuntimeError(
                f"version {version} is an adapter, but {len(running)} requests would keep their old adapter;"
                " abort them before the load"
            )
        self._gate.clear()  # requests that arrive during the load run under the new version
        try:
            if adapted:
                await self._adapters.load(path, version, ending=running)
            else:
                layout = await asyncio.to_thread(weights_layout, path, before=self._layout)
                # launched servers start with random weights, whose format is `dummy`
                said = await self._update(str(path), version, running, load_format="auto")
                self._layout, self._takes_changes = layout, TAKES_CHANGES in said
            self._version = version
        finally:
            self._open_gate()

    @property
    def takes_changes(self) -> bool:
        """See `InferenceEngine.takes_changes`: if the server has our plugin, which knows the loaded weights."""
        return self._takes_changes

    async def check_changes(self, files: Sequence[Path], version: int) -> CheckedChanges:
        """See `InferenceEngine.check_changes`; in this process, while the server generates."""
        self._connection.raise_if_lost()
        if not self._takes_changes or self._layout is None:
            raise RefusedError(f"version {version}: the server takes no changes; load the whole version")
        sizes = {name: math.prod(shape) for name, (shape, _) in self._layout.items()}
        return await asyncio.to_thread(check_changes, files, version, served=self._version, sizes=sizes)

    async def load_changes(self, changes: CheckedChanges) -> None:
        """Have the server's plugin put changed positions into the weights. Errors as `load_weights`."""
        self._connection.raise_if_lost()
        check_served(changes, served=self._version)
        running = self._check_load(changes.version)
        self._gate.clear()
        try:
            paths = "\n".join(str(file.path) for file in changes.files)
            await self._update(paths, changes.version, running, load_format=CHANGES)
            self._version = changes.version
        finally:
            self._open_gate()

    def _check_load(self, version: int) -> list[Stream]:
        """Return the streams on the server. Raises as `load_weights` if the server is lost or the time wrong."""
        self._connection.raise_if_lost()
        running = [stream for stream in self._streams if stream.submitted]
        check_load(version, served=self._version, num_running=len(running) if self._paused is None else 0)
        return running

    async def _update(self, paths: str, version: int, running: Sequence[Stream], *, load_format: str) -> str:
        """Have the paused server read a version, and stamp it on the running streams. Returns the server's words.

        Raises `RefusedError` if the server cannot read it. A server that failed after the first value is lost.
        """
        recomputes = self._released or self._paused in (PauseMode.RETRACT, PauseMode.RELEASE)
        try:
            answer = await self._connection.post_and_decode(
                "update_weights_from_disk",
                UpdateAnswer,
                limit_s=self._load_timeout_s,
                model_path=paths,
                load_format=load_format,
                weight_version=str(version),
                flush_cache=False,  # requests of another version have another `extra_key`
            )
        except RefusedError as error:
            answer = UpdateAnswer(success=False, message=str(error))
        if not answer.success:
            refusal = f"version {version} in {', '.join(paths.splitlines())}: {answer.message}"
            raise self._connection.lose(refusal) if HALF_CHANGED in refusal else RefusedError(refusal)
        if recomputes:
            await self._flush_cache()
        for stream in running:
            stream.loaded(version, recomputed=recomputes)
        return answer.message

    async def _flush_cache(self) -> None:
        """Clear the KV cache of retracted requests. Retries, since the server refuses during its last step."""
        try:
            async with asyncio.timeout(self._connection.timeout_s):
                while True:
                    with suppress(RefusedError):
                        return await self._connection.post("flush_cache")
                    await asyncio.sleep(FLUSH_AGAIN_S)
        except TimeoutError:
            raise self._connection.lose(f"did not flush its cache in {self._connection.timeout_s:g} s") from None

    async def checksum(self) -> WeightsChecksum:
        """Have the server hash its tensors: of the current adapter, if there is one, else of the weights.

        SGLang itself hashes no adapters; without our plugin the answer is then empty.
        """
        answer = await self._connection.post_and_decode(
            "weights_checker", WeightsChecksums, limit_s=self._load_timeout_s, action="checksum"
        )
        if self._adapters.current is not None:
            return adapter_checksum(answer, self._adapters.current)
        names = [f"{number}/" if number else "" for number in range(len(answer.ranks))]
        pairs = zip(names, answer.ranks, strict=True)
        hashes = {prefix + name: value for prefix, rank in pairs for name, value in rank.checksums.items()}
        total = "-".join(rank.per_gpu_checksum for rank in answer.ranks)
        return WeightsChecksum(total, hashes, quantized=any(name.endswith(SCALES) for name in hashes))

    # ---- state

    def status(self) -> EngineStatus:
        """Report load and version. Requests are counted here; the last poll of the server gives the KV cache."""
        self._connection.raise_if_lost()
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
        """Poll the server until it is lost or the engine closes, then raise `EngineLostError`."""
        tasks = [asyncio.create_task(self._watch_use()), asyncio.create_task(self._connection.ended.wait())]
        if self._watch_server is not None:
            tasks.append(asyncio.ensure_future(self._watch_server()))  # type: ignore[arg-type]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise self._connection.lose(str(error)) from None
        finally:
            for task in tasks:
                task.cancel()
        raise self._connection.lose("its process ended")

    async def _watch_use(self) -> None:
        """Poll the load while the server has requests; if it sends nothing for the stall timeout, it is lost."""
        while True:
            await asyncio.sleep(POLL_S)
            stands = self._server_paused and self._paused is not PauseMode.ABORT  # aborted streams have to end
            if stands or not any(stream.submitted for stream in self._streams):
                self._connection.touch()
            elif self._connection.silent_s > self._connection.timeout_s:
                first = "" if self._connection.has_served else "first "
                self._connection.lose(
                    f"sent no {first}token for {self._connection.silent_s:.0f} s while requests run"
                )
            else:
                await self._poll_use()

    async def _poll_use(self) -> None:
        """Ask the server for its load, and store the sum over its ranks in `_use`."""
        ranks = (await self._connection.get("v1/loads?include=core", RankUses)).loads
        self._use = RankUse(
            sum(rank.num_running_reqs for rank in ranks),
            sum(rank.num_used_tokens for rank in ranks),
            sum(rank.max_total_num_tokens for rank in ranks),
        )
