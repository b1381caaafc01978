"""`reference/questions.md`: each question about a mirror, with its queries."""

from typing import Final

from docs.generate.markup import code, page, table
from storage.pipeline.lake.questions import QUESTIONS

INTRODUCTION: Final = """
# Questions about a mirror

`room-storage spark answer` and `storage.pipeline.answers` answer these questions.
[Answer questions from a mirror](../how-to/analyse-a-mirror.md) shows their use. A question is a
query on a daily table, and a daily table is a query on `events`. A name in braces is a data frame:
`spark.sql(query, events=frame)`.
"""


def text() -> str:
    """Return the page."""
    daily = {question.daily: question.daily_query for question in QUESTIONS.values()}
    rows = [
        [f"[{code(one.name)}](#{one.name})", one.about, f"[{code(one.daily)}](#{one.daily})"]
        for one in QUESTIONS.values()
    ]
    return page(
        INTRODUCTION,
        table(["Question", "Answer", "Daily table"], rows),
        *(_section(one.name, one.query) for one in QUESTIONS.values()),
        *(_section(name, query) for name, query in daily.items()),
    )


def _section(name: str, query: str) -> str:
    return f"## {name}\n\n```sql\n{query}```"
