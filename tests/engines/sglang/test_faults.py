"""What the SGLang client makes of servers that misbehave: a real HTTP server that says what no SGLang should."""

import asyncio
import json
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from laminar_py.engines.sglang.engine import HALF_CHANGED, TAKES_CHANGES, SGLangEngine
from laminar_py.engines.sglang.stream import Served
from laminar_py.records.engine import EngineLostError, PauseMode, RefusedError
from laminar_py.records.pieces import Recording
from laminar_py.records.trajectory import FinishReason
from laminar_py.records.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, AdapterConfig, base_digest
from tests.engines.changes import load_changes, save_changes
from tests.engines.engine_conformance import Caught, caught, collect, make_request, until

PATIENCE_S = 20
WEIGHTS = Path(tempfile.mkdtemp(prefix="laminar-test-"))
AFTER_ABORT = b""
LOAD = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": 3, "max_total_num_tokens": 100}


def chunk(*ids, so_far=None, version="1", finish=None, spans=None, **meta) -> bytes:
    """`ids` are new, or repeated where `so_far` counts fewer."""
    logprobs = [[-0.5, token, None] for token in ids]
    meta = {"output_token_logprobs": logprobs, "completion_tokens": so_far or len(ids)} | meta
    meta |= {"weight_version": version, "finish_reason": finish, "weight_versions": spans}
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def last(*ids, count=None, kind="length", **meta) -> bytes:
    spans = [{"version": "1", "start": 0, "end": len(ids) if count is None else count}]
    return chunk(*ids, so_far=count, finish={"type": kind}, spans=spans, **meta)


@pytest.fixture(scope="module", autouse=True)
def weights():
    save_file({"a": np.zeros(3, np.float32)}, WEIGHTS / "model.safetensors")
    yield
    shutil.rmtree(WEIGHTS)


class Server:
    """Answers `/generate` with `events`, then as `end` says; all other calls as a healthy server would."""

    def __init__(self, events=(), *, status=200, end="close", answers=None):
        self.events, self.status, self.end = events, status, end
        self.answers = {"/v1/loads": {"loads": [LOAD]}, "/update_weights_from_disk": {"success": True}}
        self.answers |= answers or {}
        self.slow = {}  # seconds that a call takes
        self.update_status = 200  # of an answer in JSON to a load of weights
        self.silent_s = 0.0  # before the next first token; the scheduler answers no call meanwhile
        self.busy = asyncio.Lock()
        self.bodies, self.calls = [], []
        self.aborted, self.dead = asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        self.bodies.append(await request.json())
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        await self.silence(self.silent_s)
        for event in self.events:
            await (self.aborted.wait() if event is AFTER_ABORT else response.write(event))
        if self.end == "hang":
            await asyncio.sleep(3600)
        if self.end == "break":
            request.transport.abort()
        if self.end == "cut":
            request.transport.close()
        return response

    async def silence(self, seconds):
        async with self.busy:
            self.silent_s = 0.0
            await asyncio.sleep(seconds)

    async def watch(self):
        await self.dead.wait()
        raise EngineLostError("it ended with code 137")

    async def call(self, request):
        self.calls.append(request.path)
        await asyncio.sleep(self.slow.get(request.path, 0.0))
        if request.path == "/v1/loads":
            async with self.busy:
                pass
        answer = self.answers.get(request.path, {})
        if request.path == "/abort_request":
            self.aborted.set()
        if answer == "hang":
            await asyncio.sleep(3600)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        status = self.update_status if request.path == "/update_weights_from_disk" else 200
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer), status=status)

    @asynccontextmanager
    async def client(
        self,
        *,
        stall_timeout_s=PATIENCE_S,
        load_timeout_s=PATIENCE_S,
        start_timeout_s=PATIENCE_S,
        loaded=True,
        **served,
    ):
        """`stall_timeout_s` and `start_timeout_s` hold once it has started and, if it is to be, is loaded."""
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{rest:.*}", self.call)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        engine = SGLangEngine(
            f"http://{host}:{port}",
            api_key=None,
            served=Served(vocab=100, max_len=64, **served),
            stall_timeout_s=PATIENCE_S,
            load_timeout_s=load_timeout_s,
            watch_server=self.watch,
        )
        try:
            async with asyncio.timeout(PATIENCE_S + self.silent_s):
                await engine.start()
                if loaded:
                    await engine.load_weights(WEIGHTS, 1)
                engine._connection._patience.limit_s = stall_timeout_s
                engine._connection._patience.first_s = start_timeout_s
                yield engine
        finally:
            await engine.close()
            await runner.cleanup()


