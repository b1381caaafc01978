"""The store beside the oracle: every query after every delivery (hypothesis, swarm testing).

`STORAGE_EXAMPLES` says how many rooms; the default is for every day.
"""

import os
from typing import Any

import pytest

from storage.visibility import multirange, rule
from tests.oracle.example_databases import ExampleDatabases
from tests.oracle.facts import Audience
from tests.oracle.machine import AbsenceMachine, run_machine
from tests.oracle.store_subject import StoreSubject
from tests.oracle.worlds import SERVERS, USERS

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "3"))
SERVER = "s2.test"
LOCAL = tuple(user for user in USERS if user.endswith(f":{SERVER}"))


SQL_NO_SLACK = """
CREATE OR REPLACE FUNCTION order_slack() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 0::bigint $$
"""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("slack", [True, False])
def test_the_store_agrees_with_the_oracle(
    databases: ExampleDatabases, monkeypatch: pytest.MonkeyPatch, *, slack: bool
) -> None:
    """Without slack every event that crosses its audience's bounds is an out-of-range event.

    This holds in small rooms too. Ranges are cut into rows early then.
    """
    if not slack:
        monkeypatch.setattr(multirange, "SLACK", 0)
        monkeypatch.setattr(multirange, "AROUND", 1)
        monkeypatch.setattr(rule, "RANGES_MAX", 1)

    class Machine(AbsenceMachine):
        audience = Audience(LOCAL, SERVERS)
        syncing = LOCAL

        def open_subject(self) -> StoreSubject:
            dsn = databases.open("" if slack else SQL_NO_SLACK)
            return StoreSubject(dsn, server_name=SERVER)

        def close_subject(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=EXAMPLES, steps=20)


@pytest.mark.timeout(0)
def test_with_hostile_events(databases: ExampleDatabases) -> None:
    """Between good events, and good ones with a bad `unsigned`."""

    class Machine(AbsenceMachine):
        audience = Audience(LOCAL, SERVERS)
        syncing = LOCAL
        always = frozenset({"odd", "redact"})
        versions = ("1", "2", "10", "12")  # senders choose ids in the first two

        def open_subject(self) -> StoreSubject:
            return StoreSubject(databases.open(""), server_name=SERVER)

        def close_subject(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=EXAMPLES, steps=20)


@pytest.mark.timeout(0)
def test_with_one_extremity(databases: ExampleDatabases) -> None:
    """All that follows from what is dropped.

    Without gaps, as what is dropped depends on the topological order.
    """

    class Machine(AbsenceMachine):
        audience = Audience(LOCAL, SERVERS)
        syncing = LOCAL
        always = frozenset({"fork"})
        never = frozenset({"after a gap"})
        extremities_max = 1

        def open_subject(self) -> StoreSubject:
            dsn = databases.open()
            return StoreSubject(dsn, server_name=SERVER, forward_extremities_max=1)

        def close_subject(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=EXAMPLES, steps=20)


@pytest.mark.timeout(0)
def test_with_two_writers(databases: ExampleDatabases) -> None:
    """Two stores on one database write and answer in turn, with refused events and redactions.

    A client passes the tokens of one store to the other.
    """

    class Machine(AbsenceMachine):
        audience = Audience(LOCAL, SERVERS)
        syncing = LOCAL
        always = frozenset({"redact", "refused"})

        def open_subject(self) -> StoreSubject:
            dsn = databases.open()
            return StoreSubject(dsn, server_name=SERVER, writers=2)

        def close_subject(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=EXAMPLES, steps=20)
