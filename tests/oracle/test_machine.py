"""The machine against the oracle itself.

It runs with a correct oracle, with one that takes one PDU at a time, and with each of some
well-known mistakes. A machine that does not notice a mistake is a defect of the machine.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase

from storage import EventFilter, SyncFilter
from storage.errors import InvalidEvent
from storage.event import Event, parse, peek
from storage.ids import EventId, RoomId
from tests.long_run import long_run
from tests.oracle.facts import Audience, Facts, Stretch, oracle_facts
from tests.oracle.inboxes import Inboxes
from tests.oracle.machine import RoomMachine, run_machine
from tests.oracle.oracle import Oracle, Position
from tests.oracle.receiver import UNREADABLE
from tests.oracle.room_graph import (
    OracleEvent,
    Origin,
    Outcome,
    State,
    in_causal_order,
    version_of,
)
from tests.oracle.syncing import Answer, remember, sync

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "10"))


class OracleSubject:
    """An oracle in the place of a store."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def append(
        self,
        pdus: Sequence[bytes],
        *,
        room_version: str | None,
        origin: Origin,
        state_before: Mapping[EventId, Sequence[EventId]] | None,
        refused: Mapping[EventId, str] | None = None,
    ) -> list[tuple[EventId | None, Outcome]]:
        before = max((held.arrival for held in self.oracle.held.values()), default=0)
        results = self.oracle.append(
            pdus,
            room_version=room_version,
            origin=origin,
            state_before=state_before,
            refused=refused,
        )
        remember(self.oracle, before)
        return results

    def forget(self, room_id: RoomId, user_id: str) -> None:
        self.oracle.forgotten.add((room_id, user_id))

    def readmit(self, event_id: EventId) -> Outcome:
        return self.oracle.readmit(event_id)

    def positions(self, room_id: RoomId) -> dict[EventId, Position]:
        timeline = self.oracle.timeline(room_id)
        return {event_id: self.oracle.position(event_id) for event_id in timeline}

    def facts(self, room_id: RoomId, audience: Audience, known: Collection[EventId] = ()) -> Facts:
        return oracle_facts(self.oracle, room_id, audience, known)

    def sync(
        self,
        user_id: str,
        since: Any | None,
        limit: int,
        wanted: SyncFilter,
        ignored: Collection[str] = (),
    ) -> Answer:
        return sync(self.oracle, user_id, since, limit=limit, wanted=wanted, ignored=ignored)

    def send(self, user_id: str, device_id: str, bodies: Sequence[str]) -> None:
        self.oracle.inboxes.send(user_id, device_id, bodies)

    def receive(self, user_id: str, device_id: str, since: Any | None) -> tuple[list[str], Any]:
        return self.oracle.inboxes.receive(user_id, device_id, since)

    def between(
        self, room_id: RoomId, user_id: str, stretch: Stretch, wanted: EventFilter
    ) -> list[EventId]:
        since, upto, direction = stretch
        return self.oracle.between(
            room_id, user_id, since=since, upto=upto, direction=direction, wanted=wanted
        )

    def page_back(
        self, room_id: RoomId, user_id: str, at: EventId | None
    ) -> tuple[list[EventId], EventId | None]:
        return self.oracle.page_back(room_id, user_id, at)


def machine_with(
    oracle: type[Oracle], always: frozenset[str] = frozenset(), never: frozenset[str] = frozenset()
) -> type[RoomMachine]:
    class Machine(RoomMachine):
        def open_subject(self) -> OracleSubject:
            return OracleSubject(oracle())

    Machine.always, Machine.never = always, never
    return Machine


class OneByOne(Oracle):
    """Append every PDU by its own call, in the batch's causal order: nothing else may change."""

    def append(self, pdus: Iterable[Any], **how: Any) -> list[tuple[EventId | None, Outcome]]:
        batch = list(pdus)
        events: dict[int, Event] = {}
        versions = {**self._versions_in(batch), **self.versions}
        for place, pdu in enumerate(batch):
            with suppress(InvalidEvent, *UNREADABLE):
                events[place] = parse(pdu, version_of(pdu, versions, how["room_version"]))
        answers = {
            place: super(OneByOne, self).append([batch[place]], **how)[0]
            for place in in_causal_order(events)
        }
        return [
            answers.get(place) or super(OneByOne, self).append([pdu], **how)[0]
            for place, pdu in enumerate(batch)
        ]


