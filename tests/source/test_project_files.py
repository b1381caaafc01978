"""The files for contributors parse, and each command, file and target that they name exists."""

import configparser
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.source.test_tidy import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TARGETS = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / ".github/pull_request_template.md"]
PROGRAMS = Path(sys.executable).parent
WRITTEN_BY_A_RUN = {"benchmarks/results", "build/site"}


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def supported_pythons() -> set[str]:
    lines = PROJECT["project"]["classifiers"]
    return {found[1] for line in lines if (found := re.search(r"Python :: (3\.\d+)$", line))}


# --------------------------------------------------------------------------------------------------
# the workflow


def workflow_faults(text: str) -> list[str]:
    """Return the reasons for which a workflow would not run, or would do too much."""
    workflow = yaml.safe_load(text)
    faults = [f"{job}: {key}" for job, body in workflow["jobs"].items() for key in missing(body)]
    faults += [
        f"not pinned: {step['uses']}"
        for body in workflow["jobs"].values()
        for step in body["steps"]
        if "uses" in step and not re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
    ]
    faults += [
        f"expression: {expression}"
        for expression in re.findall(r"\$\{\{\s*(.*?)\s*\}\}", text)
        if not re.fullmatch(r"matrix\.\w+|github\.ref", expression)
    ]
    if workflow.get("permissions") != {"contents": "read"}:
        faults.append("permissions")
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as true
    if not {"push", "pull_request"} <= set(triggers) or "pull_request_target" in triggers:
        faults.append("triggers")
    return faults


def missing(job: dict[str, Any]) -> set[str]:
    """Return the keys that a job lacks; a step needs exactly one of `uses` and `run`."""
    lacking = {"runs-on", "steps", "timeout-minutes"} - set(job)
    kinds = [len({"uses", "run"} & set(step)) for step in job.get("steps", [])]
    return lacking | ({"a step"} if kinds != [1] * len(kinds) else set())


def test_the_workflow_calls_the_checks_and_nothing_else() -> None:
    (path,) = WORKFLOWS
    assert workflow_faults(path.read_text("utf-8")) == []
    (job,) = parsed(path)["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert set(job["strategy"]["matrix"]["python"]) == supported_pythons()


@pytest.mark.parametrize(
    "change, fault",
    [
        (("${{ github.ref }}", "${{ secrets.TOKEN }}"), "expression: secrets.TOKEN"),
        (("checkout@v4", "checkout@main"), "not pinned: actions/checkout@main"),
        (("contents: read", "contents: write"), "permissions"),
        (("  pull_request:", "  pull_request_target:"), "triggers"),
        (("run: .ci/run", "with: .ci/run"), "checks: a step"),
        (("timeout-minutes", "timeout"), "checks: timeout-minutes"),
    ],
)
def test_a_fault_of_a_workflow_is_found(change: tuple[str, str], fault: str) -> None:
    text = WORKFLOWS[0].read_text("utf-8")
    assert change[0] in text
    assert workflow_faults(text.replace(*change)) == [fault]


# --------------------------------------------------------------------------------------------------
# issue forms


def form_faults(form: dict[str, Any]) -> list[str]:
    """Return the reasons for which the host would refuse a form."""
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field.get("id") for field in fields]
    faults = [f"{key} is missing" for key in ("name", "description") if not form.get(key)]
    faults += ["ids"] if len(set(ids)) != len(ids) or not all(ids) else []
    for field in fields:
        attributes = field["attributes"]
        if field["type"] not in {"input", "textarea", "dropdown", "checkboxes"}:
            faults.append(f"type {field['type']}")
        if not attributes.get("label"):
            faults.append(f"{field.get('id')}: label")
        if (field["type"] == "dropdown") != ("options" in attributes):
            faults.append(f"{field.get('id')}: options")
    return faults


@pytest.mark.parametrize("path", [one for one in FORMS if one.stem != "config"], ids=Path.as_posix)
def test_an_issue_form_is_valid(path: Path) -> None:
    assert form_faults(parsed(path)) == []


def test_each_kind_of_issue_has_a_form() -> None:
    assert {path.stem for path in FORMS} == {"bug", "operator", "proposal", "config"}


def test_a_fault_of_a_form_is_found() -> None:
    fields = [
        {"type": "dropdown", "id": "a", "attributes": {"label": "A"}},
        {"type": "text", "id": "a", "attributes": {}},
    ]
    assert form_faults({"name": "Bug", "body": fields}) == [
        "description is missing",
        "ids",
        "a: options",
        "type text",
        "a: label",
    ]


