"""The half of the machine that writes rooms and delivers them, and compares what is stored."""

import itertools
import json
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from storage.ids import EventId, RoomId
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.facts import Audience, Facts, Subject, differences, oracle_facts, order_violations
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import Origin
from tests.oracle.syncing import OracleClient, remember
from tests.oracle.worlds import (
    AUDIENCE,
    DELIVERIES,
    JUNK,
    ODDITIES,
    RELATIONS,
    USERS,
    VERSIONS,
    WRITES,
    deepest,
    pick,
    shuffled,
)
from tests.persist.hostile_pdus import (
    bad_unsigned,
    long_key,
    no_user,
    odd_numbers,
    of_another,
    of_itself,
)

HOSTILE = of_itself, of_itself, of_another, long_key, no_user, odd_numbers
HOSTILE_AT_LAST = 6


class DeliveringMachine(RuleBasedStateMachine):
    """One or two rooms of one or two versions, five users on three servers, oracle, subject."""

    versions: ClassVar[Sequence[str]] = VERSIONS
    audience: ClassVar[Audience] = AUDIENCE
    syncing: ClassVar[Sequence[str]] = USERS[:3]
    always: ClassVar[frozenset[str]] = frozenset()  # of the deliveries and oddities
    never: ClassVar[frozenset[str]] = frozenset()
    extremities_max: ClassVar[int | None] = None
    local_server: ClassVar[str] = "s2.test"
    seeds: ClassVar[st.SearchStrategy[int]] = st.just(0)
    seed = 0  # of the example's first room

    def open_subject(self) -> Subject:
        """A new, empty subject."""
        raise AssertionError("derive a machine that opens one")

    def close_subject(self, subject: Subject) -> None:
        """Free what it holds."""

    @initialize(
        data=st.data(),
        rooms=st.integers(1, 2),
        writes=st.sets(st.sampled_from(sorted(WRITES)), min_size=4).map(sorted),
        others=st.sets(st.sampled_from([*DELIVERIES, *ODDITIES])),
    )
    def begin(self, data: st.DataObject, rooms: int, writes: list[str], others: set[str]) -> None:
        versions = [data.draw(st.sampled_from(self.versions))]
        if rooms > 1:  # often one whose room id is made of its create event
            versions.append(data.draw(st.just(self.versions[-1]) | st.sampled_from(self.versions)))
        self.seed = data.draw(self.seeds)
        self.oracle, self.subject = Oracle(), self.open_subject()
        self.oracle.extremities_max = self.extremities_max
        self.oracle.local_server = self.local_server
        self.writes, self.on = writes, (others | self.always) - self.never
        self.calls = 0
        self.branches: list[RoomBuilder] = []
        self.delivered: list[BuiltEvent] = []
        self.had_gaps: set[RoomId] = set()
        self.compared: dict[RoomId, set[EventId]] = {}
        self.clients = {user: OracleClient(user) for user in self.syncing}
        self.replays = {user: OracleClient(user) for user in self.syncing}
        self.received: dict[tuple[str, str], tuple[int, Any]] = {}
        for number, version in enumerate(versions):
            room = RoomBuilder(version, seed=self.seed + number, sign=False)
            room.start(
                USERS[number],
                join_rule="public",
                users={USERS[2]: 50} if data.draw(st.booleans()) else None,
            )
            for user in USERS[: data.draw(st.integers(0, 4))]:
                room.join(user)
            self.branches.append(room)
        in_turn = itertools.chain.from_iterable(
            itertools.zip_longest(*(room.events for room in self.branches))
        )
        self.undelivered = [
            event for event in in_turn if event is not None
        ]  # so that batches hold both rooms

    # ----------------------------------------------------------------------------------------------
    # writing

    @rule(data=st.data(), count=st.integers(1, 4))
    def write(self, data: st.DataObject, count: int) -> None:
        branch = pick(data, self.branches)
        for _ in range(count):
            self._write_something(data, branch)

    def _write_something(self, data: st.DataObject, branch: RoomBuilder) -> None:
        """One event; what its own state does not allow is written as refused, or not at all."""
        one, other = pick(data, USERS), pick(data, USERS)
        action = WRITES[data.draw(st.sampled_from(self.writes))]
        how: dict[str, Any] = {}
        if "depth" in self.on and data.draw(st.booleans()):
            most = deepest(branch.version)
            how["depth"] = data.draw(
                st.sampled_from([1, 2, 9999, most, most - 1, 0, -1, -most])
                | st.integers(-most, most)
            )
        if "clock" in self.on and data.draw(st.booleans()):
            how["ts"] = 1_700_000_000_000 + data.draw(st.integers(-5, 5))
        if "damage" in self.on and data.draw(st.integers(0, 3)) == 0:
            how["damage"] = "content_hash"
        self._write(lambda more: action(branch, one, other, {**how, **more}))

    def _write(self, action: Callable[[dict[str, Any]], BuiltEvent]) -> None:
        try:
            self.undelivered.append(action({}))
        except ValueError:
            if "refused" in self.on:
                self.undelivered.append(action({"expected": "rejected"}))

    @precondition(lambda self: "redact" in self.on)
    @rule(data=st.data(), one=st.sampled_from(USERS), refused=st.booleans())
    def redact(self, data: st.DataObject, one: str, *, refused: bool) -> None:
        """Pick any event or, to get enough of them, a rejected or soft-failed one.

        A user with enough power acts on it.
        """
        branch = pick(data, self.branches)
        targets = self._refused_in(branch) if refused else []
        if refused and not targets and "refused" in self.on and branch.membership(one) != "join":
            self.undelivered.append(branch.message(one, expected="rejected"))
            self.append(self.undelivered)
            targets = self._refused_in(branch)
        target = pick(data, targets or branch.events)
        self._write(
            lambda more: branch.redact(branch.events[0].sender if targets else one, target, **more)
        )

    def _refused_in(self, branch: RoomBuilder) -> list[BuiltEvent]:
        held = {
            event_id
            for event_id, known in self.oracle.held.items()
            if known.rejected or known.soft_failed
        }
        return [event for event in branch.events if event.event_id in held]

    @precondition(lambda self: "relate" in self.on)
    @rule(
        data=st.data(),
        one=st.sampled_from(USERS),
        rel_type=st.sampled_from(RELATIONS),
        edits=st.booleans(),
    )
    def relate(self, data: st.DataObject, one: str, rel_type: str, *, edits: bool) -> None:
        """Send a message that relates to any event of any room and branch, earlier or later."""
        branch = pick(data, self.branches)
        target = pick(data, [event for other in self.branches for event in other.events])
        content = {"body": "*", "m.relates_to": {"rel_type": rel_type, "event_id": target.event_id}}
        content |= {"m.new_content": {"body": ""}} if edits else {}
        self._write(lambda more: branch.send(one, "m.room.message", content, **more))

    @precondition(lambda self: "fork" in self.on and len(self.branches) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A branch from where another is, or from any event of the past."""
        branch = pick(data, self.branches)
        roots = [event for event in branch.events if event.expected != "rejected"]
        self.branches.append(
            branch.at(pick(data, roots)) if data.draw(st.booleans()) else branch.fork(1)[0]
        )

    @precondition(lambda self: "fork" in self.on)
    @rule(data=st.data(), left=st.integers(1, 3), right=st.integers(1, 3))
    def fork_and_merge(self, data: st.DataObject, left: int, right: int) -> None:
        branch = pick(data, self.branches)
        side = branch.fork(1)[0]
        for one, count in ((side, left), (branch, right)):
            for _ in range(count):
                self._write_something(data, one)
        self._merge(branch, side)

    @precondition(lambda self: len(self.branches) > 2)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        one, other = shuffled(data, self.branches)[:2]
        if one.graph is other.graph:
            self.branches = [branch for branch in self.branches if branch is not other]
            self._merge(one, other)

    def _merge(self, one: RoomBuilder, other: RoomBuilder) -> None:
        """The next event has the heads of both as parents, and is by whoever may speak."""
        one.merge(other)
        speaker = next((user for user in USERS if one.membership(user) == "join"), USERS[0])
        self._write(lambda more: one.message(speaker, **more))

    # ----------------------------------------------------------------------------------------------
    # delivering

    def append(
        self,
        events: Iterable[BuiltEvent],
        origin: Origin = "live",
        given: Mapping[EventId, list[EventId]] | None = None,
        refused: Mapping[EventId, str] | None = None,
    ) -> None:
        events = list(events)
        self._append(
            [event.pdu for event in events],
            origin,
            given,
            version=self._named_version(events),
            refused=refused,
        )
        self._note(events)

    def _note(self, events: Sequence[BuiltEvent]) -> None:
        stored = {event.event_id for event in events if self.oracle.in_timeline(event.event_id)}
        self.delivered += [event for event in self.undelivered if event.event_id in stored]
        self.undelivered = [event for event in self.undelivered if event.event_id not in stored]
        for room_id in {event.room_id for event in events} & set(self.oracle.versions):
            self.compare(room_id)

    def _named_version(self, events: Sequence[BuiltEvent]) -> str | None:
        """Return the version that the caller names, or None.

        With one unknown room it is that room's version. Where it must not matter, it is any
        version or None.
        """
        self.calls += 1
        known = self.oracle.versions.keys() | {
            event.room_id for event in events if event.type == "m.room.create"
        }
        unknown = {self._builder(event).version for event in events if event.room_id not in known}
        if self.calls % 4 == 0 or len(unknown) > 1:
            return None
        return unknown.pop() if unknown else VERSIONS[self.calls % len(VERSIONS)]

    def _append(
        self,
        pdus: Sequence[bytes],
        origin: Origin,
        given: Mapping[EventId, list[EventId]] | None,
        *,
        version: str | None,
        refused: Mapping[EventId, str] | None = None,
        odd: Sequence[bytes] | None = None,
    ) -> None:
        """Append PDUs to both. ``odd``: the forms of them that the subject gets."""
        how: dict[str, Any] = {
            "room_version": version,
            "origin": origin,
            "state_before": given,
            "refused": refused,
        }
        before = max((held.arrival for held in self.oracle.held.values()), default=0)
        expected = self.oracle.append(pdus, **how)
        remember(self.oracle, before)
        found = self.subject.append(odd or pdus, **how)
        lines = [
            f"outcome of {one}: found {other}"
            for one, other in zip(expected, found, strict=True)
            if one != other
        ]
        assert not lines, "\n".join(lines)

    def compare(self, room_id: RoomId) -> None:
        if self.oracle.backward_extremities(room_id):
            self.had_gaps.add(room_id)
        positions = self.subject.positions(room_id)
        lines = order_violations(
            self.oracle, room_id, positions, exact=room_id not in self.had_gaps
        )
        assert not lines, "\n".join(lines)
        self.oracle.positions = {**self.oracle.positions, **positions}
        known = self.compared.get(room_id, set())
        lines = differences(
            self.expected(room_id, known), self.subject.facts(room_id, self.audience, known)
        )
        assert not lines, "\n".join(lines)
        self.compared[room_id] = set(self.oracle.timeline(room_id))

    def expected(self, room_id: RoomId, known: Collection[EventId]) -> Facts:
        """Return the facts that the subject must report."""
        return oracle_facts(self.oracle, room_id, self.audience, known)

    @precondition(lambda self: self.undelivered)
    @rule(size=st.integers(1, 8))
    def deliver(self, size: int) -> None:
        """In the order of writing."""
        self.append(self.undelivered[:size])

    @precondition(lambda self: "shuffled" in self.on and self.undelivered)
    @rule(data=st.data(), size=st.integers(1, 8))
    def deliver_shuffled(self, data: st.DataObject, size: int) -> None:
        """Any events in any order; what has no parents yet stays undelivered."""
        self.append(shuffled(data, self.undelivered)[:size])

    @precondition(lambda self: "again" in self.on and self.delivered)
    @rule(data=st.data(), origin=st.sampled_from(["live", "backfill", "outlier"]))
    def deliver_again(self, data: st.DataObject, origin: Origin) -> None:
        some = [pick(data, self.delivered) for _ in range(data.draw(st.integers(1, 4)))]
        self.append([*some, *self.undelivered[:1], *some], origin)

    @precondition(lambda self: "fetched" in self.on and self.undelivered)
    @rule(data=st.data())
    def deliver_outlier(self, data: st.DataObject) -> None:
        """An event with its auth chain, as when an invite arrives or a state is fetched."""
        event = pick(data, self.undelivered)
        self.append(
            [*self._with_auth_chains([event.event_id], self._builder(event)), event], "outlier"
        )

    @precondition(lambda self: "after a gap" in self.on and self.undelivered)
    @rule(data=st.data())
    def deliver_after_a_gap(self, data: st.DataObject) -> None:
        """An event whose parents are not held, with the state before it, fetched as outliers."""
        self._deliver_after_a_gap(pick(data, self.undelivered))

    def _deliver_after_a_gap(self, event: BuiltEvent) -> None:
        builder = self._builder(event)
        state = list(event.state_before.values())
        fetched = {
            *self._with_auth_chains([event.event_id, *state], builder),
            *(builder.event(event_id) for event_id in state),
        }
        self.append([other for other in builder.events if other in fetched], "outlier")
        self.append([event], given={event.event_id: state})

    @precondition(lambda self: "backfill" in self.on and self.undelivered)
    @rule(size=st.integers(1, 8))
    def deliver_backfill(self, size: int) -> None:
        self.append(self.undelivered[:size], "backfill")

    @precondition(
        lambda self: (
            "backfill" in self.on and "depth" not in self.on and self.undelivered and self.compared
        )
    )
    @rule(data=st.data(), size=st.integers(1, 8))
    def backfill_and_page_on(self, data: st.DataObject, size: int) -> None:
        """A reader who has paged back to a gap goes on from there once some of it is filled.

        With false depths events may land above that.
        """
        user, room_id = pick(data, self.audience.users), pick(data, sorted(self.compared))
        below, at = (
            self.oracle.page_back(room_id, user)[1],
            self.subject.page_back(room_id, user, None)[1],
        )
        self.append(self.undelivered[:size], "backfill")
        if below is not None and at is not None:
            assert (
                self.subject.page_back(room_id, user, at)[0]
                == self.oracle.page_back(room_id, user, below)[0]
            )

    @precondition(lambda self: "verdicts" in self.on and self.undelivered)
    @rule(data=st.data(), size=st.integers(1, 8), later=st.integers(0, 8), backfill=st.booleans())
    def deliver_refused(
        self, data: st.DataObject, size: int, later: int, *, backfill: bool
    ) -> None:
        """The caller refuses some of the events, and perhaps readmits one of them."""
        events, readmits = self.undelivered[:size], data.draw(st.booleans())
        some = [one.event_id for one in events if data.draw(st.booleans())]
        origin: Origin = "backfill" if backfill and "backfill" in self.on else "live"
        self.append(events, origin, refused=dict.fromkeys(some, "spam"))
        refused = [one for one in self.delivered if self.oracle.held[one.event_id].refused]
        if refused and readmits:
            self.append(self.undelivered[:later])
            self._readmit(pick(data, refused))

    @precondition(lambda self: "verdicts" in self.on and self.delivered)
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        """Any event: most are accepted already."""
        self._readmit(pick(data, self.delivered))

    def _readmit(self, event: BuiltEvent) -> None:
        expected = self.oracle.readmit(event.event_id)
        assert self.subject.readmit(event.event_id) == expected
        self.compared.get(event.room_id, set()).discard(event.event_id)
        self.compare(event.room_id)

    @precondition(lambda self: "junk" in self.on)
    @rule(junk=st.lists(st.sampled_from(JUNK), min_size=1, max_size=3))
    def deliver_junk(self, junk: list[bytes]) -> None:
        self._append(
            [*junk, *(event.pdu for event in self.delivered[-1:]), *junk],
            "live",
            None,
            version=None,
        )

    @precondition(lambda self: "odd" in self.on and self.undelivered)
    @rule(size=st.integers(1, 6), seed=st.integers(0, 2**32))
    def deliver_odd(self, size: int, seed: int) -> None:
        """Good events, of which some have a bad `unsigned`, among those of a hostile server.

        The oracle gets the good ones without `unsigned`.
        """
        rng = random.Random(seed)
        events = self.undelivered[:size]
        pairs: list[tuple[bytes, bytes]] = []  # of the oracle, of the subject
        for event in events:
            for _ in range(rng.randint(0, 2) if self.delivered else 0):
                hostile = self._hostile(rng)
                pairs.append((hostile, hostile))
            odd = bad_unsigned(rng, dict(event.json)) if rng.random() < 0.5 else event.pdu
            pairs.append((event.pdu, odd))
        version = self._named_version(events)
        plain, odd_forms = ([pair[place] for pair in pairs] for place in (0, 1))
        self._append(plain, "live", None, version=version, odd=odd_forms)
        self._note(events)

    def deliver_hostile(self) -> None:
        """Some events of a hostile server: no draw, as each world has them at its end."""
        rng = random.Random(self.calls)
        pdus = [self._hostile(rng) for _ in range(HOSTILE_AT_LAST)]
        self._append(pdus, "live", None, version=None)

    def _hostile(self, rng: random.Random) -> bytes:
        """Return a hostile event of the room of a delivered one, whose place it has."""
        base = rng.choice(self.delivered)
        pdu = dict(base.json)
        if "event_id" in pdu:
            pdu["event_id"] = f"$odd{rng.getrandbits(64)}:s3.test"
        ids = [event.event_id for event in self.delivered if event.room_id == base.room_id]
        version = self._builder(base).version
        form = rng.choice(HOSTILE)
        return json.dumps(form(rng, pdu, version, ids)).encode()

    def _builder(self, event: BuiltEvent) -> RoomBuilder:
        return next(branch for branch in self.branches if branch.room_id == event.room_id)

    def _with_auth_chains(self, ids: Iterable[EventId], builder: RoomBuilder) -> list[BuiltEvent]:
        chain = builder.graph.auth_chain(list(ids))
        return [event for event in builder.events if event.event_id in chain]
