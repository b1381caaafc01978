"""Pauses between attempts: they double up to a bound, and no two are alike."""

import pytest

from storage.replication.follower import Backoff
from storage.replication.transport import ReplicationLimits


def test_pauses_double_up_to_a_bound() -> None:
    backoff = Backoff.of(ReplicationLimits(retry_ms_first=100, retry_ms_max=1_000))
    for bound in (0.1, 0.2, 0.4, 0.8, 1, 1, 1):
        assert bound / 2 <= backoff.next() <= bound
    backoff.reset()
    assert backoff.next() <= 0.1


@pytest.mark.parametrize("failures", [0, 3, 10_000])
def test_those_who_lost_the_same_server_do_not_come_back_in_the_same_moment(failures: int) -> None:
    many = [Backoff(1, 10) for _ in range(20)]
    for backoff in many:
        for _ in range(failures):
            backoff.next()
    assert len({backoff.next() for backoff in many}) == 20
