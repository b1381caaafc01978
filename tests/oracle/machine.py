"""A hypothesis state machine that writes rooms, delivers them badly, and compares with the oracle.

To compare a store with the oracle: derive from `RoomMachine`, return the adapter of
`tests.oracle.facts.Subject` from `open_subject`, close it in `close_subject`, and pass the class
to `run_machine`.

Writing and delivering are apart: rooms grow on branches of a builder, and new events wait in
`undelivered` until a delivery picks them. So order, batch size and origin are free. Each run
switches some operations off (swarm testing): bugs that one kind of operation would hide need runs
without it.
"""

from contextlib import suppress
from typing import Any, Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from storage import EventFilter, SyncFilter
from storage.ids import RoomId
from tests.oracle.delivering_machine import DeliveringMachine
from tests.oracle.facts import differences
from tests.oracle.memberships import own_member_event
from tests.oracle.syncing import ANY_ROOM, plain_answer, sync
from tests.oracle.worlds import DEVICES, EVENT_FILTERS, USERS, pick


class RoomMachine(DeliveringMachine):
    """The whole machine: it also syncs, pages, and receives messages for devices."""

    # ----------------------------------------------------------------------------------------------
    # sync

    @precondition(lambda self: self.syncing)
    @rule(data=st.data(), limit=st.sampled_from([3, 100]))
    def sync(self, data: st.DataObject, limit: int) -> None:
        self._sync(pick(data, self.syncing), limit)

    def _sync(self, user: str, limit: int) -> None:
        expected = sync(self.oracle, user, self.clients[user].since, limit=limit)
        found = self.subject.sync(user, self.replays[user].since, limit, ANY_ROOM)
        for answer, client in ((expected, self.clients[user]), (found, self.replays[user])):
            client.hear(answer)
        lines = differences(plain_answer(expected), plain_answer(found))
        assert not lines, "\n".join(lines)
        for room_id, state in self.replays[user].states.items():
            lines = differences(
                {"replayed": self.oracle.current_state(room_id)}, {"replayed": state}
            )
            assert not lines, "\n".join(lines)

    @precondition(lambda self: self.syncing)
    @rule(
        data=st.data(),
        limit=st.sampled_from([1, 3, 100]),
        timeline=EVENT_FILTERS,
        state=EVENT_FILTERS,
        lazy=st.booleans(),
        leaves=st.booleans(),
    )
    def sync_some(
        self,
        data: st.DataObject,
        limit: int,
        timeline: EventFilter,
        state: EventFilter,
        *,
        lazy: bool,
        leaves: bool,
    ) -> None:
        """With a filter, or by a user who ignores others; nobody goes on from there."""
        user = pick(data, self.syncing)
        ignored = data.draw(st.lists(st.sampled_from(USERS), max_size=2, unique=True))
        rooms = st.none() | st.lists(
            st.sampled_from([*sorted(self.oracle.versions), RoomId("!unknown:s9.test")]), max_size=2
        )
        chosen, left_out = data.draw(rooms), data.draw(rooms)
        wanted = SyncFilter(
            rooms=chosen,
            not_rooms=left_out or (),
            timeline=timeline,
            state=state,
            lazy_load_members=lazy,
            include_leave=leaves,
        )
        is_new = data.draw(st.booleans())
        since, token = (
            (None, None) if is_new else (self.clients[user].since, self.replays[user].since)
        )
        expected = sync(self.oracle, user, since, limit=limit, wanted=wanted, ignored=ignored)
        lines = differences(
            plain_answer(expected),
            plain_answer(self.subject.sync(user, token, limit, wanted, ignored)),
        )
        assert not lines, "\n".join(lines)

    @precondition(lambda self: self.syncing and "invite" in self.writes)
    @rule(data=st.data(), is_new=st.booleans())
    def ignore_an_invite(self, data: st.DataObject, *, is_new: bool) -> None:
        """A user is invited and syncs while ignoring the inviter; nobody goes on from there."""
        branch = pick(data, self.branches)
        inviter, free = (
            branch.events[0].sender,
            [
                user
                for user in self.syncing
                if branch.membership(user) not in ("join", "ban", "invite")
            ],
        )
        if free and branch.membership(inviter) == "join":
            invited = pick(data, free)
            with suppress(ValueError):  # without the power to, meanwhile
                self.undelivered.append(branch.invite(inviter, invited))
        self.append(self.undelivered)
        for user in self.syncing:
            since, token = (
                (None, None) if is_new else (self.clients[user].since, self.replays[user].since)
            )
            expected = sync(self.oracle, user, since, ignored=[inviter])
            lines = differences(
                plain_answer(expected),
                plain_answer(self.subject.sync(user, token, 10, ANY_ROOM, [inviter])),
            )
            assert not lines, "\n".join(lines)

    @precondition(lambda self: "forget" in self.on and self.syncing)
    @rule(data=st.data(), comes_back=st.booleans(), leaves_again=st.booleans())
    def forget_a_room(self, data: st.DataObject, *, comes_back: bool, leaves_again: bool) -> None:
        """A user leaves, forgets the room, and perhaps comes back; nobody goes on from there."""
        branch, user = pick(data, self.branches), pick(data, self.syncing)
        if branch.membership(user) == "join":
            self.undelivered.append(branch.leave(user))
        self.append(self.undelivered)
        own = own_member_event(self.oracle, branch.room_id, user, self._now())
        if own is None or own.event.content.get("membership") not in ("leave", "ban"):
            return
        self.oracle.forgotten.add((branch.room_id, user))
        self.subject.forget(branch.room_id, user)
        self.compare(branch.room_id)
        self._compare_syncs(user)
        if comes_back:
            with suppress(ValueError):  # banned, or not invited
                self.undelivered.append(branch.join(user))
                if leaves_again:
                    self.undelivered.append(branch.leave(user))
            self.append(self.undelivered)
            self._compare_syncs(user)

    def _now(self) -> int:
        return max((held.arrival for held in self.oracle.held.values()), default=0)

    def _compare_syncs(self, user: str) -> None:
        for since, token in (
            (None, None),
            (self.clients[user].since, self.replays[user].since),
        ):
            expected = sync(self.oracle, user, since)
            lines = differences(
                plain_answer(expected),
                plain_answer(self.subject.sync(user, token, 10, ANY_ROOM)),
            )
            assert not lines, "\n".join(lines)

    @precondition(lambda self: self.syncing)
    @rule(
        data=st.data(),
        count=st.sampled_from([0, 1, 101]),
        receives=st.booleans(),
        lost=st.booleans(),
    )
    def send_to_device(
        self, data: st.DataObject, count: int, *, receives: bool, lost: bool
    ) -> None:
        """Sometimes more than a page.

        A device that brings its token gets what waits for it; if the answer is lost, it brings the
        token again.
        """
        user, device, first = (
            pick(data, self.syncing),
            pick(data, DEVICES),
            self.oracle.inboxes.last,
        )
        for subject in (self.oracle.inboxes, self.subject):
            subject.send(user, device, [str(first + number) for number in range(count)])
        if receives or count > 1:
            since, token = self.received.get((user, device), (None, None))
            expected, upto = self.oracle.inboxes.receive(user, device, since)
            found, reached = self.subject.receive(user, device, token)
            assert found == expected
            if not lost:
                self.received[user, device] = upto, reached

    @precondition(lambda self: self.syncing and self.compared)
    @rule(data=st.data(), wanted=EVENT_FILTERS, direction=st.sampled_from(["b", "f"]))
    def page_some(
        self, data: st.DataObject, wanted: EventFilter, direction: Literal["b", "f"]
    ) -> None:
        """A room with a filter, between where two clients are, or from end to end."""
        user, room_id = pick(data, self.syncing), pick(data, sorted(self.compared))
        ends = [data.draw(st.none() | st.sampled_from(self.syncing)) for _ in range(2)]
        since, upto = (None if end is None else self.clients[end].since for end in ends)
        tokens = [None if end is None else self.replays[end].since for end in ends]
        expected = self.oracle.between(
            room_id, user, since=since, upto=upto, direction=direction, wanted=wanted
        )
        found = self.subject.between(room_id, user, (tokens[0], tokens[1], direction), wanted)
        assert found == expected

    def teardown(self) -> None:
        """Deliver the rest; then every event has the state before it that its builder knows."""
        if not hasattr(self, "subject"):
            return
        try:
            self.compared.clear()
            if "odd" in self.on and self.delivered:
                self.deliver_hostile()
            self.append(self.undelivered)
            assert not self.undelivered
            for room_id in set(self.oracle.versions) - set(self.compared):
                self.compare(room_id)
            for event in self.delivered:
                assert self.oracle.state_before(event.event_id) == dict(event.state_before)
        finally:
            self.close_subject(self.subject)


