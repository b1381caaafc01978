"""`room-storage serve`, as a process."""

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import storage
from storage.replication import Handlers, ReplicationPeer
from storage.replication.redis_transport import RedisTransport
from storage.streams.feed import Advance, StreamRow
from tests.cli.running import NOBODY, room_storage, started
from tests.replication.redis_server import RedisServer


@contextmanager
def serving(*arguments: str, **environ: str) -> "Iterator[subprocess.Popen[bytes]]":
    """The command as a process, gone at the end of the block."""
    with started("serve", "--server-name", "example.com", *arguments, **environ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: "subprocess.Popen[bytes]") -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


def end(process: "subprocess.Popen[bytes]", how: signal.Signals) -> tuple[int, str]:
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.decode()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(dsn: str, how: signal.Signals) -> None:
    with serving("--port", "0", "--json", STORAGE_DSN=dsn) as process:
        places = told(process)
        assert places == {"host": "127.0.0.1", "port": places["port"], "tls": False}
        with (
            socket.create_connection(
                ("127.0.0.1", int(str(places["port"]))), timeout=60
            ) as by_hand,
            by_hand.makefile("rw") as lines,
        ):
            assert lines.readline() == "SERVER example.com\n"
            lines.write("REPLICATE\n")
            lines.flush()
            while not (line := lines.readline()).startswith("POSITION events"):
                assert line
            process.send_signal(how)
            while (line := lines.readline()) and not line.startswith("ERROR"):
                continue
            assert line == "ERROR server stopping\n"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        began, came, ended, went = errors.decode().splitlines()
        serves = f"room-storage {storage.__version__} serves the database of example.com"
        assert f" INFO storage.cli.serve: {serves} host=127.0.0.1 port={places['port']}" in began
        assert " INFO storage.replication.server: 127.0.0.1:" in came
        assert ended.endswith(" INFO storage.cli.serve: a signal has ended serve")
        assert went.endswith(" is gone: server stopping")


def test_its_log_is_json_from_the_start_to_the_end(dsn: str, tmp_path: Path) -> None:
    """Also a warning of a library: asyncpg warns of a password file that others can read."""
    (tmp_path / "pgpass").touch(mode=0o644)
    environ = {"PGPASSFILE": str(tmp_path / "pgpass"), "STORAGE_LOG_FORMAT": "json"}
    with serving("--port", "0", "--json", STORAGE_DSN=dsn, **environ) as process:
        places = told(process)
        code, errors = end(process, signal.SIGTERM)
    lines = [json.loads(line) for line in errors.splitlines()]
    [began] = [line for line in lines if line["message"].startswith("room-storage ")]
    assert (code, began["port"], began["level"]) == (0, places["port"], "info")
    assert lines[-1]["message"] == "a signal has ended serve"
    [warning] = [line for line in lines if line["logger"] == "py.warnings"]
    assert "has group or world access" in warning["message"]
    assert "\n" not in warning["message"]


@pytest.mark.parametrize("how", ["option", "variable"])
async def test_its_name(dsn: str, how: str) -> None:
    """A name that is taken is refused, and the command names its own option."""
    arguments = ["--instance-name", "other"] if how == "option" else []
    environ = {} if how == "option" else {"STORAGE_INSTANCE_NAME": "other"}
    config = storage.Config(enter_wait_ms=10)
    async with storage.open(dsn, server_name="example.com", instance_name="other"):
        done = await asyncio.to_thread(
            room_storage,
            *("serve", *arguments, "--dsn", dsn),
            given=b"",
            STORAGE_ENTER_WAIT_MS="10",
            **environ,
        )
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            "error: another process is at work under the name other:"
            " stop it, or choose another name with --instance-name"
        )
        with pytest.raises(storage.InstanceNameTaken, match="an instance_name of its own"):
            async with storage.open(dsn, instance_name="other", config=config):
                pass


async def test_it_takes_part_over_redis(dsn: str) -> None:
    async with RedisServer() as redis:
        with serving("--no-tcp", "--redis", redis.url, "--json", STORAGE_DSN=dsn) as process:
            assert told(process) == {"redis": redis.url}
            code, errors = end(process, signal.SIGTERM)
            assert (code, "WARNING" in errors) == (0, False)


