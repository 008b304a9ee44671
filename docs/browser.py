"""Looks at the built site in a headless browser, at the width of a phone and of a laptop.

python docs/browser.py SITE              prints what is cut: content that is wider than the page or than its box
python docs/browser.py SITE FOLDER       also writes a picture of each page, by width and colour scheme, to FOLDER
"""

import asyncio
import base64
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

WIDTHS = 390, 1280
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CUT = """(() => {
  const width = document.documentElement.clientWidth, found = [];
  for (const each of document.querySelectorAll('.md-content *')) {
    const style = getComputedStyle(each), box = each.getBoundingClientRect();
    if (box.width === 0 || style.display === 'inline') continue;
    const inner = each.clientWidth && style.overflowX !== 'visible' ? each.clientWidth : Infinity;
    const inside = each.closest('.md-typeset__scrollwrap, pre');
    if (each.scrollWidth > inner + 1 || (box.right > width + 1 && !inside))
      found.push(`${each.tagName} ${each.scrollWidth} > ${Math.min(inner, width)}: ${each.textContent.trim().split(/\\s+/).join(' ').slice(0, 40)}`);
  }
  return found;
})()"""


class Tab:
    """A tab, over the browser's DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._number = socket, 0

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def value(self, script: str) -> Any:
        answer = await self.do("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    async def open(self, page: Path, width: int, height: int, scheme: str) -> None:
        phone = width < WIDTHS[-1]
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.do("Emulation.setEmulatedMedia", features=features)
        await self.do("Page.navigate", url=page.as_uri())
        while not await self.value(f"document.readyState === 'complete' && location.href === '{page.as_uri()}'"):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = "--headless=new", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-port=0"
        browser = Popen([str(BROWSER), *flags, f"--user-data-dir={profile}"], stdout=DEVNULL, stderr=DEVNULL)
        try:
            port = Path(profile, "DevToolsActivePort")
            while not (port.exists() and port.read_text().count("\n")):
                await asyncio.sleep(0.1)
            address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/new"
            async with aiohttp.ClientSession() as session, session.put(address) as answer:
                opened = await answer.json(content_type=None)
                async with session.ws_connect(opened["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            browser.terminate()
            browser.wait()


async def look(site: Path, folder: Path | None = None) -> list[str]:
    """A line for each piece that is cut."""
    lines: list[str] = []
    async with tab() as it:
        for page in sorted(site.rglob("*.html")):
            for width in WIDTHS:
                for scheme in ("light", "dark") if folder else ("light",):
                    await it.open(page, width, 900, scheme)
                    name = str(page.relative_to(site).with_suffix(""))
                    if scheme == "light":
                        lines += [f"{name} at {width}: {words}" for words in await it.value(CUT)]
                    if folder:
                        taken = await it.do("Page.captureScreenshot", captureBeyondViewport=True)
                        path = folder / f"{name.replace('/', '_')}-{width}-{scheme}.png"
                        path.write_bytes(base64.b64decode(taken["data"]))
    return lines


if __name__ == "__main__":
    print(*asyncio.run(look(*(Path(name).resolve() for name in sys.argv[1:]))), sep="\n")  # noqa: T201
