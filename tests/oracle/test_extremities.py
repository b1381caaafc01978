"""Forward extremities above the maximum are dropped: the store against the oracle.

The rooms fork all the time.
"""

from collections import Counter
from random import Random

from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.oracle import Oracle
from tests.oracle.store_subject import StoreSubject

ROOMS = 12
EVENTS = 30


def written(room: RoomBuilder, rng: Random, number: int) -> BuiltEvent:
    """Anything, on top of one or two events of the past; recent ones more often."""
    users = [room.user(one) for one in (1, 2, 3)]
    recent = room.events[-1 - min(int(rng.expovariate(0.3)), len(room.events) - 1) :]
    branch = room.at(*rng.sample(recent, min(len(recent), rng.choice((1, 1, 1, 2)))))
    branch.heads = room.graph.maximal(branch.heads)
    one = rng.choice([user for user in users if branch.membership(user) == "join"])
    ts = 1_700_000_000_000 + rng.randrange(-5, 6)
    match rng.randrange(12):
        case 0 | 1 | 2 | 3 | 4 | 5 | 6:
            return branch.message(one, f"{number}", ts=ts)
        case 7:
            return branch.topic(users[0], f"{number}", ts=ts)
        case 8:
            return branch.invite(one, f"@guest{number}:s9.test", ts=ts)
        case 9:
            return branch.join(one, displayname=f"{number}", ts=ts)
        case _:
            return branch.power_levels(users[0], users={users[1]: rng.choice((0, 50))}, ts=ts)


def test_the_store_drops_what_the_oracle_drops(dsn: str) -> None:
    why: Counter[str] = Counter()
    for limit in (1, 2, 4):
        subject = StoreSubject(dsn, forward_extremities_max=limit)
        oracle = Oracle()
        oracle.extremities_max = limit
        for number in range(ROOMS // 3):
            rng = Random(f"{limit}/{number}")
            room = RoomBuilder("12" if number % 2 else "11", seed=10 * limit + number, sign=False)
            room.start(room.user(1), join_rule="public")
            for user in (2, 3):
                room.join(room.user(user))
            begun = len(room.events)
            for at in range(EVENTS):
                written(room, rng, at)
            for part in (room.pdus[:begun], *([pdu] for pdu in room.pdus[begun:])):
                found_outcomes = subject.append(
                    part, room_version=room.version, origin="live", state_before=None
                )
                assert found_outcomes == oracle.append(part, room_version=room.version)
                found = subject.run(subject.store.forward_extremities(room.room_id))
                assert found == oracle.forward_extremities(room.room_id)
                assert len(found) <= limit
                assert subject.run(
                    subject.store.current_state(room.room_id)
                ) == oracle.current_state(room.room_id)
        subject.close()
        why.update(oracle.dropped.values())
    assert min(why[reason] for reason in ("double", "covered", "newest")) >= 5, why
