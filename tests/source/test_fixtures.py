"""The fixtures and settings of tests/conftest.py do fail what they are there to fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STRAY_TASK = """
import asyncio

async def test_stray():
    async def fail():
        raise ZeroDivisionError
    task = asyncio.create_task(fail())
    await asyncio.wait([task])
"""
STRAY_CALLBACK = """
import asyncio

async def test_stray():
    done = asyncio.Event()
    def fail():
        done.set()
        raise ZeroDivisionError
    asyncio.get_running_loop().call_soon(fail)
    await done.wait()
"""
AWAITED = """
import asyncio
import pytest

async def test_awaited():
    async def fail():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        await asyncio.create_task(fail())
"""
STRAY_OF_A_PAGE = """
import asyncio
import gc
import pytest

@pytest.fixture
def page_dsn():
    return "the database of a page"

async def leave_a_task():
    async def fail():
        raise ZeroDivisionError
    cycle = [asyncio.create_task(fail())]
    cycle.append(cycle)
    await asyncio.wait(cycle[:1])

def test_page(page_dsn):
    gc.collect()
    gc.disable()
    asyncio.run(leave_a_task())

async def test_later():
    gc.enable()
"""
WARNING = """
import warnings

def test_warning():
    warnings.warn("look here")
"""
NEVER_AWAITED = """
async def work():
    pass

def test_forgotten():
    work()
"""


@pytest.mark.parametrize(
    "source,told",
    [
        (STRAY_TASK, "ZeroDivisionError"),
        (STRAY_CALLBACK, "ZeroDivisionError"),
        (STRAY_OF_A_PAGE, "::test_page - Failed: stray exception"),
        (WARNING, "look here"),
        (NEVER_AWAITED, "never awaited"),
        (AWAITED, ""),
    ],
)
def test_what_must_fail_fails(source: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "pyproject.toml",
        "-p",
        "tests.conftest",
        str(tmp_path),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, check=False, capture_output=True, text=True
    )
    assert done.returncode == (1 if told else 0), done.stdout
    assert told in done.stdout
