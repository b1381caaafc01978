"""The questions that a mirror answers, and the daily tables between the two.

A row of a daily table depends on the events of one day of receipt, and on nothing else. So a
refresh counts only the days again whose files have changed. A question is a query on one daily
table, which is small. The queries are in the folder `queries`: the name in braces is a data frame.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Final, cast

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import StructType

from storage.errors import InputError
from storage.pipeline.imports.lines import literal
from storage.pipeline.lake.delta_table import files_of
from storage.pipeline.lake.tables import MirrorTable
from storage.pipeline.source.rows import spark_ddl

DAILY: Final = {
    table.name: table
    for table in (
        MirrorTable(
            "daily_senders",
            pa.schema(
                [
                    ("room_id", pa.string()),
                    ("sender", pa.string()),
                    ("server", pa.string()),
                    ("events", pa.int64()),
                    ("bytes", pa.int64()),
                    ("messages", pa.int64()),
                    ("sent", pa.int64()),
                    ("redacted", pa.int64()),
                ]
            ),
            key="events",
            by_day=True,
        ),
        MirrorTable(
            "daily_joins",
            pa.schema(
                [
                    ("room_id", pa.string()),
                    ("minute", pa.int64()),
                    ("joins", pa.int64()),
                    ("servers", pa.int64()),
                ]
            ),
            key="minute",
            by_day=True,
        ),
        MirrorTable(
            "daily_bodies",
            pa.schema(
                [
                    ("digest", pa.string()),
                    ("example", pa.string()),
                    ("times", pa.int64()),
                    ("senders", pa.int64()),
                    ("rooms", pa.int64()),
                ]
            ),
            key="times",
            by_day=True,
        ),
        MirrorTable(
            "daily_servers",
            pa.schema(
                [
                    ("server", pa.string()),
                    ("events", pa.int64()),
                    ("median_lag_ms", pa.int64()),
                    ("p95_lag_ms", pa.int64()),
                    ("forks", pa.int64()),
                    ("merges", pa.int64()),
                    ("refused", pa.int64()),
                ]
            ),
            key="events",
            by_day=True,
        ),
        MirrorTable(
            "daily_media",
            pa.schema(
                [
                    ("url", pa.string()),
                    ("event_id", pa.string()),
                    ("room_id", pa.string()),
                    ("sender", pa.string()),
                ]
            ),
            key="",
            by_day=True,
        ),
    )
}
"""Tables with a row per day and something else."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question: its ``query`` reads the table ``daily``, which ``daily_query`` makes of events.

    ``about`` says what a row is. Both queries are Spark SQL, with the name of a data frame in
    braces: ``spark.sql(question.query, daily_senders=frame)``.
    """

    name: str
    about: str
    daily: str
    query: str
    daily_query: str


def _questions() -> dict[str, Question]:
    questions = {}
    for name, daily in (
        ("activity", "daily_senders"),
        ("retention", "daily_senders"),
        ("joins", "daily_joins"),
        ("bodies", "daily_bodies"),
        ("fan_out", "daily_senders"),
        ("redactions", "daily_senders"),
        ("servers", "daily_servers"),
        ("media", "daily_media"),
        ("growth", "daily_senders"),
    ):
        query = _text(name)
        questions[name] = Question(name, _about(query), daily, query, _text(daily))
    return questions


def _about(query: str) -> str:
    """Return the comment at the beginning of a query."""
    comments = itertools.takewhile(lambda line: line.startswith("-- "), query.splitlines())
    return " ".join(line.removeprefix("-- ") for line in comments)


def _text(name: str) -> str:
    return (files("storage.pipeline.lake") / "queries" / f"{name}.sql").read_text("utf-8")


QUESTIONS: Final = _questions()
"""By name."""


def chosen_questions(names: tuple[str, ...]) -> tuple[Question, ...]:
    """Return the questions of these names, or of "all". Raise `InputError`."""
    unknown = [name for name in names if name not in QUESTIONS and name != "all"]
    if unknown or not names:
        raise InputError(
            f"there is no question {', '.join(unknown) or 'without a name'}:"
            f" give all, or some of {', '.join(QUESTIONS)}"
        )
    chosen = set(QUESTIONS) if "all" in names else set(names)
    return tuple(question for name, question in QUESTIONS.items() if name in chosen)


def definition(query: str) -> str:
    """Return a text that differs between any two queries of a daily table."""
    return hashlib.sha256(query.encode()).hexdigest()[:32]


# --------------------------------------------------------------------------------------------------
# The tables of a mirror as data frames of Spark, without a library in the JVM.
#
# The log of the table says which Parquet files make a version. Spark reads these files itself, with
# its own reader: only the columns of a query, only the days that it names, and for a count no more
# than the footers.


def frame(
    spark: SparkSession, path: str, table: MirrorTable, version: int | datetime | None
) -> DataFrame:
    """Return a table as of now, of a version, or of a time."""
    return frame_of(spark, table, *files_of(path, table, version))


def frame_of(
    spark: SparkSession, table: MirrorTable, folder: str, files: Sequence[str]
) -> DataFrame:
    """Return the rows of these files. ``folder`` and ``files`` are URLs.

    Raise `InputError` if a file was deleted with its version.
    """
    schema = ddl(table.schema)
    if not files:
        columns = cast("StructType", StructType.fromDDL(schema)).fields
        return spark.range(0).select([lit(None).cast(c.dataType).alias(c.name) for c in columns])
    reader = spark.read.schema(schema)
    if table.by_day:
        reader = reader.option("basePath", folder)
    try:
        return reader.parquet(*map(literal, files))
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise InputError(
            f"{folder}: files of this version are deleted: it is older than the hours of --keep,"
            " or a mirror has just ended with a lower --keep"
        ) from error


def ddl(schema: pa.Schema) -> str:
    """Return the columns as Spark writes them."""
    columns = pa.schema([field for field in schema if field.name != "day"])
    return spark_ddl(columns) + (", `day` date" if "day" in schema.names else "")
