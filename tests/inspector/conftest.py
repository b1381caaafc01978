"""A store on a database of the test's own, an inspector of it, and one browser for all tests."""

from collections.abc import AsyncIterator, Iterator

import pytest

import storage
from storage import Store
from tests.inspector.browser import Browser, browsing
from tests.inspector.served import Served, served
from tests.maintenance.rooms import SERVER


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


@pytest.fixture
async def site(store: Store) -> AsyncIterator[Served]:
    """An inspector that only reads."""
    async with served(store) as running:
        yield running


@pytest.fixture(scope="session")
def browser_of_session() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.fixture
async def browser(browser_of_session: Browser) -> AsyncIterator[Browser]:
    """The browser of the session, at 1280 pixels; messages of other tests are gone."""
    await browser_of_session.resize(1280)
    await browser_of_session.messages()
    yield browser_of_session
    await browser_of_session.open("about:blank")
