"""`reference/metrics.md`: each metric, with its type, labels and meaning, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from docs.generate.markup import code, page, table
from storage.observability import prometheus
from storage.observability.counters import SECONDS, SIZES

INTRODUCTION: Final = """
# Metrics

`room-storage serve --http-port PORT` serves the metrics of its store at `/metrics`. A homeserver
calls `storage.observability.prometheus.expose(store)`, and serves them with its own. Counters and
timings are kept always. The other values are read at each scrape. Labels are names of calls,
outcomes, classes of errors, caches, streams and writers; never users, rooms or events.

The files `docs/grafana.json` (a dashboard) and `docs/alerts.yml` use these metrics. The
[runbooks](../runbooks/index.md) have one page for each alert.
"""

BUCKETS: Final = f"""
## Buckets

A histogram `x` has the series `x_bucket`, `x_sum` and `x_count`. The bounds of a time in seconds
are {", ".join(map(str, SECONDS))}. Those of a number of events are {", ".join(map(str, SIZES))}.
"""

KINDS: Final = {
    "_counter": "counter",
    "_counters": "counter",
    "CounterMetricFamily": "counter",
    "_gauge": "gauge",
    "_gauges": "gauge",
    "GaugeMetricFamily": "gauge",
    "_histogram": "histogram",
    "_histograms": "histogram",
}


class MetricDescription(NamedTuple):
    """A metric as the source declares it."""

    section: str
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def text() -> str:
    """Return the page."""
    listed = list(metrics())
    sections = list(dict.fromkeys(one.section for one in listed))
    return page(
        INTRODUCTION,
        *(f"## {section}\n\n{_table(listed, section)}" for section in sections),
        BUCKETS,
    )


def _table(listed: list[MetricDescription], section: str) -> str:
    rows = [
        [code(one.name), one.kind, ", ".join(map(code, one.labels)), one.meaning]
        for one in listed
        if one.section == section
    ]
    return table(["Metric", "Type", "Labels", "Meaning"], rows)


def metrics() -> Iterator[MetricDescription]:
    """Yield the metrics in the order of the source: those of one function are a section."""
    tree = ast.parse(Path(prometheus.__file__).read_text("utf-8"))
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
            continue
        section = function.name.replace("_", " ").capitalize()
        for node in ast.walk(function):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Call) and isinstance(called, ast.Name) and called.id in KINDS:
                yield _described(section, KINDS[called.id], node)


def _described(section: str, kind: str, call: ast.Call) -> MetricDescription:
    """Read a call: the name, the meaning and, for several series, the labels."""
    name = _text(call.args[0]).removeprefix(f"{prometheus.PREFIX}_")
    labels = [
        _text(label) for word in call.keywords if word.arg == "labels" for label in _items(word)
    ]
    if isinstance(call.func, ast.Name) and call.func.id in {"_counters", "_gauges", "_histograms"}:
        labels = [_text(call.args[2])]
    full = f"{prometheus.PREFIX}_{name}{'_total' if kind == 'counter' else ''}"
    return MetricDescription(section, full, kind, tuple(labels), _text(call.args[1]))


def _items(word: ast.keyword) -> list[ast.expr]:
    return word.value.elts if isinstance(word.value, ast.List) else []


def _text(node: ast.expr) -> str:
    """Return a literal; of an f-string, the text after the prefix."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))[
            1:
        ]
    return str(ast.literal_eval(node))
