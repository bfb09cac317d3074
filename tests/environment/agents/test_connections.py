"""Clients that are slow, deaf or too many, against an endpoint that answers an agent meanwhile."""

import asyncio
import contextlib
import json
import os
import resource
import sys
import time

import aiohttp
import psutil
import pytest

from laminar_contrib.agents.agent import MAX_BODIES, MAX_REQUESTS
from tests.environment.agents.served import served_here

MANY = 10_000
EACH_BYTES = 20_000  # of a connection without bytes that wait: its protocol, parser, task and timers
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"


async def until(condition):
    """Return once a condition holds."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - it is another process's
            await asyncio.sleep(0.02)


class Served:
    """An endpoint in the process of this id."""

    def __init__(self, pid, url, key):
        self.process, self.url, self.key = psutil.Process(pid), url, key
        self.port = int(url.rpartition(":")[2].partition("/")[0])

    async def ask(self, session, word="?"):
        """Status of an agent's request, and its answer."""
        body = {"messages": [{"role": "user", "content": word}]}
        headers = {"Authorization": f"Bearer {self.key}"}
        async with session.post(f"{self.url}/chat/completions", json=body, headers=headers) as found:
            return found.status, await found.json()

    async def begin(self, text):
        """A connection over which that was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text.encode())
        await writer.drain()
        return reader, writer

    async def answers(self, status, session):
        """Return once a request of the agent has this status."""

        async def does():
            return (await self.ask(session))[0] == status

        await until(does)

    async def has_descriptors(self, count):
        async def has_them():
            return self.process.num_fds() <= count

        await until(has_them)


BOUNDS = {"connections": 4096, "body_bytes": 2**22}


@contextlib.asynccontextmanager
async def served(text="4", **bounds):
    async with served_here(BOUNDS | bounds, text) as (url, key):
        yield Served(os.getpid(), url, key)


@contextlib.asynccontextmanager
async def served_apart(*, descriptors=(), **bounds):
    """An endpoint in a process of its own, whose memory and descriptors can be counted."""
    arguments = [json.dumps(BOUNDS | bounds), "4", *map(str, descriptors)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.environment.agents.served", *arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Served(process.pid, **json.loads(await process.stdout.readline()))
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def flood(port, count):
    """Slow connections, from as many processes as their descriptors ask for."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100
    counts = [min(most, count - begun) for begun in range(0, count, most)]
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.environment.agents.flood", str(port), str(one)),
            stdout=asyncio.subprocess.PIPE,
        )
        for one in counts
    ]
    try:
        yield sum([int(await process.stdout.readline()) for process in processes])
    finally:
        for process in processes:
            process.kill()
            await process.wait()


@pytest.mark.slow
async def test_an_agent_is_answered_beside_ten_thousand_slow_connections_in_bounded_memory():
    async with served_apart(read_s=10.0, stall_s=10.0) as endpoint, aiohttp.ClientSession() as session:
        assert (await endpoint.ask(session))[0] == 200
        descriptors, before = endpoint.process.num_fds(), endpoint.process.memory_info().rss
        async with flood(endpoint.port, MANY) as opened:
            assert opened == MANY
            taken, most = [], 0
            for number in range(50):
                began = time.monotonic()
                async with aiohttp.ClientSession() as new:  # each second request over a connection of its own
                    status, answer = await endpoint.ask(new if number % 2 else session, f"{number}")
                taken.append(time.monotonic() - began)
                assert (status, answer["choices"][0]["message"]["content"]) == (200, "4")
                most = max(most, endpoint.process.memory_info().rss)
                await asyncio.sleep(0.1)
        sys.stdout.write(f"{(most - before) / 1e6:.0f} MB, {sorted(taken)[25]:.3f} s, at most {max(taken):.2f}\n")
        assert most - before < 4096 * EACH_BYTES
        await endpoint.has_descriptors(descriptors)
        assert (await endpoint.ask(session, "after"))[0] == 200


