"""The dashboard and the alerts ask for metrics and labels that there are, and for all of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

import storage
from storage import Config, Store, UnknownRoom
from storage.observability.counters import FAILURES
from storage.observability.prometheus import StoreCollector, expose
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALICE = "@alice:s1.test"
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
USED = re.compile(r"\b(room_storage_\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


def dashboard() -> list[str]:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    queries = [
        one["query"]["query"]
        for one in board["templating"]["list"]
        if isinstance(one["query"], dict)
    ]
    return [
        *(target["expr"] for panel in board["panels"] for target in panel.get("targets", ())),
        *queries,
    ]


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DOCS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


@pytest.fixture
async def exposed(dsn: str) -> dict[str, set[str]]:
    """Every series after some work: its name, and the names of its labels."""
    registry = CollectorRegistry()
    async with storage.open(dsn, server_name=SERVER, config=Config(pool_size_max=2)) as store:
        collector = expose(store, registry)
        await work(store)
        await store.sizes.measured()
        return {name: labels for family in collector.collect() for name, labels in series(family)}


async def work(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    await store.append(room.pdus)
    await store.sync(ALICE)
    with pytest.raises(UnknownRoom):
        await store.messages("!nowhere:s1.test", ALICE)
    async with store.database.connection() as conn:
        with pytest.raises(storage.DatabaseError):
            await conn.execute("SELECT 1 / 0")


def series(family: Any) -> Iterator[tuple[str, set[str]]]:
    for ending in ENDINGS[family.type]:
        labels = [
            set(sample.labels) for sample in family.samples if sample.name == family.name + ending
        ]
        assert labels, (
            f"{family.name}{ending} was not counted: the work of this test says nothing of it"
        )
        yield family.name + ending, set.union(*labels) | {"instance"}


def test_alerts_are_whole() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) == 15
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "action", "runbook"}
        assert len(rule["annotations"]["action"]) > 80
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


async def test_what_is_asked_for_is_there(exposed: dict[str, set[str]]) -> None:
    expressions = [*dashboard(), *(rule["expr"] for rule in rules())]
    used = [
        (name, labels) for expression in expressions for name, labels in USED.findall(expression)
    ]
    assert len(used) > 50
    assert {name for name, _ in used} - exposed.keys() == set()
    for name, labels in used:
        assert {label for label, _ in LABEL.findall(labels)} <= exposed[name], name
    for expression in expressions:
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            labels = {label.strip() for label in grouped.split(",")}
            assert any(labels <= exposed[name] for name, _ in USED.findall(expression)), expression


async def test_nothing_is_exposed_in_vain(exposed: dict[str, set[str]]) -> None:
    """Each metric has its place on the dashboard, in one of its series."""
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for expression in dashboard()
        for name, _ in USED.findall(expression)
    }
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed} - asked == set()


def test_classes_and_names_in_the_alerts_are_ours() -> None:
    """Errors that are asked for are such as there are, so are outcomes, caches and settings."""
    text = (DOCS / "alerts.yml").read_text(encoding="utf-8")
    [alerted] = [one.split("|") for one in re.findall(r'error=~"([^"]*)"', text)]
    assert tuple(alerted) == FAILURES
    for error in alerted:
        assert hasattr(storage, error) or error in {"KeyError", "IndexError", "TypeError"}
    for name in re.findall(r"\b((?:Database|Storage|Permission|Commit)[A-Z]\w+)", text):
        assert hasattr(storage, name), name
    for setting in re.findall(r"STORAGE_(\w+)", text):
        assert hasattr(Config(), setting.lower()), setting
    assert StoreCollector.__doc__
