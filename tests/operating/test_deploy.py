"""The systemd unit, the compose file and the image of docs/deploy are what `serve` needs."""

import asyncio
import configparser
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import storage
from tests.cli.test_http_endpoints import SERVER, a_busy_machine, exposed, until
from tests.docs.test_names import unknown_settings, wrong_words
from tests.replication.proxies import Proxy, through, unix_socket_of

__all__ = ["a_busy_machine"]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs/deploy"
UNIT = (DEPLOY / "room-storage.service").read_text(encoding="utf-8")
IMAGE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
INSTALLED = "/opt/room-storage/bin/room-storage"
SETTINGS_FILE = "/etc/room-storage/serve.env"
EXPOSURE_MAX = 20  # tenths; systemd calls that "OK"


@pytest.fixture
def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yml").read_text(encoding="utf-8")
    assert unknown_settings(text) == []
    return dict(yaml.safe_load(text))


def analyzed(verb: str, folder: Path, unit: str, *options: str) -> tuple[int, str]:
    """Let systemd read the unit, with files that this machine has."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze")
    (folder / "serve.env").touch()
    true = shutil.which("true")
    assert true is not None
    file = folder / "room-storage.service"
    here = unit.replace(INSTALLED, true).replace(SETTINGS_FILE, str(folder / "serve.env"))
    file.write_text(here, encoding="utf-8")
    done = subprocess.run(
        [program, verb, *options, str(file)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert analyzed("verify", tmp_path, UNIT) == (0, "")
    _, wrong = analyzed("verify", tmp_path, UNIT.replace("ProtectHome", "ProtectHouse"))
    assert "Unknown key" in wrong


def test_systemd_finds_the_unit_hardened(tmp_path: Path) -> None:
    options = ["--offline=true", f"--threshold={EXPOSURE_MAX}", "--no-pager"]
    assert analyzed("security", tmp_path, UNIT, *options)[0] == 0
    weaker = re.sub(
        r"^(Protect|Private|Restrict|Capability|System).*\n", "", UNIT, flags=re.MULTILINE
    )
    assert analyzed("security", tmp_path, weaker, *options)[0] != 0


def test_the_unit_runs_commands_that_exist() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT)
    service = parser["Service"]
    for key in ("ExecStartPre", "ExecStart"):
        program, *words = shlex.split(service[key])
        assert program == INSTALLED
        assert list(wrong_words(words)) == []
    assert service["Type"] == "exec", "serve does not notify"
    assert service["EnvironmentFile"] == SETTINGS_FILE
    page = (ROOT / "docs/how-to/serve.md").read_text(encoding="utf-8")
    assert SETTINGS_FILE in page
    role = re.search(r"STORAGE_DSN=postgresql://(\w+)@/", page)
    assert role is not None
    assert role[1] == service["User"], "peer authentication compares the two"
    assert f"CREATE ROLE {role[1]} LOGIN" in page
    assert f"--owner={role[1]}" in page
    assert "--pre" in service["ExecStartPre"], "other steps break processes of the last release"


def test_compose_is_consistent(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"postgres", "redis", "migrate", "serve"}
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            wanted = condition["condition"]
            assert wanted in {"service_healthy", "service_completed_successfully"}
            assert ("healthcheck" in services[other]) == (wanted == "service_healthy")
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        is_lasting = service["restart"] != "no"
        assert is_lasting == ("healthcheck" in service), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "open to everybody"
    assert services["migrate"]["image"] == services["serve"]["image"]
    context = DEPLOY / services["migrate"]["build"]["context"]
    assert (context / services["migrate"]["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert "POSTGRES_PASSWORD" not in services["postgres"]["environment"]


def test_compose_runs_commands_that_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("migrate", "serve"):
        words = [word.partition("=")[0] for word in services[name]["command"]]
        assert words[0] == name
        assert list(wrong_words(words)) == []
    published = {port.rpartition(":")[2] for port in services["serve"]["ports"]}
    assert published == {"9092", "9193"}
    assert "--http-port=9193" in services["serve"]["command"]


def test_the_services_read_the_dsn_from_its_secret(compose: dict[str, Any]) -> None:
    for name in ("migrate", "serve"):
        service = compose["services"][name]
        assert service["entrypoint"] == ["room-storage"]
        assert service["environment"]["STORAGE_DSN_FILE"] == "/run/secrets/dsn"
        assert "STORAGE_DSN" not in service["environment"]
        assert "dsn" in service["secrets"]


async def test_the_healthcheck_follows_readyz(dsn: str, compose: dict[str, Any]) -> None:
    kind, python, option, code = compose["services"]["serve"]["healthcheck"]["test"]
    assert (kind, python, option) == ("CMD", "python", "-c")
    assert 'http://127.0.0.1:9193/readyz", timeout=4)' in code

    async def healthy(url: str) -> bool:
        here = code.replace("http://127.0.0.1:9193", url).replace("timeout=4", "timeout=60")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", here, stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait() == 0

    async with (
        Proxy(unix_socket_of(dsn)) as postgres,
        storage.open(
            through(dsn, postgres.port), server_name=SERVER, config=storage.Config(follow_ms=20)
        ) as store,
        exposed(store) as url,
    ):
        assert await healthy(url)
        postgres.open = False
        postgres.cut()
        await until(url, 503)
        assert not await healthy(url)


def test_the_image_has_what_the_wheel_needs(tmp_path: Path) -> None:
    """The files that the build stage copies give the wheel that the checkout gives."""
    copied = [line.split()[1:-1] for line in IMAGE.splitlines() if line.startswith("COPY p")] + [
        line.split()[1:-1] for line in IMAGE.splitlines() if re.match(r"COPY [sme]", line)
    ]
    for name in [name for names in copied for name in names]:
        source = ROOT / name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        else:
            shutil.copy(source, tmp_path / name)
    assert contents_of_wheel(tmp_path, tmp_path / "a") == contents_of_wheel(ROOT, tmp_path / "b")
    assert 'ENTRYPOINT ["room-storage"]' in IMAGE
    assert "\nUSER room-storage\n" in IMAGE, "not as root"


def contents_of_wheel(source: Path, folder: Path) -> list[str]:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    [wheel] = folder.glob("*.whl")
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if "__pycache__" not in name)
