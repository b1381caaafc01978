"""The tables of a mirror as data frames of Spark, without a library in the JVM.

The log of the table says which Parquet files make a version. Spark reads these files itself, with
its own reader: only the columns of a query, only the days that it names, and for a count no more
than the footers.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import cast

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import StructType

from storage.errors import InputError
from storage.pipeline.imports.archive_files import literal
from storage.pipeline.lake.delta_table import files_of
from storage.pipeline.lake.tables import MirrorTable
from storage.pipeline.source.rows import spark_ddl


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
