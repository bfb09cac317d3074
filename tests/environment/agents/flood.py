"""A process that opens connections and is slow with each: `python -m tests.environment.agents.flood PORT COUNT`.

By turns one says nothing, sends its headers byte by byte, begins a long body, or asks and asks and reads nothing.
Says how many it has opened; keeps on, and opens another for each that is closed, until it is killed.
"""

import asyncio
import contextlib
import sys

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-none\r\n"
BODY = HEAD + b"Content-Length: 4000000\r\n\r\n"
ASK = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
PAUSE_S, AGAIN_S = 1.0, 5.0  # between bytes, between connections
AT_ONCE = 100


async def live(port, number, room, opened):
    async with room:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    opened.set()
    try:
        reader._transport.pause_reading()
        sent = 0
        while True:
            kind = number % 4
            if kind == 1:
                writer.write(b"X-A: "[:1] if sent > len(HEAD) else HEAD[sent : sent + 1])
            elif kind == 2:
                writer.write(BODY if not sent else b"a" * 1000)
            elif kind == 3 and sent < 1000:
                writer.write(ASK * 100)
            sent += 1
            await asyncio.sleep(PAUSE_S)
            await writer.drain()
            if writer.is_closing():
                return
    finally:
        writer.transport.abort()


async def keep_on(port, number, room, opened):
    while True:
        with contextlib.suppress(OSError):
            await live(port, number, room, opened)
        await asyncio.sleep(AGAIN_S)


async def main(port, count):
    room, opened = asyncio.Semaphore(AT_ONCE), [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(keep_on(port, number, room, opened[number])) for number in range(count)]
    for event in opened:
        await event.wait()
    sys.stdout.write(f"{count}\n")
    sys.stdout.flush()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
