"""Redact DSNs, which may contain passwords, in everything that Spark shows and keeps.

That is plans, the event log and the history server. Spark redacts the values of options whose names
match one setting, and text of plans that matches another. The options of a view or a table are part
of plans, and the event log has a plan for each statement.
"""

from typing import Final

from pyspark.sql import SparkSession

NAMES: Final = "spark.sql.redaction.options.regex"
TEXTS: Final = "spark.sql.redaction.string.regex"
NAME: Final = "(?i)^dsn$"
TEXT: Final = r"(?i)postgres(?:ql)?://[^\s'\",)\]}]+"


def redact_dsns() -> None:
    """Make the active session redact DSNs, in addition to its other patterns.

    Without a session, as in an executor, do nothing.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        return
    for setting, pattern in ((NAMES, NAME), (TEXTS, TEXT)):
        given = spark.conf.get(setting, None)
        if given is None or pattern not in given:
            spark.conf.set(setting, f"{given}|{pattern}" if given else pattern)
