"""Limits come from one place, and each is explained."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import storage
from storage import Config, InputError
from storage import config as module
from storage.testing import RoomBuilder
from tests.cli.running import room_storage


def test_the_environment_changes_what_it_names() -> None:
    config = Config.from_env(
        {"STORAGE_POOL_SIZE_MAX": "3", "STORAGE_EMBEDDED_FSYNC": "off", "STORAGE_DSN": "ignored"}
    )
    assert config == Config(pool_size_max=3, embedded_fsync=False)
    assert Config.from_env({}) == Config()


@pytest.mark.parametrize(
    "name,value",
    [
        ("STORAGE_POOL_SIZE_MAX", "three"),
        ("STORAGE_POOL_SIZE_MAX", ""),
        ("STORAGE_EMBEDDED_FSYNC", "maybe"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: str) -> None:
    field = name.removeprefix("STORAGE_").lower()
    with pytest.raises(InputError) as caught:
        Config.from_env({name: value})
    wanted = "true or false" if field == "embedded_fsync" else "a whole number from 1 to 10000"
    assert str(caught.value) == f"{field} ({name}) is {value!r}: it must be {wanted}"


def test_a_variable_that_nothing_reads_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {
        "STORAGE_POOL_SIZ_MAX": "3",
        "STORAGE_DNS": "postgresql://u:sekret@h/x",
        "STORAGE_QUITE_ANOTHER_WORD": "1",
        "STORAGE_SERVICE_HOST": "10.0.0.1",
        "STORAGE_PORT_5432_TCP_ADDR": "10.0.0.1",
        "STORAGE_TEST_POSTGRES": "debian",
        "STORAGEBOX": "1",
    }
    module._warn_of.cache_clear()
    for _ in range(2):
        assert Config.from_env(environ) == Config()
    said = "the environment variable {} is not known, and has no effect{}"
    assert [record.getMessage() for record in caplog.records] == [
        said.format("STORAGE_DNS", ": did you mean STORAGE_DSN?"),
        said.format("STORAGE_POOL_SIZ_MAX", ": did you mean STORAGE_POOL_SIZE_MAX?"),
        said.format("STORAGE_QUITE_ANOTHER_WORD", ""),
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_variable_of_an_earlier_release_is_reported_with_what_takes_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    advice = {
        "STORAGE_CACHE_ROOMS_MAX": "since 0.3.0 it is a part of STORAGE_CACHE_MB",
        "STORAGE_PURGE_HOLD_MS": "since 0.3.0 its value is fixed",
        "STORAGE_REPLICATION_PING_MS": "since 0.3.0 its value is fixed",
    }
    module._warn_of.cache_clear()
    assert Config.from_env(dict.fromkeys(advice, "1")) == Config()
    assert [record.getMessage() for record in caplog.records] == [
        f"the environment variable {name} is not known, and has no effect: {text}"
        for name, text in advice.items()
    ]


def test_a_command_reports_such_a_variable(dsn: str) -> None:
    done = room_storage("migrate", "--dsn", dsn, STORAGE_POOL_SIZ_MAX="3")
    assert done.returncode == 0
    assert "did you mean STORAGE_POOL_SIZE_MAX?" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    wrong = room_storage("migrate", "--dsn", dsn, STORAGE_POOL_SIZE_MAX="many")
    assert wrong.returncode == 2
    assert wrong.stderr == (
        "error: pool_size_max (STORAGE_POOL_SIZE_MAX) is 'many': "
        "it must be a whole number from 1 to 10000\n"
    )


READ_BY_TESTS = re.compile(r'\benviron(?:\.get\(|\[)"(STORAGE_[A-Z_]+)"')


def test_every_variable_in_the_source_is_known() -> None:
    """Also those that tests read; other texts of a test may invent one."""
    root = Path(__file__).parents[1]
    named = {
        name
        for folder in ("storage", "benchmarks", "migrations", ".ci", "docs", "examples")
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts  # where others write just now
        for name in re.findall(r"\bSTORAGE_[A-Z][A-Z_]*[A-Z]\b", path.read_text("utf-8", "ignore"))
    }
    read = {
        name
        for path in (root / "tests").rglob("*.py")
        for name in READ_BY_TESTS.findall(path.read_text("utf-8"))
    }
    assert len(named) > 15
    assert {"STORAGE_EXAMPLES", "STORAGE_SEED", "STORAGE_VECTORS"} <= read
    assert module.unknown_variables(dict.fromkeys(named | read, "")) == []


def wrong_values() -> Iterator[tuple[str, object]]:
    """Of each field what is just outside of its range, and what is of another type."""
    for name, (kind, allowed) in module.ALLOWED.items():
        values: tuple[object, ...] = (
            (None, 7, "", "x" * 41, "naïve", "nul\0") if kind is str else (None, 1, 0, "True")
        )
        if allowed is not None:
            values = (
                allowed.least - 1,
                allowed.most + 1,
                -(1 << 70),
                1 << 70,
                None,
                True,
                1.5,
                "5",
                float("nan"),
            )
        yield from ((name, value) for value in values)


def test_every_field_is_checked() -> None:
    assert module.ALLOWED.keys() == {field.name for field in fields(Config)}
    assert {
        name
        for name, (kind, allowed) in module.ALLOWED.items()
        if (kind is int) != (allowed is not None)
    } == set()


@pytest.mark.parametrize("name, value", list(wrong_values()))
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        Config(**{name: value})  # type: ignore[arg-type]
    told, allowed = str(caught.value), module.ALLOWED[name][1]
    assert told.startswith(f"{name} (STORAGE_{name.upper()}) is {value!r}: it must be ")
    assert allowed is None or told.endswith(
        f"a whole number from {allowed.least} to {allowed.most}"
    )


@pytest.mark.parametrize(
    "name", [name for name, (_, allowed) in module.ALLOWED.items() if allowed is not None]
)
def test_both_ends_of_a_range_are_allowed(name: str) -> None:
    allowed = module.ALLOWED[name][1]
    assert allowed is not None
    for value in (allowed.least, allowed.most):
        config = Config(**{"retention_lifetime_ms_min": 0, name: value})  # type: ignore[arg-type]
        assert getattr(config, name) == value


@pytest.mark.parametrize(
    "wrong, told",
    [
        (
            {"retention_lifetime_ms_max": 5},
            (
                "retention_lifetime_ms_max .* is 5: "
                "it must be 0, or at least retention_lifetime_ms_min"
            ),
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Config(**wrong)  # type: ignore[arg-type]


def test_the_environment_is_checked_too() -> None:
    with pytest.raises(
        InputError, match=r"STORAGE_WRITER_BATCH_MAX\) is 0: it must be a whole number from 1 to"
    ):
        Config.from_env({"STORAGE_WRITER_BATCH_MAX": "0"})
    with pytest.raises(InputError, match="STORAGE_FOLLOW_MS"):
        Config.from_env({"STORAGE_FOLLOW_MS": "9" * 5_000})


async def test_the_least_sizes_work(dsn: str) -> None:
    """Every count has its smallest value; times stay as they are, as statements take some."""
    sizes: dict[str, Any] = {
        name: at.least
        for name, (_, at) in module.ALLOWED.items()
        if at is not None and "_ms" not in name
    }
    room = RoomBuilder("11", sign=False)
    room.start("@alice:s1.test")
    said = room.message("@alice:s1.test")
    async with storage.open(
        dsn, server_name="s1.test", config=Config(cache_reads=True, **sizes)
    ) as store:
        for pdu in room.pdus:
            assert {result.outcome for result in await store.append([pdu], room_version="11")} == {
                "stored"
            }
        first = await store.sync("@alice:s1.test")
        assert [event.event_id for event in first.join[room.room_id].timeline.events] == [
            said.event_id
        ]
        assert len(await store.backfill(room.room_id, [said.event_id], 100)) == 1
        again = room.message("@alice:s1.test")
        await store.append([again.pdu])
        news = await store.sync("@alice:s1.test", since=first.next_batch, timeout_ms=1_000)
        assert [event.event_id for event in news.join[room.room_id].timeline.events] == [
            again.event_id
        ]


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().pool_size_max = 1  # type: ignore[misc]


def test_each_field_is_explained() -> None:
    classes = [
        node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)
    ]
    [definition] = [node for node in classes if node.name == "Config"]
    explained = {
        field.target.id
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
    }
    assert {field.name for field in fields(Config)} == explained
