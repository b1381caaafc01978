"""Pictures of the inspector, taken in a browser: `python -m docs.pictures.screenshots`.

Each page is taken at 400, 1280 and 2560 pixels, light and dark, as a window and as a whole, into
`build/screenshots`: look at them. Two become pictures of the documentation, with few colours so
that the files stay small. The rooms are generated, and their times fixed, so that only changes of
the pages change a picture.
"""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from PIL import Image

import storage
from storage import Store
from storage.database.embedded import embedded_postgres
from storage.testing import SHAPES, Odd, RoomBuilder, build_room
from tests.inspector.browser import Browser, browsing
from tests.inspector.served import served

SERVER: Final = "s1.test"
ADMIN, MOD, BOB = (f"@{name}:{SERVER}" for name in ("admin", "mod", "bob"))
FOLDER: Final = Path(__file__).parent
EVERYTHING: Final = FOLDER.parents[1] / "build" / "screenshots"
WIDTHS: Final = (400, 1280, 2560)
HEIGHT: Final = 1_000
WHOLE: Final = 6_000
"""The window, and the longest picture of a whole page, in pixels."""

DOCUMENTED: Final = {
    "inspector-room": ("graph", 1280),
    "inspector-resolution": ("resolution", 1280),
}
COLOURS: Final = 128

FIXED_TIMES: Final = """
for (const one of document.querySelectorAll("time")) one.textContent = "today";
for (const one of document.querySelectorAll(".row .when"))
  one.textContent = one.title.slice("claimed ".length, one.title.indexOf(" UTC"));
"""
"""Rows show when an event was received; a picture has the claimed time, which is the same again."""

Pages = Mapping[str, tuple[str, dict[str, str]]]


async def take() -> None:
    """Take all pictures."""
    EVERYTHING.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-", ignore_cleanup_errors=True) as data:
        await _take_all(data)
    for name, (page, width) in DOCUMENTED.items():
        picture = Image.open(EVERYTHING / f"{page}-{width}-light.png").convert("RGB")
        small = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(FOLDER / f"{name}.png", optimize=True)


async def _take_all(data: str) -> None:
    async with (
        embedded_postgres(Path(data)) as dsn,
        storage.open(dsn, server_name=SERVER, migrate=True) as store,
    ):
        pages = await furnished(store)
        async with served(store) as site:
            with browsing() as browser:
                for name, (path, given) in pages.items():
                    await _take(browser, name, site.address(path, **given))


async def _take(browser: Browser, name: str, url: str) -> None:
    for theme in ("light", "dark"):
        await browser.dark(is_dark=theme == "dark")
        for width in WIDTHS:
            await browser.resize(width, HEIGHT)
            await browser.open(url)
            await browser.wait(
                "const graph = document.getElementById('graph');"
                "return document.readyState === 'complete'"
                " && (!graph || graph.dataset.ready && graph.ariaBusy !== 'true')"
            )
            await browser.run(FIXED_TIMES)
            if name == "graph":
                await browser.run("document.getElementById('jump').scrollIntoView()")
            await browser.picture(EVERYTHING / f"{name}-{width}-{theme}.png")
            await _take_whole(browser, width, EVERYTHING / f"{name}-{width}-{theme}-whole.png")


async def _take_whole(browser: Browser, width: int, path: Path) -> None:
    """Take what lies below the window, too."""
    height = await browser.run("return document.documentElement.scrollHeight")
    await browser.resize(width, min(max(int(height), HEIGHT), WHOLE))
    await browser.run("scrollTo(0, 0)")
    await browser.picture(path)


async def furnished(store: Store) -> Pages:
    """Make the rooms; return the pages to take."""
    lively = build_room(
        SHAPES["small_chat"].replaced(
            fork_rate=0.5, fork_width=4, odd=Odd(rejected=0.04, soft_failed=0.03)
        ),
        220,
        seed=4,
        sign=False,
    )
    fork = RoomBuilder("11", seed=7, checked=False)
    fork.start(ADMIN, users={ADMIN: 100, MOD: 50})
    fork.join(MOD)
    fork.join(BOB)
    fork.leave(BOB)
    left, right = fork.fork(2)
    left.topic(ADMIN, "The pantry")
    left.power_levels(ADMIN, users={MOD: 0})
    right.topic(MOD, "The larder")
    right.message(MOD, "I have renamed it.")
    fork.merge(left, right)
    merge = fork.message(ADMIN, "Both are here again.")
    for room in (lively, fork):
        await store.append(room.pdus)
    return {
        "rooms": ("/", {}),
        "room": ("/room", {"id": lively.room_id}),
        "graph": ("/room", {"id": lively.room_id, "at": "60"}),
        "content": ("/room", {"id": fork.room_id, "content": "1"}),
        "event": ("/event", {"id": merge.event_id, "content": "1"}),
        "why": ("/why", {"event": merge.event_id, "reader": BOB}),
        "state": ("/state", {"room": lively.room_id}),
        "resolution": ("/resolution", {"event": merge.event_id}),
        "user": ("/user", {"id": ADMIN, "sync": "1"}),
        "growth": ("/growth", {}),
        "streams": ("/streams", {}),
        "operations": ("/operations", {}),
        "failure": ("/event", {"id": "$nothing"}),
    }


if __name__ == "__main__":
    asyncio.run(take())