# --------------------------------------------------------------------------------------------------
# tools


def test_the_hooks_call_tools_of_the_environment() -> None:
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        program = Path(hook["entry"].split()[0])
        assert program.parent.as_posix() == ".venv/bin"
        assert (PROGRAMS / program.name).exists(), hook["id"]
        assert hook["language"] == "system"


def test_the_development_container_calls_a_target() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    build = ROOT / ".devcontainer" / container["build"]["dockerfile"]
    image = build.read_text("utf-8")
    assert f"useradd --create-home --shell /bin/bash {container['remoteUser']}" in image
    make, target = container["postCreateCommand"].split()
    assert make == "make"
    assert target in TARGETS


def test_the_container_and_the_workflow_have_the_same_system() -> None:
    image = re.findall(
        r"^FROM python:([\d.]+)-(\w+)$",
        (ROOT / ".devcontainer/Dockerfile").read_text("utf-8"),
        re.MULTILINE,
    )
    (job,) = parsed(WORKFLOWS[0])["jobs"].values()
    assert [("3.11", job["container"].rpartition("-")[2])] == image


def test_the_editor_and_ruff_agree() -> None:
    editor = configparser.ConfigParser()
    editor.read_string("[top]\n" + (ROOT / ".editorconfig").read_text("utf-8"))
    assert editor["top"].getboolean("root")
    assert editor["*"].getint("max_line_length") == PROJECT["tool"]["ruff"]["line-length"]
    assert editor["Makefile"]["indent_style"] == "tab"


def test_attributes_are_lines_of_a_pattern_and_attributes() -> None:
    lines = (ROOT / ".gitattributes").read_text("utf-8").splitlines()
    known = re.compile(r"\S+( (text=auto|eol=lf|binary|linguist-generated))+")
    assert [line for line in lines if line and line[0] != "#" and not known.fullmatch(line)] == []


# --------------------------------------------------------------------------------------------------
# the core


def layers() -> tuple[set[str], set[str]]:
    """Return the packages above the wall, and the core: the store and all below it."""
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    names = [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
    wall = names.index({"store"})
    return set().union(*names[:wall]), set().union(*names[wall:])


def test_the_tests_of_the_core_are_those_of_its_packages() -> None:
    around, core = layers()
    (line,) = re.findall(r"^CORE +:= (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    folders = set(line.split())
    assert [name for name in folders if not (ROOT / "tests" / name).is_dir()] == []
    assert {name for name in core if (ROOT / "tests" / name).is_dir()} <= folders
    assert not folders & around


def test_the_page_of_the_core_names_each_package_around_it() -> None:
    page = (ROOT / "docs/internals/core.md").read_text("utf-8")
    wall = page.partition("\n## The wall\n")[2].partition("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in wall.splitlines() if line.startswith("|"))
    around, _ = layers()
    assert set(re.findall(r"storage/(\w+)", rows)) == around - {"__main__"}


# --------------------------------------------------------------------------------------------------
# pages


def names_of(text: str) -> tuple[set[str], set[str], set[str]]:
    """Return the links, the paths and the targets of make that a page names."""
    links = set(re.findall(r"\]\(([^)#]+)\)", text))
    paths = set(re.findall(r"`([\w.]+(?:/[\w.-]+)+/?|[A-Z]+\.md)(?: [^`]*)?`", text))
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    return links, paths, targets


@pytest.mark.parametrize("path", PAGES, ids=Path.as_posix)
def test_a_page_names_what_exists(path: Path) -> None:
    links, paths, targets = names_of(path.read_text("utf-8"))
    assert [name for name in links if not (path.parent / name).exists()] == []
    rest = paths - WRITTEN_BY_A_RUN
    assert [name for name in rest if name[0] != "/" and not (ROOT / name).exists()] == []
    assert targets <= TARGETS


def test_a_name_is_found() -> None:
    page = "[a](b/c.md) and `storage/x.py`, run `make all`, or\nmake lint # it\n`.ci/run` `WHY.md`"
    assert names_of(page) == ({"b/c.md"}, {"storage/x.py", ".ci/run", "WHY.md"}, {"all", "lint"})


def test_contributing_names_each_recipe_and_each_target() -> None:
    links, _, targets = names_of((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    recipes = {path.name for path in (ROOT / "docs/how-to").glob("add-a-*.md")}
    assert {Path(link).name for link in links} == recipes
    assert {
        "demo",
        "lint",
        "test",
        "test-core",
        "format",
        "docs",
        "bench",
        "soak",
        "mutants",
        "lock",
    } <= targets
