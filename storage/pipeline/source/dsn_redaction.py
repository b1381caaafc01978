"""DSNs in what Spark shows and keeps: plans, the event log, the history server.

They may hold passwords.

Spark redacts the values of options whose names match one setting, and what matches another in the
texts of plans. The options of a view or a table stand in plans, and a plan stands in the event log
for each statement.
"""

from typing import Final

from pyspark.sql import SparkSession

NAMES: Final = "spark.sql.redaction.options.regex"
TEXTS: Final = "spark.sql.redaction.string.regex"
NAME: Final = "(?i)^dsn$"
TEXT: Final = r"(?i)postgres(?:ql)?://[^\s'\",)\]}]+"


def redact_dsns() -> None:
    """Have the active session redact DSNs, together with what it redacts already.

    Without a session, as in an executor, nothing is done.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        return
    for setting, pattern in ((NAMES, NAME), (TEXTS, TEXT)):
        given = spark.conf.get(setting, None)
        if given is None or pattern not in given:
            spark.conf.set(setting, f"{given}|{pattern}" if given else pattern)