async def test_a_healthy_stream_is_what_the_server_said():
    async with Server([chunk(5), chunk(6, 7, so_far=3), last(8, count=4), b"data: [DONE]\n\n"]).client() as engine:
        response = await collect(engine, make_request())
    assert (response.ids, response.reason) == ([5, 6, 7, 8], FinishReason.LENGTH)
    assert response.logprobs == [-0.5] * 4
    assert response.versions == [1] * 4


async def test_a_cumulative_stream_gives_every_token_once():
    events = [chunk(5), chunk(5, 6, 7), last(5, 6, 7, 8)]
    async with Server(events).client() as engine:
        assert (await collect(engine, make_request())).ids == [5, 6, 7, 8]


async def test_the_end_of_an_aborted_retracted_request_repeats_no_token():
    logprobs = [[-0.5, token, None] for token in (5, 6, 7)]
    spans = [{"version": "1", "start": 0, "end": 3}]
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    end = chunk(7, so_far=3, output_token_logprobs=logprobs, finish=finish, spans=spans)
    async with Server([chunk(5, 6, 7), AFTER_ABORT, end]).client() as engine:
        stream = await caught(engine, make_request())
        await engine.abort("r")
        response = await stream.response()
    assert (response.ids, response.reason) == ([5, 6, 7], FinishReason.ABORT)


@pytest.mark.parametrize("end", ["break", "cut"])
async def test_a_server_that_fails_over_an_aborted_request_ends_it_and_stays(end):
    async with Server([chunk(5), AFTER_ABORT], end=end).client() as engine:
        stream = await caught(engine, make_request())
        await engine.abort("r")
        response = await stream.response()
        assert (response.ids, response.reason) == ([5], FinishReason.ABORT)
        await engine.load_weights(WEIGHTS, 2)


async def test_events_may_come_in_any_pieces():
    whole = b"".join([chunk(5), last(6, count=2)])
    async with Server([whole[i : i + 7] for i in range(0, len(whole), 7)]).client() as engine:
        assert (await collect(engine, make_request())).ids == [5, 6]


NONSENSE = {
    "no event": [b"hello\n\n"],
    "no json": [b"data: {oops\n\n"],
    "no meta": [b'data: {"output_ids": [1]}\n\n'],
    "tokens without log-probabilities": [chunk(5).replace(b"[-0.5, 5, null]", b"")],
    "log-probabilities of other tokens": [chunk(5).replace(b"[-0.5, 5, null]", b"[-0.5, 6, null]")],
    "a version that the client never sent": [chunk(5, version="default")],
    "spans that do not cover": [
        chunk(5, 6, finish={"type": "length"}, spans=[{"version": "1", "start": 0, "end": 1}])
    ],
    "a count that goes back": [chunk(5, 6), chunk(7, so_far=1)],
    "no spans": [chunk(5, finish={"type": "length"})],
    "a version that was never loaded": [
        chunk(5, finish={"type": "length"}, spans=[{"version": "7", "start": 0, "end": 1}])
    ],
    "an unknown end": [last(5, kind="tired")],
    "an abort that nobody asked for": [last(5, kind="abort")],
    "a failure of the server": [b'data: {"error": {"message": "CUDA", "code": 500}}\n\n'],
}


