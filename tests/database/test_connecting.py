"""A connection that fails: one sentence with the host, the port or the file, and no password."""

import asyncio
import ssl
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest

import storage
from storage.config import Config
from storage.database import Database
from storage.database.deployment import grant
from storage.database.dsn import DsnServer, environment_dsn, has_password
from storage.database.embedded import EmbeddedPostgres
from storage.database.migrate import migrate
from storage.errors import DatabaseUnavailable, InputError, StorageError
from tests.cli.running import NOBODY, ROOT, room_storage
from tests.conftest import SERVER_CONFIG
from tests.postgres import chosen_binaries, with_database

SECRET = "c0rrect@h/rse"
ESCAPED = quote(SECRET, safe="")
HERE = f"postgresql://homeserver:{ESCAPED}@127.0.0.1:1/rooms"
REFUSED = r"^cannot connect to Postgres at 127\.0\.0\.1:1: connection refused$"
CONFIG = Config(pool_size_max=1, connect_timeout_ms=5_000, pool_acquire_timeout_ms=5_000)


async def failure(dsn: str) -> StorageError:
    """The error of `Database.open`: one line. It and its causes do not show the password."""
    with pytest.raises(StorageError) as caught:
        await Database.open(dsn, config=CONFIG)
    without_password("".join(traceback.format_exception(caught.value)))
    assert "\n" not in str(caught.value)
    return caught.value


def without_password(text: str) -> None:
    for secret in (SECRET, ESCAPED, "c0rrect", "h/rse"):
        assert secret not in text, text


# --------------------------------------------------------------------------------------------------
# nobody answers


@pytest.mark.parametrize(
    "dsn, sentence",
    [
        (HERE, "cannot connect to Postgres at 127.0.0.1:1: connection refused"),
        (
            HERE.replace("127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2"),
            "cannot connect to Postgres at 127.0.0.1:1, 127.0.0.1:2: connection refused",
        ),
        (
            HERE.replace("127.0.0.1:1", "[::1]:1"),
            "cannot connect to Postgres at [::1]:1: ",
        ),
        (
            HERE.replace("127.0.0.1:1", "absent.invalid"),
            "cannot connect to Postgres at absent.invalid:5432: the host name is not known (",
        ),
        (
            "postgresql://homeserver@/rooms?host=/absent/folder&port=5433",
            "cannot connect to Postgres at /absent/folder/.s.PGSQL.5433: there is no such socket",
        ),
        (
            f"{HERE}?sslmode=verify-full&sslrootcert=/absent/ca.pem",
            "cannot connect to Postgres at 127.0.0.1:1: the file /absent/ca.pem of sslrootcert ",
        ),
    ],
)
async def test_the_place_and_the_file_are_named(dsn: str, sentence: str) -> None:
    error = await failure(dsn)
    assert isinstance(error, DatabaseUnavailable)
    assert str(error).startswith(sentence)


async def test_the_place_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGSSLMODE", "verify-ca")
    monkeypatch.setenv("PGSSLROOTCERT", "/absent/env.pem")
    error = await failure("postgresql:///rooms")
    assert "at 127.0.0.1:1: the file /absent/env.pem of sslrootcert" in str(error)


def test_a_file_of_tls_that_is_absent_may_be_there_later() -> None:
    """The exit code is the one after which systemd tries again, as the page says."""
    dsn = f"{NOBODY}?sslmode=verify-full&sslrootcert=/absent/ca.pem"
    assert room_storage("stats", "--dsn", dsn).returncode == 3
    assert room_storage("stats", "--dsn", f"{NOBODY}?sslmode=perhaps").returncode == 2
    page = (ROOT / "docs/how-to/connect.md").read_text("utf-8")
    assert "It is 3 if the database could\nnot be reached" in page
    assert "That includes a file of TLS that cannot be read" in page


async def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "ca.pem"
    wrong.write_text("not a certificate")
    error = await failure(f"{HERE}?sslmode=verify-full&sslrootcert={wrong}")
    assert f"127.0.0.1:1: TLS with sslrootcert {wrong}: " in str(error)


async def test_a_server_that_does_not_answer() -> None:
    async with silent_server() as port:
        error = await failure(HERE.replace(":1/", f":{port}/"))
    assert str(error) == (
        f"cannot connect to Postgres at 127.0.0.1:{port}: no answer within the time limit"
    )