class AbsenceMachine(RoomMachine):
    """With members of this server who come, go and come back over other servers."""

    @precondition(lambda self: "after a gap" in self.on and self.syncing)
    @rule(data=st.data(), count=st.integers(0, 4), limit=st.sampled_from([3, 100]))
    def absence(self, data: st.DataObject, count: int, limit: int) -> None:
        """Let a user be away, then join over another server.

        The user leaves or was never there, and this server gets no event in between.
        """
        branch, user = pick(data, self.branches), pick(data, self.syncing)
        if branch.membership(user) == "join":
            self.undelivered.append(branch.leave(user))
            self._deliver_after_a_gap(self.undelivered[-1])
        self._sync(user, limit)
        for _ in range(count):
            self._write_something(data, branch)
        with suppress(ValueError):  # not invited, or banned meanwhile
            self.undelivered.append(branch.join(user))
            self._deliver_after_a_gap(self.undelivered[-1])
            if data.draw(st.booleans()):  # for a short visit
                self.undelivered.append(branch.leave(user))
                self._deliver_after_a_gap(self.undelivered[-1])
            self._sync(user, limit)


def run_machine(machine: type[RoomMachine], *, examples: int, steps: int = 30, **more: Any) -> None:
    """Run it; `more` are settings of hypothesis."""
    chosen: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), **more}
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, **chosen)
    )
