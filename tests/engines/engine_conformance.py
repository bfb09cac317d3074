"""The definition of `InferenceEngine`: laws that every engine keeps, as plain async functions over a factory.

A test module of an engine builds a factory and runs each of `LAWS` with it. The factory gives a started engine
that serves `weights[0]` as version 1, with room for thousands of tokens after a short prompt, so that a
request can be caught while it runs. Laws compare greedy responses: engines differ in how they use a seed.
The judge of numbers is a full forward of the Hugging Face model in fp32.
"""

import asyncio
import functools
import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from laminar_py.records.engine import (
    CheckedChanges,
    Delta,
    EngineLostError,
    GenerateRequest,
    InferenceEngine,
    PauseMode,
    PushEngine,
    RefusedError,
    SamplingParams,
)
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason
from laminar_py.records.weights import AT, TO
from tests.engines.changes import load_changes, nudged, read_version, save_changes, write_changes

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Rig:
    """An engine under test, and what a law must know of it."""

    engine: InferenceEngine
    weights: tuple[Path, Path]  # two versions' folders with different weights, each a whole model in fp32
    vocab: int
    max_batch: int
    max_len: int  # at least 2000


Factory = Callable[[], AbstractAsyncContextManager[Rig]]


@dataclass(frozen=True)
class Response:
    """A whole stream."""

    deltas: list[Delta]

    @property
    def ids(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in delta.ids]

    @property
    def logprobs(self) -> list[float]:
        return [float(value) for delta in self.deltas for value in delta.logprobs]

    @property
    def spans(self) -> tuple[Span, ...]:
        """One for each token, or what the engine says of all of them in its last delta."""
        told = self.deltas[-1].spans
        if told is not None:
            return told
        stamps = [(delta.version, delta.kv_version) for delta in self.deltas for _ in delta.ids]
        return tuple(Span(version, i, i + 1, kv) for i, (version, kv) in enumerate(stamps))

    @property
    def versions(self) -> list[int]:
        """One for each token."""
        return [span.version for span in self.spans for _ in range(span.start, span.end)]

    @property
    def kv_versions(self) -> list[int | None]:
        """One for each token."""
        return [span.kv_version for span in self.spans for _ in range(span.start, span.end)]

    @property
    def reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason


def make_request(rid="r", *, group=None, prompt=(3, 4, 5), prefix=(), length=20, **sampling) -> GenerateRequest:
    """A greedy request of `length` tokens."""
    sampling = {"temperature": 0.0, **sampling}
    return GenerateRequest(
        rid=rid,
        group_id=group or rid,
        prompt_ids=np.array(prompt, np.int32),
        prefix_ids=np.array(prefix, np.int32),
        sampling=SamplingParams(max_new_tokens=length, **sampling),
    )


