"""The answers to each question in the simplest code: a list of events, and counting."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import orjson
from deltalake import DeltaTable

Row = dict[str, Any]


def events_of(folder: Path) -> list[Row]:
    """The rows of the mirror, with the JSON of each, and its server."""
    rows = DeltaTable(folder / "events").to_pyarrow_table().to_pylist()
    for row in rows:
        row["json"] = orjson.loads(row["pdu"])
        row["server"] = row["sender"].split(":", 1)[1]
        row["accepted"] = row["rejected"] is None and not row["soft_failed"]
    return sorted(rows, key=lambda row: row["arrived"])


def is_message(row: Row) -> bool:
    is_text = row["type"] in {"m.room.message", "m.room.encrypted"}
    return is_text and row["accepted"] and not row["redacted"]


def activity(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    grouped = grouping(events, "day", "room_id", "server")
    for (day, room_id, server), rows in grouped.items():
        sent = [row["sender"] for row in rows if is_message(row)]
        yield day, room_id, server, len(sent), len(set(sent)), len(rows)


def retention(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    active = defaultdict(set)
    for row in filter(is_message, events):
        week = row["day"] - timedelta(days=row["day"].weekday())
        for name in (("all", ""), ("server", row["server"]), ("room", row["room_id"])):
            active[week, *name].add(row["sender"])
    for (week, scope, name), users in active.items():
        again = users & active.get((week + timedelta(days=7), scope, name), set())
        yield week, scope, name, len(users), len(again)


def joins(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    joined = defaultdict(set)
    for row in events:
        is_join = row["type"] == "m.room.member" and row["json"]["content"]["membership"] == "join"
        if is_join and row["accepted"] and row["origin"] == "live":
            joined[row["received_ts"] // 60_000, row["room_id"]].add(row["state_key"])
    for (minute, room_id), users in joined.items():
        if len(users) > 1:
            servers = {user.split(":", 1)[1] for user in users}
            yield minute * 60, room_id, len(users), len(servers)


def bodies(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    texts = defaultdict(list)
    for row in events:
        body = row["json"]["content"].get("body")
        if row["type"] == "m.room.message" and is_message(row) and isinstance(body, str):
            texts[row["day"], body].append(row)
    for (day, body), rows in texts.items():
        if len(body) >= 10 and len(rows) >= 3:
            example = min(row["event_id"] for row in rows)
            yield day, example, len(rows), distinct(rows, "sender"), distinct(rows, "room_id")


def fan_out(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    grouped = grouping(filter(is_message, events), "day", "sender")
    for (day, sender), rows in grouped.items():
        yield day, sender, distinct(rows, "room_id"), len(rows)


def redactions(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    for (sender,), rows in grouping(events, "sender").items():
        sent = [r for r in rows if r["state_key"] is None and r["type"] != "m.room.redaction"]
        redacted = [row for row in sent if row["redacted"]]
        if len(sent) >= 20:
            yield sender, len(sent), len(redacted), round(len(redacted) / len(sent), 3)


def servers(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    live = [row for row in events if row["origin"] == "live"]
    for rows in grouping(live, "day", "room_id").values():
        for at, row in enumerate(rows):
            row["forks"] = any(
                one["topological_ordering"] >= row["topological_ordering"] for one in rows[:at]
            )
    for (day, server), rows in grouping(live, "day", "server").items():
        lags = sorted(row["received_ts"] - row["origin_server_ts"] for row in rows)
        yield (
            day,
            server,
            len(rows),
            percentile(lags, 0.5),
            percentile(lags, 0.95),
            sum(row["forks"] for row in rows),
            sum(row["prev_count"] > 1 for row in rows),
            sum(not row["accepted"] for row in rows),
        )


def percentile(ordered: list[int], share: float) -> int:
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return math.trunc(low + (high - low) * (place - math.floor(place)))


def media(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    for row in events:
        for url in urls_in(row["json"]):
            yield url, row["day"], row["event_id"], row["room_id"], row["sender"]


def urls_in(value: Any) -> set[str]:
    """Each text of the JSON from mxc:// on, as far as a URL goes."""
    if isinstance(value, dict):
        return set().union(*(urls_in(one) for pair in value.items() for one in pair))
    if isinstance(value, list):
        return set().union(*map(urls_in, value))
    found = set()
    for part in value.split("mxc://")[1:] if isinstance(value, str) else ():
        server, slash, rest = part.partition("/")
        name = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else " " for c in rest)
        if slash and server and name.split(" ")[0] and not set('"<> ') & set(server):
            found.add(f"mxc://{server}/{name.split(' ')[0]}")
    return found


def growth(events: list[Row]) -> Iterable[tuple[Any, ...]]:
    counts: Counter[date] = Counter()
    sizes: Counter[date] = Counter()
    for row in events:
        counts[row["day"]] += 1
        sizes[row["day"]] += len(row["pdu"])
    for day, number in counts.items():
        yield day, number, sizes[day], False
    last = max(counts)
    first = max(min(counts), last - timedelta(days=28))
    days = [first + timedelta(days=n) for n in range(max((last - first).days, 1))]
    for ahead in range(1, 91):
        of = [round(max(line(days, last, one, ahead), 0)) for one in (counts, sizes)]
        yield last + timedelta(days=ahead), *of, True


def line(days: list[date], last: date, values: Counter[date], ahead: int) -> float:
    """The value of the least squares' line so many days after the last."""
    xs = [(day - last).days for day in days]
    mean_x, mean_y = sum(xs) / len(xs), sum(values[day] for day in days) / len(days)
    square = sum((x - mean_x) ** 2 for x in xs)
    both = sum((x - mean_x) * (values[d] - mean_y) for x, d in zip(xs, days, strict=True))
    return mean_y + (both / square if square else 0) * (ahead - mean_x)


def grouping(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def distinct(rows: list[Row], name: str) -> int:
    return len({row[name] for row in rows})


ORACLE: Final[dict[str, Callable[[list[Row]], Iterable[tuple[Any, ...]]]]] = {
    one.__name__: one
    for one in (
        activity,
        retention,
        joins,
        bodies,
        fan_out,
        redactions,
        servers,
        media,
        growth,
    )
}
