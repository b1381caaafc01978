"""Persistent maps: both implementations against dicts, and a planner on the other one."""

import importlib.util
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HAS_BOTH = importlib.util.find_spec("immutables") is not None
one_library = pytest.mark.skipif(not HAS_BOTH, reason="immutables has no wheel for this Python")

numbers = st.dictionaries(st.integers(1, 40), st.integers(1, 9))
changes = st.dictionaries(st.integers(1, 40), st.none() | st.integers(0, 9))

PLAN = """
import asyncio, sys
if sys.argv[2] == "rpds":
    sys.modules["immutables"] = None  # as on a Python for which it has no wheel
import storage
from storage.persistent_map import Map
from storage.testing import SHAPES, generate_room

async def main(dsn, library):
    assert Map.__module__.startswith(library)
    room = generate_room(SHAPES["fork_heavy"], 300, seed=3)
    async with storage.open(dsn, server_name="s1.test", migrate=True) as store:
        results = await store.append([event.pdu for event in room.events])
        state = await store.current_state(room.room_id)
    print([(one.event_id, one.outcome, one.reason) for one in results], sorted(state.items()))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(params=[pytest.param("immutables", marks=one_library), "rpds"])
def maps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with one of the two libraries."""
    if request.param == "rpds":
        monkeypatch.setitem(sys.modules, "immutables", None)
    fresh = importlib.util.find_spec("storage.persistent_map")
    assert fresh is not None
    assert fresh.loader is not None
    module = importlib.util.module_from_spec(fresh)
    fresh.loader.exec_module(module)
    assert module.Map.__module__.startswith(request.param)
    return module


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=numbers, more=numbers, change=changes)
def test_maps_are_as_dicts(
    maps: Any, start: dict[int, int], more: dict[int, int], change: dict[int, int | None]
) -> None:
    one = maps.Map(start)
    kept = {key: value for key, value in ({**start, **change}).items() if value}
    for found, wanted in (
        (one.update(more), {**start, **more}),
        (maps.changed(one, change, removed=0), kept),
        (one, start),
    ):
        assert dict(found) == wanted
        assert found == maps.Map(wanted)
        assert (len(found), set(found)) == (len(wanted), set(wanted))
        assert set(found.keys()) == wanted.keys()
        assert sorted(found.items()) == sorted(wanted.items())
        assert sorted(found.values()) == sorted(wanted.values())
        assert [found.get(key, 0) for key in range(42)] == [wanted.get(key, 0) for key in range(42)]
        assert all((key in found) == (key in wanted) for key in range(42))
        assert all(found[key] == wanted[key] for key in wanted)


@one_library
def test_both_maps_give_the_same_plans(dsn: str, empty_dsn: str) -> None:
    first, second = (
        subprocess.run(
            [sys.executable, "-c", PLAN, *arguments], capture_output=True, text=True, check=True
        ).stdout
        for arguments in ((dsn, "immutables"), (empty_dsn, "rpds"))
    )
    assert first.count("'stored'") > 200
    assert first == second
