"""The chain cover of ten state events, computed by storage/graph/chains.py."""

from typing import Final, NamedTuple

from immutables import Map

from docs.pictures.canvas import AMBER, BLUE, RED, TEAL, VIOLET, Canvas
from storage.graph import chains
from storage.graph.chains import Chain, ChainEntry, ChainParent, ChainPosition, Closure


class StateEvent(NamedTuple):
    """An event of the example: its state key, and its auth events by number."""

    key: str
    auth_events: tuple[int, ...]


EVENTS: Final = (
    StateEvent("create", ()),
    StateEvent("@alice", (1,)),
    StateEvent("power", (1, 2)),
    StateEvent("join rules", (1, 2, 3)),
    StateEvent("@bob", (1, 3, 4)),
    StateEvent("power", (1, 2, 3)),
    StateEvent("@carol", (1, 4, 6)),
    StateEvent("@bob", (1, 5, 6)),
    StateEvent("join rules", (1, 2, 4, 6)),
    StateEvent("@bob", (1, 8, 6, 9)),
)
TONES: Final = (BLUE, TEAL, AMBER, VIOLET)


class Covered(NamedTuple):
    """The entry of each event, and its closure."""

    entries: dict[int, ChainEntry]
    closures: dict[int, Closure]


def cover() -> Covered:
    """Return the chain cover of the ten events; event and chain numbers begin at 1."""
    entries: dict[int, ChainEntry] = {}
    closures: dict[int, Closure] = {}
    known: dict[int, Chain] = {}
    for number, event in enumerate(EVENTS, 1):
        before = next((a for a in event.auth_events if EVENTS[a - 1].key == event.key), None)
        position = None if before is None else entries[before].position
        chain = None if position is None else known[position.chain_nid]
        parents = [
            ChainParent(a, entries[a].position, EVENTS[a - 1].auth_events)
            for a in event.auth_events
        ]
        entry = chains.enter(position, chain, len(known) + 1, parents)
        entries[number] = entry
        known[entry.position.chain_nid] = chains.extended(
            known.get(entry.position.chain_nid), entry
        )
        closures[number] = (
            chains.closure_of([(entries[a].position, closures[a]) for a in event.auth_events])
            or Map()
        )
    return Covered(entries, closures)


def draw() -> Canvas:
    """Return a line for each chain, a dot for each event, and an arrow for each link."""
    covered = cover()
    names = {
        entry.position.chain_nid: EVENTS[number - 1].key
        for number, entry in covered.entries.items()
    }
    canvas = Canvas(760, 130 + 64 * len(names), "Ten state events on six chains")
    for chain_nid, name in names.items():
        y = _y(chain_nid)
        canvas.text(20, y + 5, f"{chain_nid}  {name}", size=13.5)
        numbers = [n for n, e in covered.entries.items() if e.position.chain_nid == chain_nid]
        canvas.line((_x(numbers[0]), y), (_x(numbers[-1]), y), colour="#93a1ad", width=3)
    for number, entry in covered.entries.items():
        for chain_nid, sequence in entry.links.items():
            _link(canvas, covered, number, ChainPosition(chain_nid, sequence))
    for number, entry in covered.entries.items():
        canvas.dot(
            _x(number), _y(entry.position.chain_nid), TONES[entry.position.sequence_number - 1], 13
        )
        canvas.text(
            _x(number),
            _y(entry.position.chain_nid) + 5,
            str(number),
            size=13,
            anchor="middle",
            bold=True,
        )
    _caption(canvas, covered, 64 * len(names) + 50)
    return canvas


def _link(canvas: Canvas, covered: Covered, number: int, target: ChainPosition) -> None:
    found = next(n for n, e in covered.entries.items() if e.position == target)
    start = _x(number), _y(covered.entries[number].position.chain_nid)
    end = _x(found), _y(target.chain_nid)
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    near = 22 / length
    tip = end[0] + (start[0] - end[0]) * near, end[1] + (start[1] - end[1]) * near
    canvas.arrow(start, tip, colour=RED.stroke)


def _caption(canvas: Canvas, covered: Covered, y: float) -> None:
    links = sum(len(entry.links) for entry in covered.entries.values())
    edges = sum(len(event.auth_events) for event in EVENTS)
    last, other = len(EVENTS), 7
    closure = ", ".join(
        f"{chain} up to {upto}" for chain, upto in sorted(covered.closures[last].items())
    )
    position = covered.entries[other].position
    reached = chains.reaches(covered.closures[last], position)
    canvas.caption(
        y,
        f"{edges} auth references need {links} links (red). The rest is implied.",
        f"Closure of event {last}, by chain: {closure}.",
        f"Event {other} is on chain {position.chain_nid}: event {last} "
        f"{'reaches' if reached else 'does not reach'} it.",
    )


def _x(number: int) -> float:
    return 150 + (number - 1) * 64


def _y(chain_nid: int) -> float:
    return 40 + (chain_nid - 1) * 64