class TakesAnyCreateEvent(Oracle):
    """Give an unknown room the version of the first create event of the batch.

    So also in each room of version 12.
    """

    def append(
        self, pdus: Iterable[Any], *, room_version: str | None = None, **how: Any
    ) -> list[tuple[EventId | None, Outcome]]:
        batch = list(pdus)
        said = [
            one["content"].get("room_version", "1")
            for one in map(json.loads, batch)
            if one.get("type") == "m.room.create"
        ]
        return super().append(batch, room_version=next(iter(said), room_version), **how)

    def _versions_in(self, batch: Sequence[Any]) -> dict[RoomId, str]:
        return {
            room_id: version
            for room_id, version in super()._versions_in(batch).items()
            if version != "12"
        }


class LastParentWins(Oracle):
    """No state resolution."""

    def _resolve(self, version: str, states: Sequence[State]) -> State:
        del version
        return states[-1] if states else {}


class IgnoresTheCurrentState(Oracle):
    """No soft failure."""

    def _hold(
        self, event: Event, origin: Origin, state: State | None, refused: str | None = None
    ) -> Outcome:
        outcome = super()._hold(event, origin, state, refused)
        self.held[event.event_id].soft_failed = False
        return outcome


class TrustsTheDepth(Oracle):
    """The sender's word for the topological ordering."""

    def topological_orderings(self, room_id: RoomId) -> dict[EventId, int]:
        return {event_id: held.event.depth for event_id, held in self.timeline(room_id).items()}


class LetsAnybodyRedact(Oracle):
    def _may_redact(self, redaction: OracleEvent, target: Event) -> bool:
        del redaction, target
        return True


class RedactsWhatWasRefused(Oracle):
    """A redaction of a rejected or soft-failed event takes effect, and is shown."""

    def is_ineffective(self, event_id: EventId) -> bool:
        redaction = self.get(event_id)
        target = self.held.get(EventId(redaction.event.redacts or ""))
        if (
            target is None
            or target.accepted
            or target.outlier
            or target.event.room_id != redaction.event.room_id
        ):
            return super().is_ineffective(event_id)
        return not self._may_redact(redaction, target.event)


class ForgetsSharedHistory(Oracle):
    """Users who left lose access to shared history."""

    def joined_later(self, event_id: EventId, user_id: str) -> bool:
        return self.membership(self.get(event_id).event.room_id, user_id) == "join"


class BackfillIsNews(Oracle):
    """Backfilled events become extremities."""

    def _hold(
        self, event: Event, origin: Origin, state: State | None, refused: str | None = None
    ) -> Outcome:
        return super()._hold(event, "live" if origin == "backfill" else origin, state, refused)


class AcceptsWhatIsRefused(Oracle):
    """Verdicts are not considered."""

    def _hold(
        self, event: Event, origin: Origin, state: State | None, refused: str | None = None
    ) -> Outcome:
        del refused
        return super()._hold(event, origin, state)


class RefusesChildren(Oracle):
    """The child of a refused event is refused."""

    def _hold(
        self, event: Event, origin: Origin, state: State | None, refused: str | None = None
    ) -> Outcome:
        parents = [self.held[one] for one in event.prev_event_ids if one in self.held]
        inherited = [one.refused for one in parents if one.refused]
        return super()._hold(event, origin, state, next(iter(inherited), refused))


class HidesWhatIsRefused(Oracle):
    """Other servers do not get refused events."""

    def backfill(
        self, room_id: RoomId, ids: Iterable[EventId], limit: int | None = None
    ) -> list[EventId]:
        found = super().backfill(room_id, ids)
        return [one for one in found if self.get(one).refused is None][:limit]


class ReadmitsInThePast(Oracle):
    """A readmitted event keeps its position, so no sync returns it."""

    def readmit(self, event_id: EventId) -> Outcome:
        outcome, held = super().readmit(event_id), self.get(event_id)
        if held.first_arrival:
            held.arrival, held.first_arrival = held.first_arrival, 0
            self.held = dict(sorted(self.held.items(), key=lambda one: one[1].arrival))
        return outcome


class ForgetsReadmittedHeads(Oracle):
    """A readmitted event is no forward extremity."""

    def _extremities(self, room_id: RoomId) -> set[EventId]:
        found = super()._extremities(room_id)
        return {one for one in found if not self.held[one].first_arrival}


class StateAfterForStateBefore(Oracle):
    def state_ids(self, event_id: EventId) -> tuple[set[EventId], set[EventId]]:
        state = set(self.state_after(event_id).values())
        return state, self.auth_chain(state)


class ForgetsTheSenders(Oracle):
    """Of a filter, those who are wanted and those who are not."""

    def passes(self, event_id: EventId, wanted: EventFilter) -> bool:
        return super().passes(event_id, replace(wanted, senders=None, not_senders=None))