@functools.cache
def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def full_forward(folder: Path, ids: list[int], *, prompt: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of `ids[prompt:]`, each given all before it."""
    logits = _model(folder)(torch.tensor([ids])).logits[0, prompt - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0].numpy()


async def collect(engine: InferenceEngine, request: GenerateRequest) -> Response:
    """The whole stream of a request."""
    return Response([delta async for delta in engine.generate(request)])


class Caught:
    """A request that is being generated, and has given its first tokens when `caught` returns it."""

    def __init__(self, engine: InferenceEngine, request: GenerateRequest) -> None:
        self._first = asyncio.Event()
        self._task = asyncio.create_task(self._collect(engine, request))

    async def _collect(self, engine: InferenceEngine, request: GenerateRequest) -> Response:
        deltas = []
        async for delta in engine.generate(request):
            deltas.append(delta)
            self._first.set()
        return Response(deltas)

    async def running(self) -> "Caught":
        await self._first.wait()
        return self

    async def response(self) -> Response:
        return await self._task


async def caught(engine: InferenceEngine, request: GenerateRequest) -> Caught:
    return await Caught(engine, request).running()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the protocol has no event for."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def idle(engine: InferenceEngine) -> None:
    await until(lambda: engine.status().running == engine.status().waiting == 0)


async def a_stream_ends_with_its_only_finish_reason(make: Factory) -> None:
    async with make() as rig:
        response = await collect(rig.engine, make_request(length=70))
        assert [delta.finish_reason for delta in response.deltas[:-1]] == [None] * (len(response.deltas) - 1)
        assert response.reason is FinishReason.LENGTH
        assert len(response.ids) == len(response.logprobs) == 70
        assert {delta.rid for delta in response.deltas} == {"r"}
        assert max(response.logprobs) <= 0


async def every_token_has_the_version_that_made_it(make: Factory) -> None:
    async with make() as rig:
        first = await collect(rig.engine, make_request())
        await rig.engine.load_weights(rig.weights[1], 2)
        second = await collect(rig.engine, make_request())
        assert first.versions == [1] * 20
        assert second.versions == [2] * 20
        expected = full_forward(rig.weights[1], [3, 4, 5, *second.ids], prompt=3)
        np.testing.assert_allclose(second.logprobs, expected, atol=1e-4)  # on no KV cache of the old weights
        assert first.logprobs != second.logprobs
        assert rig.engine.status().version == 2


async def a_stop_id_ends_a_response_and_belongs_to_it(make: Factory) -> None:
    async with make() as rig:
        plain = await collect(rig.engine, make_request())
        stop = plain.ids[7]
        stopped = await collect(rig.engine, make_request(stop_ids=(rig.vocab - 1, stop)))
        end = min(plain.ids.index(token) for token in {stop, rig.vocab - 1} & set(plain.ids)) + 1
        assert stopped.ids == plain.ids[:end]
        assert stopped.reason is FinishReason.STOP


async def a_response_is_cut_at_max_len(make: Factory) -> None:
    async with make() as rig:
        prompt = np.arange(rig.max_len - 5) % rig.vocab
        response = await collect(rig.engine, make_request(prompt=prompt, length=20))
        assert len(response.ids) == 5
        assert response.reason is FinishReason.LENGTH


async def a_response_does_not_depend_on_its_batch(make: Factory) -> None:
    async with make() as rig:
        prompts = [tuple(range(3, 4 + i)) for i in range(12)]
        alone = [await collect(rig.engine, make_request(prompt=prompt)) for prompt in prompts]
        crowd = [collect(rig.engine, make_request(f"r{i}", prompt=prompt)) for i, prompt in enumerate(prompts)]
        for one, other in zip(alone, await asyncio.gather(*crowd), strict=True):
            assert one.ids == other.ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def siblings_get_what_they_would_get_alone(make: Factory) -> None:
    async with make() as rig:
        alone = await collect(rig.engine, make_request(length=30))
        group = [collect(rig.engine, make_request(f"r{i}", group="g", length=30)) for i in range(8)]
        for response in await asyncio.gather(*group):
            assert response.ids == alone.ids


async def more_requests_than_fit_all_finish(make: Factory) -> None:
    async with make() as rig:
        requests = [make_request(f"r{i}", group=f"g{i // 4}", length=5 + i) for i in range(3 * rig.max_batch)]
        tasks = [asyncio.create_task(collect(rig.engine, request)) for request in requests]
        while not all(task.done() for task in tasks):
            status = rig.engine.status()
            assert status.running <= rig.max_batch
            assert status.kv_used <= status.kv_capacity
            await asyncio.sleep(0.005)
        assert [len(task.result().ids) for task in tasks] == [5 + i for i in range(len(requests))]
        await idle(rig.engine)


async def an_abort_delivers_the_exact_partial(make: Factory) -> None:
    async with make() as rig:
        request = await caught(rig.engine, make_request(length=1900))
        await rig.engine.abort("r")
        partial = await request.response()
        whole = await collect(rig.engine, make_request(length=len(partial.ids)))
        assert partial.reason is FinishReason.ABORT
        assert 0 < len(partial.ids) < 1900
        assert partial.ids == whole.ids
        assert partial.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def an_abort_ends_a_waiting_request(make: Factory) -> None:
    async with make() as rig:
        await rig.engine.pause(PauseMode.IN_PLACE)
        task = asyncio.create_task(collect(rig.engine, make_request()))
        await until(lambda: rig.engine.status().waiting == 1)
        await rig.engine.abort("r")
        response = await task
        assert (response.ids, response.reason) == ([], FinishReason.ABORT)
        assert rig.engine.status().waiting == 0


async def an_abort_of_an_unknown_rid_is_fine(make: Factory) -> None:
    async with make() as rig:
        await rig.engine.abort("nobody")
        assert len((await collect(rig.engine, make_request())).ids) == 20


async def a_response_resumed_by_its_prefix_is_the_uninterrupted_one(make: Factory) -> None:
    async with make() as rig:
        whole = await collect(rig.engine, make_request(length=60))
        for cut in (1, 31, 32, 59):
            rest = await collect(rig.engine, make_request(prefix=whole.ids[:cut], length=60))
            assert rest.ids == whole.ids[cut:]
            assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)


async def a_prefix_that_reaches_its_cap_is_finished_at_once(make: Factory) -> None:
    async with make() as rig:
        response = await collect(rig.engine, make_request(prefix=range(20), length=20))
        assert (response.ids, response.reason) == ([], FinishReason.LENGTH)


async def an_aborted_rid_may_be_used_again(make: Factory) -> None:
    async with make() as rig:
        request = await caught(rig.engine, make_request(length=1900))
        await rig.engine.abort("r")
        again = asyncio.create_task(collect(rig.engine, make_request(length=30)))
        assert (await request.response()).reason is FinishReason.ABORT
        assert len((await again).ids) == 30


async def a_rid_in_flight_is_refused(make: Factory) -> None:
    async with make() as rig:
        request = await caught(rig.engine, make_request(length=1900))
        with pytest.raises(ValueError, match=r"rid=r: .*already"):
            await collect(rig.engine, make_request())
        await rig.engine.abort("r")
        assert (await request.response()).reason is FinishReason.ABORT


async def a_stream_that_is_dropped_is_aborted(make: Factory) -> None:
    async with make() as rig:
        async with aclosing(rig.engine.generate(make_request(length=1900))) as stream:
            await anext(stream)
        await idle(rig.engine)
        assert len((await collect(rig.engine, make_request())).ids) == 20


async def a_stream_whose_task_is_cancelled_is_aborted(make: Factory) -> None:
    async with make() as rig:
        request = await caught(rig.engine, make_request(length=1900))
        request._task.cancel()
        await idle(rig.engine)
        assert len((await collect(rig.engine, make_request())).ids) == 20


def follow(engine: InferenceEngine, request: GenerateRequest) -> list[Delta | EngineLostError]:
    """All that is told of a request from now on."""
    if not isinstance(engine, PushEngine):
        pytest.skip("its streams are read")
    told: list[Delta | EngineLostError] = []
    engine.follow(request, told.append)
    assert not told, "nobody hears of it before `follow` returns"
    return told


async def a_stream_that_is_told_is_the_one_that_is_read(make: Factory) -> None:
    async with make() as rig:
        told = follow(rig.engine, make_request("told", length=70))
        await until(lambda: _reason(told) is not None)
        read = await collect(rig.engine, make_request("read", length=70))
        response = Response([delta for delta in told if isinstance(delta, Delta)])
        assert len(response.deltas) == len(told)
        assert response.ids == read.ids
        assert [delta.finish_reason for delta in response.deltas[:-1]] == [None] * (len(told) - 1)
        assert response.reason is FinishReason.LENGTH


async def a_stream_that_is_told_ends_when_it_is_aborted(make: Factory) -> None:
    async with make() as rig:
        told = follow(rig.engine, make_request(length=1900))
        await until(lambda: bool(told))
        await rig.engine.abort("r")
        await until(lambda: _reason(told) is FinishReason.ABORT)
        again = follow(rig.engine, make_request(length=1900))
        await rig.engine.pause(PauseMode.ABORT)
        await until(lambda: _reason(again) is FinishReason.ABORT)
        assert _reason(told) is FinishReason.ABORT, "nothing comes behind that"


def _reason(told: list[Delta | EngineLostError]) -> FinishReason | None:
    """Of the last that was told."""
    last = told[-1] if told else None
    return last.finish_reason if isinstance(last, Delta) else None


async def what_can_never_fit_is_refused(make: Factory) -> None:
    async with make() as rig:
        prompt = np.arange(rig.max_len - 5) % rig.vocab
        with pytest.raises(ValueError, match="max_len"):
            await collect(rig.engine, make_request(prompt=prompt, prefix=range(6), length=20))


async def weights_do_not_change_under_a_running_request(make: Factory) -> None:
    async with make() as rig:
        request = await caught(rig.engine, make_request(length=1900))
        with pytest.raises(RuntimeError):
            await rig.engine.load_weights(rig.weights[1], 2)
        await rig.engine.abort("r")
        assert set((await request.response()).versions) == {1}


async def a_pause_by_abort_ends_running_and_waiting_requests(make: Factory) -> None:
    async with make() as rig:
        requests = [Caught(rig.engine, make_request(f"r{i}", length=1900)) for i in range(rig.max_batch + 2)]
        await requests[0].running()
        await rig.engine.pause(PauseMode.ABORT)
        responses = [await request.response() for request in requests]
        assert {response.reason for response in responses} == {FinishReason.ABORT}
        assert responses[0].ids
        await rig.engine.resume()
        assert len((await collect(rig.engine, make_request())).ids) == 20


async def a_pause_by_abort_ends_what_another_pause_holds(make: Factory) -> None:
    async with make() as rig:
        for held in (PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.RELEASE):
            request = await caught(rig.engine, make_request(length=1900))
            await rig.engine.pause(held)
            await rig.engine.pause(PauseMode.ABORT)
            assert (await request.response()).reason is FinishReason.ABORT
            await rig.engine.resume()
            assert len((await collect(rig.engine, make_request())).ids) == 20


async def a_released_response_is_the_one_that_nothing_paused(make: Factory) -> None:
    async with make() as rig:
        whole = await collect(rig.engine, make_request(length=400))
        request = await caught(rig.engine, make_request(length=400))
        before = (await rig.engine.checksum()).total
        for mode in (PauseMode.RELEASE, PauseMode.RELEASE, PauseMode.IN_PLACE):  # the last changes nothing
            await rig.engine.pause(mode)
        assert (await rig.engine.checksum()).total == before, "the weights stay"
        waiting = asyncio.create_task(collect(rig.engine, make_request("waiting")))
        await until(lambda: rig.engine.status().waiting >= 1)
        await rig.engine.resume()
        await rig.engine.resume()
        response = await request.response()
        assert response.ids == whole.ids
        assert response.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert (await waiting).ids == whole.ids[:20]
        assert set(response.kv_versions) == {None}


async def a_released_engine_releases_again_under_load(make: Factory) -> None:
    async with make() as rig:
        whole = await collect(rig.engine, make_request(length=200))
        streams = [Caught(rig.engine, make_request(f"r{i}", length=200)) for i in range(rig.max_batch)]
        await streams[0].running()
        for _ in range(5):
            await rig.engine.pause(PauseMode.RELEASE)
            await rig.engine.resume()
        for response in [await stream.response() for stream in streams]:
            assert response.ids == whole.ids


async def an_abort_ends_a_released_request_with_its_partial(make: Factory) -> None:
    async with make() as rig:
        request = await caught(rig.engine, make_request(length=1900))
        await rig.engine.pause(PauseMode.RELEASE)
        await rig.engine.abort("r")
        partial = await request.response()
        await rig.engine.resume()
        whole = await collect(rig.engine, make_request(length=len(partial.ids)))
        assert partial.reason is FinishReason.ABORT
        assert 0 < len(partial.ids) < 1900
        assert partial.ids == whole.ids


async def a_retracted_response_goes_on_under_the_new_weights(make: Factory) -> None:
    async with make() as rig:
        await _goes_on_after(PauseMode.RETRACT, rig)


async def a_response_paused_in_place_goes_on_under_the_new_weights(make: Factory) -> None:
    async with make() as rig:
        await _goes_on_after(PauseMode.IN_PLACE, rig)


async def _goes_on_after(mode: PauseMode, rig: Rig) -> None:
    request = await caught(rig.engine, make_request(length=1900))
    await rig.engine.pause(mode)
    await rig.engine.load_weights(rig.weights[1], 2)
    await rig.engine.resume()
    response = await request.response()
    assert len(response.ids) == 1900
    assert set(response.versions) == {1, 2}
    assert all(earlier <= later for earlier, later in pairwise(response.versions))


async def log_probabilities_are_those_of_a_full_forward(make: Factory) -> None:
    async with make() as rig:
        for temperature in (0.7, 1.0):
            request = make_request(length=60, temperature=temperature)
            response = await collect(rig.engine, request)
            expected = full_forward(rig.weights[0], [3, 4, 5, *response.ids], prompt=3, temperature=temperature)
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


async def a_retracted_token_is_of_the_version_that_it_names(make: Factory) -> None:
    await _is_of_the_version_that_it_names(PauseMode.RETRACT, make)


async def a_released_token_is_of_the_version_that_it_names(make: Factory) -> None:
    await _is_of_the_version_that_it_names(PauseMode.RELEASE, make)


async def _is_of_the_version_that_it_names(mode: PauseMode, make: Factory) -> None:
    async with make() as rig:
        response = await _changed_under_way(rig, mode)
        assert set(response.versions) == {1, 2}
        assert set(response.kv_versions) == {None}
        for version, folder in enumerate(rig.weights, 1):
            expected = full_forward(folder, [3, 4, 5, *response.ids], prompt=3)
            own = np.array(response.versions) == version
            np.testing.assert_allclose(np.array(response.logprobs)[own], expected[own], atol=1e-4)


async def a_token_on_an_old_kv_cache_says_so(make: Factory) -> None:
    async with make() as rig:
        response = await _changed_under_way(rig, PauseMode.IN_PLACE)
        assert [kv for kv, version in zip(response.kv_versions, response.versions, strict=True) if version == 2]
        for kv, version in zip(response.kv_versions, response.versions, strict=True):
            assert kv == (1 if version == 2 else None)
        own = np.array(response.versions) == 1
        difference = np.abs(response.logprobs - full_forward(rig.weights[0], [3, 4, 5, *response.ids], prompt=3))
        assert difference[own].max() <= 1e-4
        assert difference[~own][0] > 1e-4, "the first token of the new version was made by the old weights"


async def _changed_under_way(rig: Rig, mode: PauseMode) -> Response:
    request = await caught(rig.engine, make_request(length=600, temperature=1.0))
    await rig.engine.pause(mode)
    await rig.engine.load_weights(rig.weights[1], 2)
    await rig.engine.resume()
    return await request.response()


async def an_update_under_many_streams_loses_no_token(make: Factory) -> None:
    async with make() as rig:
        for version, mode in enumerate((PauseMode.RETRACT, PauseMode.IN_PLACE), 2):
            streams = [Caught(rig.engine, make_request(f"r{i}", length=300)) for i in range(32)]
            await streams[0].running()
            await rig.engine.pause(mode)
            await rig.engine.load_weights(rig.weights[version % 2], version)
            await rig.engine.resume()
            for response in [await stream.response() for stream in streams]:
                assert len(response.ids) == len(response.logprobs) == len(response.versions) == 300
                assert response.versions == sorted(response.versions)
                assert response.versions[-1] == version


async def twenty_updates_under_load_leave_the_same_weights(make: Factory) -> None:
    async with make() as rig:
        fresh = (await rig.engine.checksum()).total
        streams = [Caught(rig.engine, make_request(f"r{i}", length=1900)) for i in range(4)]
        await streams[0].running()
        checksums = []
        for version in range(2, 22):
            await rig.engine.pause(PauseMode.IN_PLACE)
            await rig.engine.load_weights(rig.weights[(version + 1) % 2], version)
            checksums.append((await rig.engine.checksum()).total)
            await rig.engine.resume()
        for i in range(4):
            await rig.engine.abort(f"r{i}")
        assert {(await stream.response()).reason for stream in streams} == {FinishReason.ABORT}
        assert set(checksums[1::2]) == {fresh}
        assert len(set(checksums)) == 2


async def a_request_that_comes_during_a_pause_waits_for_its_end(make: Factory) -> None:
    async with make() as rig:
        await rig.engine.pause(PauseMode.RETRACT)
        task = asyncio.create_task(collect(rig.engine, make_request()))
        await until(lambda: rig.engine.status().waiting == 1)
        await rig.engine.load_weights(rig.weights[1], 2)
        await rig.engine.resume()
        assert (await task).versions == [2] * 20


async def a_request_that_comes_during_a_load_is_of_the_new_version(make: Factory) -> None:
    async with make() as rig:
        loading = asyncio.create_task(rig.engine.load_weights(rig.weights[1], 2))
        await asyncio.sleep(0)  # it has begun
        response = await collect(rig.engine, make_request())
        await loading
        assert response.versions == [2] * 20
        expected = full_forward(rig.weights[1], [3, 4, 5, *response.ids], prompt=3)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


async def versions_never_go_back(make: Factory) -> None:
    async with make() as rig:
        await rig.engine.load_weights(rig.weights[1], 5)
        with pytest.raises(ValueError, match="4"):
            await rig.engine.load_weights(rig.weights[0], 4)
        assert rig.engine.status().version == 5


async def changes_of_twenty_versions_leave_the_weights_of_a_whole_load(make: Factory) -> None:
    async with make() as rig:
        with tempfile.TemporaryDirectory() as name:
            folders, files = [rig.weights[0]], []
            for version in range(2, 22):
                folders.append(nudged(folders[-1], Path(name) / f"v{version}", seed=version))
                file = Path(name) / f"v{version}-changes"
                files.append(write_changes(*folders[-2:], file, base=version - 1, version=version))
            if not rig.engine.takes_changes:
                with pytest.raises(RefusedError):
                    await rig.engine.check_changes(files[:1], 2)
                return
            for version in range(2, 20):
                await load_changes(rig.engine, [files[version - 2]], version)
            await load_changes(rig.engine, files[-2:], 21)  # two at a time
            changed = await rig.engine.checksum()
            response = await collect(rig.engine, make_request())
            assert response.versions == [21] * 20
            expected = full_forward(folders[-1], [3, 4, 5, *response.ids], prompt=3)
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
            await rig.engine.load_weights(rig.weights[1], 22)
            assert (await rig.engine.checksum()).total != changed.total
            await rig.engine.load_weights(folders[-1], 23)
            assert await rig.engine.checksum() == changed


async def changes_that_do_not_fit_are_refused_and_the_old_weights_stay(make: Factory) -> None:
    async with make() as rig:
        if not rig.engine.takes_changes:
            pytest.skip("takes whole versions alone")
        name, tensor = next((name, x) for name, x in read_version(rig.weights[0]).items() if x.dim() == 2)
        other = "model.norm.weight"

        def changes(base=1, version=2, at=(0,), to=(0.5,), last=name, kind=torch.int64):
            number = len(list(Path(folder).iterdir()))
            pairs = {other + AT: torch.tensor([0]), other + TO: torch.tensor([0.5])}  # alone it would fit
            pairs |= {last + AT: torch.tensor(at, dtype=kind), last + TO: torch.tensor(to)}
            return save_changes(pairs, Path(folder) / str(number), base=base, version=version)

        before = await rig.engine.checksum()
        with tempfile.TemporaryDirectory() as folder:
            unreadable, lone = Path(folder) / "unreadable", Path(folder) / "lone"
            unreadable.write_bytes(b"no safetensors")
            save_changes({name + AT: torch.tensor([0])}, lone, base=1, version=2)
            for files, version in (
                ([changes(base=0)], 2),
                ([changes(base="one")], 2),
                ([changes(version=3)], 2),
                ([changes(), changes(base=3, version=4)], 4),
                ([], 2),
                ([unreadable], 2),
                ([Path(folder) / "missing"], 2),
                ([lone], 2),
                ([changes(last="model.layers.0.unheard_of.weight")], 2),
                ([changes(at=(-1,))], 2),
                ([changes(at=(tensor.numel(),))], 2),
                ([changes(at=(1, 1), to=(0.5, 0.5))], 2),
                ([changes(at=(1, 0), to=(0.5, 0.5))], 2),
                ([changes(at=(0, 1))], 2),
                ([changes(kind=torch.int32)], 2),
                ([changes(to=(math.nan,))], 2),
                ([changes(to=(-math.inf,))], 2),
                ([changes(), changes(base=2, version=3, to=(math.nan,))], 3),
            ):
                with pytest.raises(RefusedError) as refused:
                    await rig.engine.check_changes(files, version)
                assert "\n" not in str(refused.value)
                assert rig.engine.status().version == 1
            assert await rig.engine.checksum() == before
            assert (await collect(rig.engine, make_request())).versions == [1] * 20
            late = await rig.engine.check_changes([changes()], 2)
            await load_changes(rig.engine, [changes()], 2)
            for version in (2, 3):
                with pytest.raises(RefusedError, match="from version 1, but 2 is served; load the whole version"):
                    await rig.engine.load_changes(replace(late, version=version))
        assert await rig.engine.checksum() != before


async def files_that_vanish_after_their_check_are_applied_or_refused_together(make: Factory) -> None:
    async with make() as rig:
        if not rig.engine.takes_changes:
            pytest.skip("takes whole versions alone")
        before = await rig.engine.checksum()
        with tempfile.TemporaryDirectory() as name:
            folders, files = [rig.weights[0]], []
            for version in (2, 3):
                folders.append(nudged(folders[-1], Path(name) / f"v{version}", seed=version))
                file = Path(name) / f"v{version}-changes"
                files.append(write_changes(*folders[-2:], file, base=version - 1, version=version))
            changes = await rig.engine.check_changes(files, 3)
            files[1].unlink()
            with suppress(RefusedError):
                await rig.engine.load_changes(changes)
            found, version = await rig.engine.checksum(), rig.engine.status().version
            await rig.engine.load_weights(folders[-1], 3)
            assert found == (before if version == 1 else await rig.engine.checksum())
            assert version in (1, 3)


async def changes_do_not_come_under_a_running_request(make: Factory) -> None:
    async with make() as rig:
        if not rig.engine.takes_changes:
            pytest.skip("takes whole versions alone")
        with tempfile.TemporaryDirectory() as name:
            after = nudged(rig.weights[0], Path(name) / "v2", share=0.5)
            file = write_changes(rig.weights[0], after, Path(name) / "changes", base=1, version=2)
            request = await caught(rig.engine, make_request(length=600, temperature=1.0))
            changes = await rig.engine.check_changes([file], 2)
            with pytest.raises(RuntimeError):
                await rig.engine.load_changes(changes)
            await rig.engine.pause(PauseMode.RETRACT)
            await rig.engine.load_changes(changes)
            await rig.engine.resume()
            response = await request.response()
            assert set(response.versions) == {1, 2}
            for version, folder in ((1, rig.weights[0]), (2, after)):
                expected = full_forward(folder, [3, 4, 5, *response.ids], prompt=3)
                own = np.array(response.versions) == version
                np.testing.assert_allclose(np.array(response.logprobs)[own], expected[own], atol=1e-4)


async def a_lost_engine_says_so_in_every_method(make: Factory, kill: Callable[[InferenceEngine], None]) -> None:
    """`kill` breaks what computes, as a crash would. Not among `LAWS`, since a server that it kills stays dead."""
    async with make() as rig:
        engine = rig.engine
        request = await caught(engine, make_request(length=1900))
        told = follow(engine, make_request("told", length=1900)) if isinstance(engine, PushEngine) else None
        watching = asyncio.create_task(engine.watch())
        kill(engine)
        for ended in (request.response(), watching):
            with pytest.raises(EngineLostError) as raised:
                await ended
            assert "\n" not in str(raised.value)
        assert told is None or isinstance(told[-1], EngineLostError)
        for call in (
            collect(engine, make_request("another")),
            engine.abort("r"),
            engine.pause(PauseMode.ABORT),
            engine.pause(PauseMode.IN_PLACE),
            engine.pause(PauseMode.RELEASE),
            engine.resume(),
            engine.load_weights(rig.weights[1], 2),
            engine.check_changes([rig.weights[1] / "model.safetensors"], 2),
            engine.load_changes(CheckedChanges(base=1, version=2, files=())),
            engine.checksum(),
            engine.watch(),
        ):
            with pytest.raises(EngineLostError):
                await call
        with pytest.raises(EngineLostError):
            engine.status()


LAWS = (
    a_stream_ends_with_its_only_finish_reason,
    every_token_has_the_version_that_made_it,
    a_stop_id_ends_a_response_and_belongs_to_it,
    a_response_is_cut_at_max_len,
    a_response_does_not_depend_on_its_batch,
    siblings_get_what_they_would_get_alone,
    more_requests_than_fit_all_finish,
    an_abort_delivers_the_exact_partial,
    an_abort_ends_a_waiting_request,
    an_abort_of_an_unknown_rid_is_fine,
    a_response_resumed_by_its_prefix_is_the_uninterrupted_one,
    a_prefix_that_reaches_its_cap_is_finished_at_once,
    an_aborted_rid_may_be_used_again,
    a_rid_in_flight_is_refused,
    a_stream_that_is_dropped_is_aborted,
    a_stream_whose_task_is_cancelled_is_aborted,
    a_stream_that_is_told_is_the_one_that_is_read,
    a_stream_that_is_told_ends_when_it_is_aborted,
    what_can_never_fit_is_refused,
    weights_do_not_change_under_a_running_request,
    a_pause_by_abort_ends_running_and_waiting_requests,
    a_pause_by_abort_ends_what_another_pause_holds,
    a_released_response_is_the_one_that_nothing_paused,
    a_released_engine_releases_again_under_load,
    an_abort_ends_a_released_request_with_its_partial,
    a_released_token_is_of_the_version_that_it_names,
    a_retracted_response_goes_on_under_the_new_weights,
    a_response_paused_in_place_goes_on_under_the_new_weights,
    log_probabilities_are_those_of_a_full_forward,
    a_retracted_token_is_of_the_version_that_it_names,
    a_token_on_an_old_kv_cache_says_so,
    an_update_under_many_streams_loses_no_token,
    twenty_updates_under_load_leave_the_same_weights,
    a_request_that_comes_during_a_pause_waits_for_its_end,
    a_request_that_comes_during_a_load_is_of_the_new_version,
    versions_never_go_back,
    changes_of_twenty_versions_leave_the_weights_of_a_whole_load,
    changes_that_do_not_fit_are_refused_and_the_old_weights_stay,
    files_that_vanish_after_their_check_are_applied_or_refused_together,
    changes_do_not_come_under_a_running_request,
)