@pytest.mark.parametrize("events", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_in_a_stream_loses_the_server(events):
    async with Server(events, end="hang").client() as engine:
        with pytest.raises(EngineLostError, match="http://127"):
            await collect(engine, make_request())
        with pytest.raises(EngineLostError):
            await engine.checksum()


async def keep(stream, deltas):
    async for delta in stream:
        deltas.append(delta)


@pytest.mark.parametrize("end", ["close", "break", "cut"])
async def test_a_stream_without_its_last_token_loses_the_server_and_keeps_what_came(end):
    async with Server([chunk(5), chunk(6, so_far=2)], end=end).client() as engine:
        deltas = []
        with pytest.raises(EngineLostError):
            await keep(engine.generate(make_request()), deltas)
    assert [int(token) for delta in deltas for token in delta.ids] in ([5, 6], [5], [])


@pytest.mark.parametrize("status", [500, 503, 401])
async def test_a_generation_that_fails_loses_the_server(status):
    async with Server([b"out of memory"], status=status).client() as engine:
        with pytest.raises(EngineLostError, match=f"answered {status} to r: out of memory"):
            await collect(engine, make_request())
        with pytest.raises(EngineLostError):
            await engine.checksum()


async def test_a_generation_that_is_refused_leaves_the_server_in_use():
    server = Server([b"too long"], status=400)
    async with server.client() as engine:
        with pytest.raises(ValueError, match=r"rid=r: .*too long"):
            await collect(engine, make_request())
        server.events, server.status = [last(5)], 200
        assert (await collect(engine, make_request())).ids == [5]


async def test_a_server_that_falls_silent_is_lost():
    async with Server([chunk(5)], end="hang").client(stall_timeout_s=1.5) as engine:
        stream = Caught(engine, make_request())
        with pytest.raises(EngineLostError, match="no token"):
            await engine.watch()
        with pytest.raises(EngineLostError, match="no token"):
            await stream.response()


async def watched(engine, request):
    """The response, or the loss that the watch finds."""
    stream, watching = Caught(engine, request), asyncio.create_task(engine.watch())
    try:
        await asyncio.wait([watching, stream._task], return_when=asyncio.FIRST_COMPLETED)
        return await stream.response()
    finally:
        watching.cancel()


@pytest.mark.parametrize(("stall_s", "silent_s"), [(1.0, 3.0), pytest.param(60.0, 90.0, marks=pytest.mark.slow)])
async def test_a_server_that_compiles_kernels_before_its_first_token_is_waited_for(stall_s, silent_s):
    server = Server([chunk(5), last(6, count=2)])
    server.silent_s = silent_s
    async with server.client(stall_timeout_s=stall_s, start_timeout_s=10 * silent_s) as engine:
        began = asyncio.get_running_loop().time()
        assert (await watched(engine, make_request())).ids == [5, 6]
        assert asyncio.get_running_loop().time() - began >= silent_s
        assert (await watched(engine, make_request("second"))).ids == [5, 6]


async def test_a_server_that_stops_after_its_first_token_is_lost_in_the_stall_timeout():
    """Also if it stops before it answers a call that began before its first token."""
    server = Server([chunk(5)], end="hang")
    server.silent_s = 1.0
    async with server.client(stall_timeout_s=1.0, start_timeout_s=PATIENCE_S) as engine:
        server.answers["/v1/loads"] = "hang"
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineLostError, match=r"no token for 1 s|no answer to v1/loads\?include=core in 1 s"):
            await watched(engine, make_request())
        assert asyncio.get_running_loop().time() - began < 5.0


async def test_a_server_without_a_first_token_is_lost_in_the_time_of_its_start():
    server = Server([chunk(5)])
    server.silent_s = 30.0
    async with server.client(stall_timeout_s=0.3, start_timeout_s=1.5) as engine:
        with pytest.raises(EngineLostError, match=r"no first token for 2 s|no answer to v1/loads.* in 1\.5 s"):
            await watched(engine, make_request())