class EndsAtGaps(Oracle):
    """Without a way to go on."""

    def page_back(
        self, room_id: RoomId, user_id: str, below: EventId | None = None
    ) -> tuple[list[EventId], EventId | None]:
        return super().page_back(room_id, user_id, below)[0], None


class CountsTheInvited(Oracle):
    """As joined."""

    def membership_in(self, state: State, user_id: str) -> str | None:
        membership = super().membership_in(state, user_id)
        return "join" if membership == "invite" else membership


class ShowsIgnoredInvites(Oracle):
    """Invites from ignored users are returned."""

    def is_ignored(self, sender: str, ignored: Collection[str]) -> bool:
        del sender, ignored
        return False


class ReturnsAHundred(Inboxes):
    """The token covers all messages, though at most a hundred are returned."""

    def receive(self, user_id: str, device_id: str, since: int | None) -> tuple[list[str], int]:
        found, token = super().receive(user_id, device_id, since)
        return found[:100], token


class ShowsForgottenState(Oracle):
    """A sync returns a forgotten room as any other that was left."""

    def has_forgotten(self, room_id: RoomId, user_id: str) -> bool:
        del room_id, user_id
        return False


class LosesMessages(Oracle):
    """An inbox ends before the token does."""

    def __init__(self) -> None:
        super().__init__()
        self.inboxes = ReturnsAHundred()


class RedactsItself(Oracle):
    """A redaction takes effect on itself."""

    def redacted_by(self, event_id: EventId) -> EventId | None:
        own = event_id if self.get(event_id).event.redacts == event_id else None
        return super().redacted_by(event_id) or own


class LetsUnsignedDecide(Oracle):
    """An event is invalid if its `unsigned` is no object."""

    def append(self, pdus: Iterable[Any], **how: Any) -> list[tuple[EventId | None, Outcome]]:
        read = [peek(pdu) or {} for pdu in pdus]
        bad = [type(one.get("unsigned", {})) is not dict for one in read]
        return super().append(
            [b"null" if is_bad else pdu for is_bad, pdu in zip(bad, pdus, strict=True)], **how
        )


NEVER: Mapping[type[Oracle], frozenset[str]] = {TakesAnyCreateEvent: frozenset({"junk", "odd"})}
NEEDED: Mapping[type[Oracle], frozenset[str]] = {
    LetsAnybodyRedact: frozenset({"redact"}),
    RedactsWhatWasRefused: frozenset({"redact", "refused"}),
    AcceptsWhatIsRefused: frozenset({"verdicts"}),
    RefusesChildren: frozenset({"verdicts"}),
    HidesWhatIsRefused: frozenset({"verdicts"}),
    ReadmitsInThePast: frozenset({"verdicts"}),
    ForgetsReadmittedHeads: frozenset({"verdicts"}),
    ShowsForgottenState: frozenset({"forget"}),
    RedactsItself: frozenset({"odd"}),
    LetsUnsignedDecide: frozenset({"odd"}),
}
"""What has to be switched on to notice a mistake."""


def test_batches_do_not_matter() -> None:
    run_machine(machine_with(OneByOne), examples=EXAMPLES)


@pytest.mark.timeout(600)  # half a minute of work, on a busy machine
@pytest.mark.parametrize(
    "mistaken",
    [
        TakesAnyCreateEvent,
        pytest.param(LastParentWins, marks=long_run),
        pytest.param(IgnoresTheCurrentState, marks=long_run),
        TrustsTheDepth,
        pytest.param(LetsAnybodyRedact, marks=long_run),
        pytest.param(RedactsWhatWasRefused, marks=long_run),
        ForgetsSharedHistory,
        BackfillIsNews,
        StateAfterForStateBefore,
        ForgetsTheSenders,
        pytest.param(EndsAtGaps, marks=long_run),
        pytest.param(CountsTheInvited, marks=long_run),
        pytest.param(ShowsIgnoredInvites, marks=long_run),
        LosesMessages,
        ShowsForgottenState,
        AcceptsWhatIsRefused,
        RefusesChildren,
        HidesWhatIsRefused,
        ReadmitsInThePast,
        ForgetsReadmittedHeads,
        RedactsItself,
        LetsUnsignedDecide,
    ],
)
def test_the_machine_notices(mistaken: type[Oracle]) -> None:
    with pytest.raises(AssertionError):
        machine = machine_with(
            mistaken, NEEDED.get(mistaken, frozenset()), NEVER.get(mistaken, frozenset())
        )
        run_machine(
            machine,
            examples=400,
            phases=[Phase.generate],
            derandomize=True,
            report_multiple_bugs=False,
        )
