"""Looking for executors while processes end."""

import subprocess

import psutil

from tests.pipeline.cluster import end_all, executors, family_of, is_executor


def test_processes_that_have_ended_are_passed_over() -> None:
    """Children of a worker end at any moment: shells that start an executor or find its home."""
    started = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(started.pid)
    assert not is_executor(process)
    end_all([process], kill=True)
    started.wait()
    assert not is_executor(process)
    assert family_of(process) == []
    assert executors([process]) == []
    end_all([process])