@pytest.mark.parametrize("begun", ["", "POST /v1", HEAD.format("sk-none", 9)[:-2]])
async def test_headers_that_do_not_come_are_refused_in_time(begun):
    async with served(read_s=0.3) as endpoint:
        reader, _ = await endpoint.begin(begun)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_does_not_come_is_refused_in_time():
    async with served(read_s=0.3) as endpoint:
        reader, _ = await endpoint.begin(HEAD.format(endpoint.key, 9) + "{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("key", ["sk-none", "\xff\xfe", "sk-\u0394", ""])
async def test_no_body_is_read_without_a_key(key):
    async with served() as endpoint:
        reader, writer = await endpoint.begin(HEAD.format(key, 9))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_who_reads_nothing_of_an_answer_is_closed():
    async with served("4" * 20_000, stall_s=0.3) as endpoint:
        body = json.dumps({"messages": [{"role": "user", "content": "?"}]})
        reader, _ = await endpoint.begin((HEAD.format(endpoint.key, len(body)) + body) * 2_000)
        reader._transport.pause_reading()
        await asyncio.sleep(2.0)
        reader._transport.resume_reading()
        count = 0
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(2**20):
                count += len(data)
        assert count < 20_000 * 2_000


async def test_a_new_connection_takes_the_place_of_the_oldest_that_has_no_key():
    async with served(connections=3) as endpoint, aiohttp.ClientSession() as session:
        assert (await endpoint.ask(session))[0] == 200
        first, second, third = [await endpoint.begin("") for _ in range(3)]
        assert (await first[0].read()).startswith(b"HTTP/1.1 503 ")
        assert (await endpoint.ask(session, "again"))[0] == 200
        assert not second[0].at_eof()
        assert not third[0].at_eof()


async def test_where_all_are_being_answered_a_new_connection_is_refused():
    async with served(connections=2) as endpoint:
        head = HEAD.format(endpoint.key, 9).replace("Host", "Expect: 100-continue\r\nHost")
        busy = [await endpoint.begin(head) for _ in range(2)]
        for reader, _ in busy:
            assert b" 100 " in await reader.readline()
        reader, _ = await endpoint.begin("")
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")


async def test_connections_are_no_more_than_half_of_the_descriptors():
    async with served_apart(descriptors=[200]) as endpoint, aiohttp.ClientSession() as session:
        many = [await endpoint.begin("POST") for _ in range(400)]
        assert endpoint.process.num_fds() < 200
        assert (await endpoint.ask(session))[0] == 200
        assert len(many) == 400


async def test_a_body_that_is_packed_is_refused_before_it_is_unpacked():
    async with served() as there, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {there.key}", "Content-Encoding": "gzip"}
        async with session.post(f"{there.url}/chat/completions", data=b"no gzip", headers=headers) as found:
            assert found.status == 415


@pytest.mark.parametrize("header", [f"X-A: {'a' * 5000}\r\n", "X-A: a\r\n" * 40])
async def test_long_headers_are_refused_before_their_end(header):
    async with served() as endpoint:
        reader, _ = await endpoint.begin(f"POST / HTTP/1.1\r\n{header}X-B:")
        assert (await reader.readline()).startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))


async def test_a_body_of_100_megabytes_is_refused_and_not_kept():
    async with served_apart() as there, aiohttp.ClientSession() as session:
        before = there.process.memory_info().rss
        assert (await there.ask(session, "a" * 10**8))[0] == 413
        assert there.process.memory_info().rss - before < 2**24
        assert (await there.ask(session))[0] == 200


async def test_slow_bodies_of_an_agent_delay_its_further_requests_alone():
    async with served(read_s=0.5) as endpoint, aiohttp.ClientSession() as session:
        slow = [await endpoint.begin(HEAD.format(endpoint.key, 9)) for _ in range(MAX_BODIES)]
        assert (await endpoint.ask(session))[0] == 200
        for reader, _ in slow:
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")


async def test_an_agent_with_many_open_requests_is_refused_further_ones():
    async with served() as endpoint, aiohttp.ClientSession() as session:
        many = [await endpoint.begin(HEAD.format(endpoint.key, 9)) for _ in range(MAX_REQUESTS)]
        await endpoint.answers(429, session)
        for _, writer in many:
            writer.close()
        await endpoint.answers(200, session)
