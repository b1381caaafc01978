"""The options of the data source: Spark's texts as typed values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from storage.config import Config
from storage.errors import InputError
from storage.pipeline.source.rows import COLUMNS


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the format `room_events`.

    ``dsn``: the database. ``columns``: only these, separated by commas. ``partitions``: tasks of a
    read, each with one connection at a time. ``partition_by``: "room" gives each task whole rooms,
    "day" whole days of receipt (UTC). ``pushdown``: "true" lets Postgres filter. ``since``,
    ``upto``: tokens; only events between them are read. ``outliers``: whether to read outliers
    (default: only without ``since``). ``maxEventsPerBatch``: of a streaming read. ``server_name``,
    ``room_version``: of a write, as in `storage.open` and `Store.append`. ``instance_name``: tasks
    write under this name and their number. ``rejects``: "fail" (the default) or "ignore" events
    that cannot be stored. ``config``: no option; the limits and settings of the driver, which go to
    the executors.
    """

    dsn: str = field(repr=False)  # it may contain a password
    columns: tuple[str, ...] = COLUMNS
    partitions: int = 8
    partition_by: Literal["room", "day"] | None = None
    pushdown: bool = False
    since: str | None = None
    upto: str | None = None
    outliers: bool = True
    max_events_per_batch: int | None = None
    server_name: str | None = None
    room_version: str | None = None
    instance_name: str = "spark"
    ignore_rejects: bool = False
    config: Config = field(default_factory=Config.from_env)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Parse the options as given to Spark, where the case of names does not matter.

        Raise `InputError` with the defect.
        """
        found = {name.lower(): value for name, value in given.items()}
        unknown = found.keys() - KNOWN
        if unknown:
            raise InputError(
                f"room_events has no option {', '.join(sorted(unknown))}:"
                f" it has {', '.join(sorted(KNOWN))}"
            )
        if "dsn" not in found:
            raise InputError("room_events needs the option dsn: postgresql://…")
        batch = found.get("maxeventsperbatch")
        return cls(
            found["dsn"],
            columns=_columns(found.get("columns")),
            partitions=_positive("partitions", found.get("partitions", "8")),
            partition_by=_partition_by(found.get("partition_by")),
            pushdown=_truth("pushdown", found.get("pushdown", "false")),
            since=found.get("since"),
            upto=found.get("upto"),
            outliers=_truth(
                "outliers", found.get("outliers", "false" if "since" in found else "true")
            ),
            max_events_per_batch=None if batch is None else _positive("maxEventsPerBatch", batch),
            server_name=found.get("server_name"),
            room_version=found.get("room_version"),
            instance_name=found.get("instance_name", "spark"),
            ignore_rejects=_choice("rejects", found.get("rejects", "fail"), ("fail", "ignore"))
            == "ignore",
        )


KNOWN: Final = frozenset(
    [
        "dsn",
        "columns",
        "partitions",
        "partition_by",
        "since",
        "upto",
        "outliers",
        "pushdown",
        "maxeventsperbatch",
        "server_name",
        "room_version",
        "instance_name",
        "rejects",
        "path",
    ]
)


def _columns(text: str | None) -> tuple[str, ...]:
    names = COLUMNS if text is None else tuple(one.strip() for one in text.split(","))
    unknown = [one for one in names if one not in COLUMNS]
    if unknown:
        raise InputError(
            f"room_events has no column {', '.join(unknown)}: it has {', '.join(COLUMNS)}"
        )
    return names


def _partition_by(text: str | None) -> Literal["room", "day"] | None:
    if text is None:
        return None
    return "room" if _choice("partition_by", text.lower(), ("room", "day")) == "room" else "day"


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise InputError(f"{name}={text!r} is not a positive number")
    return int(text)


def _truth(name: str, text: str) -> bool:
    return _choice(name, text.lower(), ("true", "false")) == "true"


def _choice(name: str, text: str, among: tuple[str, ...]) -> str:
    if text not in among:
        raise InputError(f"{name}={text!r} is none of {', '.join(among)}")
    return text
