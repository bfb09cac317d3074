"""Drives a real Chromium, headless, by its DevTools protocol over a websocket."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from contextlib import asynccontextmanager

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 120.0  # every wait of these tests ends here
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; `apt-get install chromium`")


def slow_in_browser(test):
    """Mark a test of a page beside the one that `make test` has."""
    return needs_browser(pytest.mark.slow(test))


class Tab:
    """One page. What went wrong in it, and what it asked the network for, is kept."""

    def __init__(self, socket):
        self._socket, self._numbers, self._answers = socket, itertools.count(1), {}
        self.errors, self.requests = [], []
        self._reader = asyncio.create_task(self._read())

    async def _read(self):
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"])[:600])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def do(self, method, **params):
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            answer = await self._answers[number]
        assert "error" not in answer, answer
        return answer["result"]

    async def look(self, expression):
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = await self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression):
        """Wait until it is true."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await self.look(expression):
                    return
                await asyncio.sleep(0.1)

    async def open(self, address, *, dark=False):
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.do("Emulation.setEmulatedMedia", features=scheme)
        await self.do("Page.navigate", url=address)
        await self.until("window.laminar !== undefined")

    async def screenshot(self, path):
        """The whole page."""
        size = (await self.do("Page.getLayoutMetrics"))["cssContentSize"]
        shot = await self.do(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browsing(profile, *, width=1400, height=1000):
    """A tab of a browser of its own, which ends with it."""
    profile.mkdir(parents=True)
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    arguments += ["--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *arguments, "about:blank", stdout=quiet, stderr=quiet, env={**os.environ, "HOME": str(profile)}
    )
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                page = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.do(f"{domain}.enable")
                yield tab
                tab._reader.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _port(path, process):
    async with asyncio.timeout(PATIENCE_S):
        while not (path.is_file() and path.read_text().count("\n")):
            assert process.returncode is None, f"chromium ended with {process.returncode}"
            await asyncio.sleep(0.05)
    return path.read_text().splitlines()[0]
