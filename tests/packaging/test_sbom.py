"""`make sbom` lists what the wheel installs, with versions and licences."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_locks import DEMO, PROJECT, ROOT, names, pins

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_it_lists_the_runtime_dependencies(tmp_path: Path) -> None:
    file = tmp_path / "room-storage.cdx.json"
    subprocess.run([sys.executable, ROOT / ".ci" / "sbom.py", file], check=True)
    document = json.loads(file.read_text("utf-8"))
    assert document["bomFormat"] == "CycloneDX"
    subject = document["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("room-storage", PROJECT["version"])
    listed = {one["name"].lower().replace("_", "-"): one for one in document["components"]}
    wanted = names(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["embedded"])
    if sys.version_info < (3, 14):
        wanted -= {"rpds-py"}
    else:
        wanted -= {"immutables"}
    assert not {"pytest", "hatchling", "pip"} & listed.keys()
    versions = set(pins(DEMO).values())
    assert all(one["version"] in versions for one in listed.values())
    assert [name for name, one in listed.items() if not one.get("licenses")] == []
    [direct] = [
        one["dependsOn"] for one in document["dependencies"] if one["ref"] == subject["bom-ref"]
    ]
    assert {one.split("==")[0].lower().replace("_", "-") for one in direct} == wanted