@pytest.mark.parametrize("before", [(), (PauseMode.RELEASE,)])
async def test_a_server_that_ends_no_stream_for_a_pause_by_abort_is_lost(before):
    async with Server([chunk(5)], end="hang").client(stall_timeout_s=1.5) as engine:
        stream = await caught(engine, make_request())
        for mode in (*before, PauseMode.ABORT):
            await engine.pause(mode)
        with pytest.raises(EngineLostError, match="no token"):
            await engine.watch()
        with pytest.raises(EngineLostError, match="no token"):
            await stream.response()


@pytest.mark.parametrize("then", [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_memory_that_is_away_stays_away_through_aborts_and_new_weights_until_the_engine_resumes(then):
    server = Server([chunk(5), AFTER_ABORT, last(count=1, kind="abort")])
    given = {"/resume_memory_occupation", "/continue_generation"}
    async with server.client() as engine:
        stream = await caught(engine, make_request())
        await engine.pause(PauseMode.RELEASE)
        server.calls.clear()
        if then is not PauseMode.ABORT:
            await engine.abort("r")
        await engine.pause(then)
        assert (await stream.response()).reason is FinishReason.ABORT
        await engine.load_weights(WEIGHTS, 2)
        assert not given & {*server.calls}
        await engine.resume()
        assert server.calls[-2:] == ["/resume_memory_occupation", "/continue_generation"]


async def test_a_paused_server_may_be_silent():
    async with Server([chunk(5)], end="hang").client(stall_timeout_s=0.3) as engine:
        stream = await caught(engine, make_request())
        await engine.pause(PauseMode.IN_PLACE)
        watching = asyncio.create_task(engine.watch())
        await asyncio.wait([watching, stream._task], timeout=1.5)
        assert not watching.done()
        watching.cancel()
        stream._task.cancel()


async def test_what_ends_the_watch_is_why_the_server_is_lost():
    server = Server([chunk(5)], end="hang")
    async with server.client() as engine:
        stream = await caught(engine, make_request())
        server.dead.set()
        for end in (engine.watch(), stream.response(), engine.checksum()):
            with pytest.raises(EngineLostError, match="ended with code 137"):
                await end


async def test_an_abort_is_said_until_its_stream_ends_and_of_a_dropped_one_once():
    server = Server([chunk(5), AFTER_ABORT, chunk(6, so_far=2)], end="hang")
    async with server.client() as engine:
        stream = await caught(engine, make_request())
        await engine.abort("r")
        await until(lambda: server.calls.count("/abort_request") == 3)
        stream._task.cancel()
        await asyncio.wait([stream._task])
        await until(lambda: not engine._aborts)
        assert server.calls.count("/abort_request") <= 5, "the third, one more on its way, and that of the drop"


async def test_an_abort_that_fails_loses_the_server():
    async with Server([chunk(5)], end="hang", answers={"/abort_request": 400}).client() as engine:
        stream = await caught(engine, make_request())
        await engine.abort("r")
        with pytest.raises(EngineLostError, match="an abort failed: abort_request was refused with 400"):
            await stream.response()


async def test_closing_is_no_fault(caplog):
    async with Server([last(5)]).client() as engine:
        await collect(engine, make_request())
    assert not caplog.records
    with pytest.raises(EngineLostError, match="closed"):
        await engine.checksum()


async def test_a_server_that_has_nothing_to_do_may_be_silent():
    async with Server().client(stall_timeout_s=0.3) as engine:
        watching = asyncio.create_task(engine.watch())
        await asyncio.wait([watching], timeout=1.5)
        assert not watching.done()
        watching.cancel()


@pytest.mark.parametrize("answer", ["hang", 500, 503, "<html>", {"success": "perhaps"}])
async def test_a_call_that_fails_loses_the_server(answer):
    server = Server(answers={"/update_weights_from_disk": answer})
    async with server.client(load_timeout_s=1.0, loaded=False) as engine:
        with pytest.raises(EngineLostError, match="update_weights_from_disk"):
            await engine.load_weights(WEIGHTS, 1)


@pytest.mark.parametrize("call", ["load_weights", "checksum"])
async def test_a_load_may_take_longer_than_any_other_call(call):
    loads = "/update_weights_from_disk" if call == "load_weights" else "/weights_checker"
    server = Server(answers={"/weights_checker": {"ranks": [{"per_gpu_checksum": "c"}]}})
    server.slow[loads] = 1.0
    async with server.client(stall_timeout_s=0.3, loaded=False) as engine:
        await (engine.load_weights(WEIGHTS, 1) if call == "load_weights" else engine.checksum())
        assert loads in server.calls


@pytest.mark.parametrize("answer", [400, {"success": False, "message": "shapes differ"}])
async def test_refused_weights_leave_the_server_in_use(answer):
    server = Server([last(5)])
    async with server.client() as engine:
        server.answers["/update_weights_from_disk"] = answer
        with pytest.raises(ValueError, match=r"refused|shapes differ"):
            await engine.load_weights(WEIGHTS, 2)
        assert (await collect(engine, make_request())).versions == [1]


@pytest.mark.parametrize("call", ["load_changes", "load_weights"])
@pytest.mark.parametrize("status", [200, 400])  # SGLang answers failed updates with either
async def test_a_server_that_fails_amid_new_weights_is_lost(call, status, tmp_path):
    file = save_changes({}, tmp_path / "changes", base=1, version=2)
    then = save_changes({}, tmp_path / "then", base=2, version=3)
    server = Server(answers={"/update_weights_from_disk": {"success": True, "message": TAKES_CHANGES}})
    async with server.client() as engine:
        server.update_status = status
        for words, expected in (("other tensors", RefusedError), (f"{HALF_CHANGED} no memory", EngineLostError)):
            server.answers["/update_weights_from_disk"] = {"success": False, "message": words}
            changes = call == "load_changes"
            load = load_changes(engine, [file, then], 3) if changes else engine.load_weights(WEIGHTS, 2)
            with pytest.raises(expected, match=words.split("] ")[-1]) as raised:
                await load
            assert "\n" not in str(raised.value)


async def test_weights_with_other_tensors_never_reach_the_server(tmp_path):
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    async with Server([last(5)]).client() as engine:
        for folder in (tmp_path, tmp_path / "empty"):
            with pytest.raises(ValueError, match="publish"):
                await engine.load_weights(folder, 2)
        assert (await collect(engine, make_request())).versions == [1]


async def test_a_refused_request_leaves_the_server_in_use():
    server = Server([b'data: {"error": {"message": "too long", "code": 400}}\n\n'])
    async with server.client() as engine:
        with pytest.raises(ValueError, match=r"rid=r: .*too long"):
            await collect(engine, make_request())
        server.events = [last(5)]
        assert (await collect(engine, make_request())).ids == [5]


async def test_nothing_is_sent_before_the_first_weights():
    server = Server([last(5)])
    async with server.client(loaded=False) as engine:
        task = asyncio.create_task(collect(engine, make_request()))
        await until(lambda: engine.status().waiting == 1)
        await engine.load_weights(WEIGHTS, 1)
        assert (await task).ids == [5]
        (body,) = server.bodies
        assert body["extra_key"].endswith("-1"), "it names the version that was loaded when it was sent"


async def test_a_request_names_its_version_and_aborts_by_no_prefix_of_another():
    server = Server([last(5)])
    async with server.client() as engine:
        await asyncio.gather(*(collect(engine, make_request(f"g1.{i}")) for i in (1, 10)))
    first, second = sorted(body["rid"] for body in server.bodies)
    assert not second.startswith(first)
    (cache,) = {body["extra_key"] for body in server.bodies}
    assert cache.endswith("-1")


async def test_a_request_leaves_nothing_to_the_preferences_of_the_server():
    server = Server([last(5)])
    async with server.client() as engine:
        await collect(engine, make_request())
    (body,) = server.bodies
    neutral = {"min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
    assert body["sampling_params"].items() >= (neutral | {"min_new_tokens": 0, "top_p": 1, "top_k": -1}).items()


async def test_masks_and_renormalised_log_probabilities_come_with_their_tokens():
    mask = {"output_token_sampling_mask": [[5, 9]], "output_token_sampling_logprobs": [-0.25]}
    async with Server([chunk(5, **mask), last(9, count=2, **mask)]).client(
        record=(Recording.SAMPLING_MASK,)
    ) as engine:
        deltas = [delta async for delta in engine.generate(make_request())]
    assert [delta.sampling_mask.ids.tolist() for delta in deltas] == [[5, 9], [5, 9]]
    assert [delta.logprobs.tolist() for delta in deltas] == [[-0.25], [-0.25]]


async def test_missing_masks_lose_the_server():
    async with Server([chunk(5)]).client(record=(Recording.SAMPLING_MASK,)) as engine:
        with pytest.raises(EngineLostError, match="sampling masks"):
            await collect(engine, make_request())


# ---- adapters


def write_adapter(folder: Path, base: Path, *, targets=("q_proj",), learned_on: Path | None = None) -> Path:
    folder.mkdir()
    digest = base_digest(base)
    config = AdapterConfig(
        base_model_name_or_path=str(learned_on or base),
        revision=digest,
        r=1,
        lora_alpha=1.0,
        target_modules=list(targets),
    )
    (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(config))
    parts = [
        f"{PREFIX}model.layers.0.self_attn.{target}.lora_{part}.weight" for target in targets for part in "AB"
    ]
    save_file({name: np.zeros((1, 1), np.float32) for name in parts}, folder / ADAPTER_WEIGHTS)
    return folder


class AdapterServer(Server):
    """Takes every adapter."""

    async def call(self, request):
        if request.path == "/load_lora_adapter":
            body = await request.json()
            self.answers[request.path] = {"loaded_adapters": {body["lora_name"]: body["lora_path"]}}
        return await super().call(request)


async def test_the_base_that_is_checked_is_the_one_served_wherever_the_learner_has_it(tmp_path):
    good, other = tmp_path / "good", tmp_path / "other"
    for value, folder in enumerate((good, other)):
        folder.mkdir()
        save_file({"a": np.full(3, value, np.float32)}, folder / "model.safetensors")
    elsewhere = write_adapter(tmp_path / "v1", good, learned_on=tmp_path / "only the learner has it")
    wrong = write_adapter(tmp_path / "v2", other, learned_on=other)
    server = AdapterServer()
    async with server.client(loaded=False, base=good) as engine:
        await engine.load_weights(elsewhere, 1)
        with pytest.raises(ValueError, match=r"base=.*good: the weights here differ from the learner's"):
            await engine.load_weights(wrong, 2)
        assert engine.status().version == 1
    assert server.calls.count("/load_lora_adapter") == 1


async def test_a_version_after_an_adapter_has_the_same_tensors(tmp_path):
    first = write_adapter(tmp_path / "v1", WEIGHTS)
    fewer = write_adapter(tmp_path / "v2", WEIGHTS, targets=("v_proj",))
    server = AdapterServer()
    async with server.client(loaded=False, base=WEIGHTS) as engine:
        await engine.load_weights(first, 1)
        with pytest.raises(ValueError, match=r"weights in .* has other tensors than the version before"):
            await engine.load_weights(fewer, 2)
        with pytest.raises(ValueError, match=r"version 2 .* is whole weights, unlike the version before; publish"):
            await engine.load_weights(WEIGHTS, 2)
        assert engine.status().version == 1
    assert server.calls.count("/load_lora_adapter") == 1
    assert "/update_weights_from_disk" not in server.calls
    server = AdapterServer()
    async with server.client(base=WEIGHTS) as engine:  # it begins with whole weights
        with pytest.raises(ValueError, match=r"version 2 .* is an adapter, unlike the version before; publish"):
            await engine.load_weights(first, 2)
    assert "/load_lora_adapter" not in server.calls