class silent_server:  # noqa: N801  # reads as a function
    """Accepts connections, and says nothing, or speaks TLS."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.context = context

    async def __aenter__(self) -> int:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        if self.context is not None:
            writer.write(b"S")
            try:
                await writer.start_tls(self.context)
            except (ssl.SSLError, ConnectionError):
                return
        await reader.read()
        writer.close()


async def test_a_certificate_that_is_not_proven_names_the_file(tmp_path: Path) -> None:
    for name in ("server", "other"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:prime256v1", "-nodes", "-days", "9", "-subj", "/CN=x"]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    trusted = tmp_path / "other.pem"
    async with silent_server(context) as port:
        dsn = HERE.replace(":1/", f":{port}/")
        error = await failure(f"{dsn}?sslmode=verify-ca&sslrootcert={trusted}")
    assert str(error).startswith(
        f"cannot connect to Postgres at 127.0.0.1:{port}: "
        f"{trusted} does not prove the server's certificate: "
    )


async def test_an_interrupted_connection_names_the_place_too(dsn: str) -> None:
    """Once the store is open, a new connection fails."""
    async with await Database.open(dsn, config=CONFIG) as database:
        database._connect.server = DsnServer(HERE)
        database._pool.end_all()
        with pytest.raises(DatabaseUnavailable, match=REFUSED):
            async with database.connection():
                pass
        with pytest.raises(DatabaseUnavailable, match=REFUSED):
            await database.confirm()
        with pytest.raises(DatabaseUnavailable, match=REFUSED):
            await grant(HERE)


# --------------------------------------------------------------------------------------------------
# a DSN that cannot be used


@pytest.mark.parametrize(
    "dsn, sentence",
    [
        (f"mysql://u:{ESCAPED}@h/x", "the DSN cannot be read: it must begin with postgresql://"),
        (f"postgres//u:{ESCAPED}@h/x", "the DSN cannot be read: it must begin with postgresql://"),
        (
            f"host=h password={ESCAPED}",
            "the DSN cannot be read: it must begin with postgresql://",
        ),
        (f"postgresql://u:{ESCAPED}@[::1:1/x", "the DSN cannot be read: a bracket of an IPv6"),
        (f"postgresql://u:{SECRET}@h/x", "the DSN cannot be read: in a user name or a password"),
        (f"postgresql://u:c0rrect#{ESCAPED}@h/x", "the DSN cannot be read: in a user name or a"),
        (f"postgresql://u:c0rrect?{ESCAPED}@h/x", "the DSN cannot be read: in a user name or a"),
        (f"postgresql://u:c0rrect@{ESCAPED}@h/x", "the DSN cannot be read: in a user name or a"),
        ("postgresql://u:c0rrect%zz@h/x", "the DSN cannot be read: a % begins no code of two "),
        ("postgresql://u:c0rrect%@h/x", "the DSN cannot be read: a % begins no code of two "),
        (f"postgresql://h:{ESCAPED}/x", "the DSN cannot be read: its port must be a number"),
        (f"postgresql://u:{ESCAPED}@h:99999/x", "the DSN cannot be read: its port must be a"),
        (f"{HERE}?sslmode", "the DSN cannot be read: its options must be name=value"),
        (
            f"{HERE}?sslmode=perhaps",
            "the DSN for 127.0.0.1:1 cannot be used: `sslmode` parameter must be one of",
        ),
    ],
)
async def test_a_dsn_that_cannot_be_used(dsn: str, sentence: str) -> None:
    error = await failure(dsn)
    assert isinstance(error, InputError)
    assert str(error).startswith(sentence)
    with pytest.raises(InputError):
        await migrate(dsn)
    with pytest.raises(InputError):
        await grant(dsn)


async def test_a_dsn_that_is_no_text() -> None:
    with pytest.raises(InputError) as caught:
        await Database.open(Path("/run/postgresql"))  # type: ignore[arg-type]
    assert str(caught.value) == "the DSN is of the type PosixPath: a text is wanted"


async def test_an_unknown_option_of_the_dsn(dsn: str) -> None:
    error = await failure(f"{dsn}&keepalives=1")
    assert isinstance(error, InputError)
    assert 'has an unknown option: unrecognized configuration parameter "keepalives"' in str(error)


# --------------------------------------------------------------------------------------------------
# Postgres refuses


@pytest.fixture(scope="module")
def guarded_dsn() -> Iterator[str]:
    """The DSN, with its password, of a role that a server asks for it."""
    with tempfile.TemporaryDirectory(prefix="room-storage-guarded-") as folder:
        Path(folder).chmod(
            0o755
        )  # the account of the server may differ, and so its socket is there
        server = EmbeddedPostgres(Path(folder), config=SERVER_CONFIG, binaries=chosen_binaries())
        dsn = server.start()
        asyncio.run(_guarded(dsn, Path(folder, "postgresql", "pg_hba.conf")))
        yield dsn.replace("//postgres@", f"//homeserver:{ESCAPED}@")
        server.stop()


async def _guarded(dsn: str, file: Path) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"CREATE ROLE homeserver LOGIN SUPERUSER PASSWORD '{SECRET}'")
    file.write_text("local all homeserver scram-sha-256\n" + file.read_text())
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()


@pytest.fixture
async def open_dsn(guarded_dsn: str) -> str:
    await migrate(guarded_dsn)
    return guarded_dsn


async def test_postgres_refuses_with_its_place(guarded_dsn: str) -> None:
    place = DsnServer(guarded_dsn).address
    wrong = guarded_dsn.replace(ESCAPED, "c0rrect")
    error = await failure(wrong)
    assert str(error) == (
        f'Postgres at {place} refuses: password authentication failed for user "homeserver"; '
        "the DSN has the password (SQLSTATE 28P01)"
    )
    error = await failure(with_database(guarded_dsn, "absent"))
    assert str(error) == (
        f'Postgres at {place} refuses: database "absent" does not exist (SQLSTATE 3D000)'
    )


async def test_nothing_of_an_open_store_shows_the_password(
    open_dsn: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(0)
    async with storage.open(open_dsn, server_name="s1.test") as store:
        database = store.database
        shown = [store, database, database._pool, database._connect, database._connect.server]
        shown += [database.config, database.guard, *database._pool._open]
        for one in shown:
            without_password(repr(one) + str(one))
        async with database.connection() as conn:
            without_password(repr(conn))
            activity = await conn.fetchval(
                "SELECT string_agg(a::text, ' ') FROM pg_stat_activity a"
            )
        without_password(activity)
    without_password(caplog.text + "".join(capfd.readouterr()))


def test_commands_show_no_password(open_dsn: str, tmp_path: Path) -> None:
    """A DSN in the environment or in a file is in no list of processes, and in no output."""
    file = tmp_path / "dsn"
    file.write_text(f"{open_dsn}\n")
    for arguments in (("stats",), ("migrate", "--list"), ("migrate", "--json"), ("verify",)):
        by_file = room_storage(*arguments, STORAGE_DSN_FILE=str(file))
        by_name = room_storage(*arguments, STORAGE_DSN=open_dsn)
        for done in (by_file, by_name):
            assert (done.returncode, done.stderr) == (0, "")
            without_password(done.stdout)


def test_a_password_file_of_libpq_is_read(open_dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "pgpass"
    file.touch(mode=0o600)
    file.write_text(f"*:*:*:homeserver:{SECRET}\n")
    without = open_dsn.replace(f":{ESCAPED}@", "@")
    done = room_storage("stats", "--dsn", without, PGPASSFILE=str(file))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refused_password_names_its_source(open_dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "pgpass"
    without = open_dsn.replace(f":{ESCAPED}@", "@")
    fits, read = "that fits host, port, database and user counts", f"the password file {file} "

    def sources(**environ: str) -> str:
        done = room_storage("stats", "--dsn", without, given=b"", **environ)
        *_, error = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (3, "")
        without_password(done.stderr)
        return error.partition('user "homeserver"; ')[2].removesuffix(" (SQLSTATE 28P01)")

    nowhere = "no password in the DSN or in PGPASSWORD; "
    assert sources(PGPASSFILE=str(file)) == nowhere + read + (
        "cannot be read: No such file or directory"
    )
    file.write_text(f"other.host:*:*:homeserver:{SECRET}\n")
    file.chmod(0o640)
    assert sources(PGPASSFILE=str(file)) == nowhere + read + (
        "is ignored, because others can read it: chmod 600"
    )
    file.chmod(0o600)
    assert sources(PGPASSFILE=str(file)) == f"{nowhere}the first line of {read}{fits}"
    assert sources(HOME=str(tmp_path)).startswith(f"{nowhere}the password file {tmp_path}/.pgpass")
    assert sources(PGPASSWORD="c0rrect") == "PGPASSWORD has the password"


# --------------------------------------------------------------------------------------------------
# where a DSN comes from


def test_a_password_on_the_command_line_is_warned_of() -> None:
    done = room_storage("stats", "--dsn", HERE)
    assert done.returncode == 3
    note, error = done.stderr.splitlines()
    assert note.endswith(
        "the process list shows the password of --dsn to other users of this machine:"
        " use STORAGE_DSN, STORAGE_DSN_FILE or PGPASSFILE"
    )
    assert error == "error: cannot connect to Postgres at 127.0.0.1:1: connection refused"
    without_password(done.stdout + done.stderr)
    assert len(room_storage("stats", "--dsn", NOBODY).stderr.splitlines()) == 1


def test_the_command_line_outranks_the_environment(tmp_path: Path) -> None:
    done = room_storage("stats", "--dsn", NOBODY, STORAGE_DSN="x", STORAGE_DSN_FILE="/absent")
    assert "127.0.0.1:1: connection refused" in done.stderr


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "must have one line, with the DSN"),
        (b"postgresql://a/b\npostgresql://c/d\n", "must have one line, with the DSN"),
        (b"postgresql://a/\xff", "is not UTF-8"),
    ],
)
def test_a_file_without_a_dsn(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file = tmp_path / "dsn"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        environment_dsn({"STORAGE_DSN_FILE": str(file)})
    assert str(caught.value) == f"STORAGE_DSN_FILE: {file} {sentence}"
    done = room_storage("stats", STORAGE_DSN_FILE=str(file))
    assert (done.returncode, done.stderr) == (2, f"error: {caught.value}\n")


def test_the_environment_names_one_dsn() -> None:
    assert environment_dsn({}) is None
    assert environment_dsn({"STORAGE_DSN": "x"}) == "x"
    assert environment_dsn({"STORAGE_SYNAPSE_DSN": "x"}, "STORAGE_SYNAPSE_DSN") == "x"
    with pytest.raises(InputError) as caught:
        environment_dsn({"STORAGE_DSN": "x", "STORAGE_DSN_FILE": "y"})
    assert str(caught.value) == "STORAGE_DSN and STORAGE_DSN_FILE are both set: unset one"


def test_synapses_dsn_comes_from_the_environment_too() -> None:
    pytest.importorskip("pyspark")
    done = room_storage("spark", "import-synapse")
    assert done.returncode == 2
    assert done.stderr == (
        "error: give SYNAPSE_DSN, or set STORAGE_SYNAPSE_DSN or STORAGE_SYNAPSE_DSN_FILE\n"
    )
    given = room_storage("spark", "import-synapse", HERE, "--dsn", NOBODY)
    assert "the password of SYNAPSE_DSN" in given.stderr
    without_password(given.stderr)
    named = room_storage("spark", "import-synapse", "--dsn", NOBODY, STORAGE_SYNAPSE_DSN=HERE)
    assert named.stderr == "error: cannot connect to Postgres at 127.0.0.1:1: connection refused\n"


def test_the_url_of_a_redis_comes_from_the_environment_too() -> None:
    done = room_storage(
        *("--log-level", "error", "serve", "--no-tcp", "--dsn", NOBODY),
        STORAGE_REDIS=f"redis://:{ESCAPED}@127.0.0.1:1",
    )
    assert (done.returncode, done.stderr) == (
        3,
        "error: cannot connect to Postgres at 127.0.0.1:1: connection refused\n",
    )


@pytest.mark.parametrize(
    "dsn, found",
    [
        (HERE, True),
        ("postgresql://u:x@/y?host=/run", True),
        ("postgresql://u@h/x?password=x", True),
        ("mysql://u:x@h/x", True),
        ("postgresql://u@h:5432/x", False),
        ("postgresql://h:5432/x", False),
        ("postgresql:///x?host=/run", False),
    ],
)
def test_a_password_in_a_dsn_is_found(dsn: str, found: bool) -> None:
    assert has_password(dsn) is found


def test_hosts_and_ports_are_read_as_libpq_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PGHOST", "PGPORT"):
        monkeypatch.delenv(variable, raising=False)
    assert DsnServer("postgresql://a,b:2/x").hosts == [("a", 2), ("b", 2)]
    assert DsnServer("postgresql://a:1,b:2/x").hosts == [("a", 1), ("b", 2)]
    assert DsnServer("postgresql:///x?host=a,b&port=1,2").hosts == [("a", 1), ("b", 2)]
    assert DsnServer("postgresql://%2Frun%2Fpg/x").address == "/run/pg/.s.PGSQL.5432"
    assert DsnServer("postgresql:///x").address == "localhost or a local socket, port 5432"


@pytest.mark.parametrize("name", ["STORAGE_DSN", "STORAGE_DSN_FILE"])
def test_an_empty_variable_does_not_choose_the_embedded_server(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} is empty"):
        environment_dsn({name: " "})