def test_a_password_is_not_shown(dsn: str) -> None:
    with serving(
        "--no-tcp", "--redis", "redis://user:secret@127.0.0.1:1/0", "--json", STORAGE_DSN=dsn
    ) as process:
        assert told(process) == {"redis": "redis://127.0.0.1:1/0"}
        code, errors = end(process, signal.SIGTERM)
    assert code == 0
    assert "secret" not in errors
    assert "the process list shows the password of --redis" in errors
    assert "use STORAGE_REDIS" in errors


def test_a_password_of_redis_in_the_environment_is_no_reason_to_warn(dsn: str) -> None:
    url = "redis://user:secret@127.0.0.1:1/0"
    with serving("--no-tcp", "--json", STORAGE_DSN=dsn, STORAGE_REDIS=url) as process:
        assert told(process) == {"redis": "redis://127.0.0.1:1/0"}
        _, errors = end(process, signal.SIGTERM)
    assert "process list" not in errors
    assert "secret" not in errors


def test_it_tells_people_where_it_listens(dsn: str) -> None:
    with serving("--port", "0", "--host", "0.0.0.0", "--dsn", dsn) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"listening on 0.0.0.0:")
        code, errors = end(process, signal.SIGTERM)
    assert code == 0
    assert "anybody may connect" in errors


@pytest.mark.parametrize(
    "arguments,told_of",
    [
        (["--no-tcp"], "nothing to do"),
        (["--tls-key", "key.pem"], "both --tls-certificate and --tls-key"),
        (
            ["--tls-certificate", "nowhere.pem", "--tls-key", "nowhere.pem"],
            "the file nowhere.pem for TLS cannot be read",
        ),
        (
            ["--tls-certificate", "README.md", "--tls-key", "README.md"],
            "TLS with README.md, README.md: pem lib: each file must be PEM, and the key that of",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: list[str], told_of: str) -> None:
    done = room_storage("serve", "--server-name", "example.com", "--dsn", NOBODY, *arguments)
    assert done.returncode == 2
    assert told_of in done.stderr


def test_a_port_that_is_taken(dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = room_storage(
            "serve", "--server-name", "example.com", "--port", str(port), "--dsn", dsn
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_a_wrong_address_of_redis(dsn: str) -> None:
    done = room_storage(
        "serve",
        "--server-name",
        "example.com",
        "--no-tcp",
        "--redis",
        "redis.example.org",
        "--dsn",
        dsn,
    )
    assert done.returncode == 2
    assert "the address of Redis" in done.stderr


def test_no_database() -> None:
    assert room_storage("serve", "--server-name", "example.com", "--dsn", NOBODY).returncode == 3


async def test_it_publishes_over_redis_what_others_commit(dsn: str) -> None:
    """The writer has no connection with Redis; a listener has nothing but Redis."""
    alice = storage.UserId("@alice:example.com")
    async with (
        RedisServer() as redis,
        storage.open(dsn, server_name="example.com", instance_name="writer") as writer,
    ):
        with serving("--no-tcp", "--redis", redis.url, "--json", STORAGE_DSN=dsn) as process:
            assert told(process) == {"redis": redis.url}
            advances: asyncio.Queue[Advance] = asyncio.Queue()
            handlers = Handlers()
            handlers.on(Advance, advances.put_nowait)
            transport = RedisTransport(redis.url, "example.com")
            async with asyncio.timeout(30), ReplicationPeer(handlers, transport):
                await transport.connected()
                while (await advances.get()).instance_name != "writer":
                    pass  # the answer of the process: it knows this one
                for number in range(3):
                    await writer.account_data.set(alice, f"m.{number}", {})
                facts: list[StreamRow] = []
                while len(facts) < 3:
                    advance = await advances.get()
                    facts += [fact for fact in advance.rows if advance.instance_name == "writer"]
                assert [fact.row[-1] for fact in facts] == ["m.0", "m.1", "m.2"]
