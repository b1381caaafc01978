"""The shape of the source: small files and functions, flat classes, SQL in constants."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_PER_FILE = 900
LINES_PER_FUNCTION = 70
LINES_PER_STATEMENT = 150
NEWLINE = "\n"
PARAMETERS_BY_HAND = 40
PARAMETERS_OF_A_READ = 5
"""More have names (storage/database/placeholders.py)."""

HARMLESS_BASES = {
    "Protocol",
    "SupportsTriggerAvailableNow",
    "Generic",
    "Enum",
    "IntEnum",
    "StrEnum",
}
SQL_START = re.compile(
    r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|MERGE INTO|TRUNCATE|LOCK TABLE)\s"
)
SQL_NAME = re.compile(r"(SQL|PART|PARTS|TEMPLATE)_[A-Z0-9_]+$")
"""Of a statement, of a part of several, of parts by name, and of a template for `fill`."""

COMPOSERS = {"fill", "fill_all", "compose", "directed_statements", "page_statements"}
"""Functions that put SQL together, each by those before it (storage/database/placeholders.py,
storage/queries/pagination/statements.py). Others are not to call them, nor is a caller to give
them anything but constants."""

FIXED_NUMBER = re.compile(
    r"\b(membership\w*|(rel_)?type_nid|state_key_nid|principal_nid)(, 0\))?"
    r"( [<>=]{1,2}| (NOT )?IN \(| IS (NOT )?DISTINCT FROM) *[1-9]|_lock\w*\(\d"
)
NUMBERED = ("storage/maintenance/repair/", "storage/pipeline/rebuilding/")
"""Their statements still have numbers: one of them replaces the other."""

LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError|\bxfail\(|time\.sleep\(")
SLEEP_IS_POLLING = {"storage/database/embedded.py", "tests/pipeline/cluster.py"}
"""Waiting for another process that tells nobody when it is done."""

OUTSIDE_PAGE = re.compile(r"\b(design|api|rules|streams)\.md\b")
"""Pages that the package does not have: a reader could not follow the reference."""

FILE_NAME = re.compile(r"(?<![\w/.*-])(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b(?![\w(])")

LOCAL_PATH = re.compile(r"(?<![\w.])/(work|root|home)/\w")


def files_below(*folders: str, suffix: str = "") -> list[Path]:
    """Files in those folders of the project, without what tools leave there."""
    found = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.name.endswith(suffix)
    ]
    return sorted(
        path for path in found if "__pycache__" not in path.parts and "results" not in path.parts
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = files_below("storage", "migrations", "benchmarks", suffix=".py")
ALL_PYTHON = [*SOURCES, *files_below("tests", suffix=".py")]
TOP = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield name_of(path), ast.parse(path.read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------
# checks


def long_functions(name: str, tree: ast.Module) -> list[str]:
    """Functions of more than LINES_PER_FUNCTION lines."""
    return [
        f"{name}:{node.lineno} {node.name}: {lines_of(node)} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_of(node) > LINES_PER_FUNCTION
    ]


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def mixed_classes(name: str, tree: ast.Module) -> list[str]:
    """Classes with two bases that mean something."""
    return [
        f"{name}:{node.lineno} {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and len([base for base in node.bases if base_name(base) not in HARMLESS_BASES]) > 1
    ]


def base_name(base: ast.expr) -> str:
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def loose_sql(name: str, tree: ast.Module) -> list[str]:
    """Return statements that are not the value of a module constant named as in SQL_NAME.

    The text that a module constant is composed of is such a value, too, and so are parts by name.
    """
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    constants = {
        id(text)
        for node in assigned
        if isinstance(node.target, ast.Name) and SQL_NAME.match(node.target.id)
        for text in (node.value.values if isinstance(node.value, ast.Dict) else [node.value])
    } | {id(text) for node in assigned for text in composed(node.value)}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"{name}:{node.lineno} {str(node.value).strip()[:60]!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and SQL_START.match(node.value)
        and id(node) not in constants | docstrings
    ]


def composed(value: ast.expr | None) -> list[ast.expr]:
    """Return the text of `fill(…)`, `compose(…)` or `compose(…).sql`."""
    call = value.value if isinstance(value, ast.Attribute) else value
    is_one = call is not None and (is_call_of(call, "compose") or is_call_of(call, "fill"))
    return call.args[:1] if isinstance(call, ast.Call) and is_one else []


def long_sql(name: str, tree: ast.Module) -> list[str]:
    """Return SQL that cannot be seen at once, or whose parameters a person has to count."""
    is_read = name.startswith("storage/queries/") and "/inspect/" not in name
    most = PARAMETERS_OF_A_READ if is_read else PARAMETERS_BY_HAND
    return [
        f"{name}:{node.lineno} {node.value.count(NEWLINE)} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (is_sql(node) or " AS (" in node.value)
        and (
            node.value.count(NEWLINE) > LINES_PER_STATEMENT
            or max(map(int, re.findall(r"\$(\d+)", node.value)), default=0) > most
        )
    ]


def numbered_sql(name: str, tree: ast.Module) -> list[str]:
    """Return SQL with the number of a membership, a type, a state key or a lock.

    `fill` puts it in by its name (`NAMED_NUMBERS` in storage/database/names.py).
    """
    return [
        f"{name}:{node.lineno} {found[0]!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and not name.startswith(NUMBERED)
        for found in FIXED_NUMBER.finditer(node.value)
    ]


def assembled_sql(name: str, tree: ast.Module) -> list[str]:
    """Return SQL that is joined, formatted, or composed of anything but constants at import.

    `fill` (storage/database/placeholders.py) is the one way to put SQL together, and `compose`
    (storage/database/placeholders.py) the one way to number parameters.
    """
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    composers = [one for one in functions if getattr(one, "name", "") in COMPOSERS]
    composing = {id(node) for function in composers for node in ast.walk(function)}
    inside = {id(node) for function in functions for node in ast.walk(function)} - composing
    return [
        f"{name}:{node.lineno} {ast.unparse(node)[:60]!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        and (
            is_joined(node)
            or (id(node) not in composing and not is_composed_of_constants(node))
            or (id(node) in inside and any(is_call_of(node, one) for one in COMPOSERS))
        )
    ]


def is_sql(node: ast.expr) -> bool:
    """Return whether an expression is SQL text: a statement, or a constant named as in SQL_NAME."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and SQL_START.match(node.value) is not None
    if isinstance(node, ast.JoinedStr):
        return any(is_sql(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return is_sql(node.value)
    if isinstance(node, ast.BinOp):
        return is_sql(node.left) or is_sql(node.right)
    named = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return SQL_NAME.match(named) is not None


def is_joined(node: ast.AST) -> bool:
    """Return whether an expression joins SQL by `+`, `%`, an f-string or a method of str."""
    if isinstance(node, ast.BinOp | ast.JoinedStr):
        return is_sql(node)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if node.func.attr in {"format", "format_map", "replace"}:
        return is_sql(node.func.value)
    listed = [part for given in node.args for part in getattr(given, "elts", [given])]
    return node.func.attr == "join" and any(map(is_sql, listed))


def is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_composed_of_constants(node: ast.expr) -> bool:
    """Return whether this is no call that puts SQL together, or has constants as its SQL."""
    if is_call_of(node, "fill"):
        return is_filled_by_constants(node)
    if not any(is_call_of(node, one) for one in COMPOSERS - {"compose"}):
        return True
    assert isinstance(node, ast.Call)
    return all(isinstance(one, ast.Name) and SQL_NAME.match(one.id) for one in node.args[:2])


def is_filled_by_constants(node: ast.AST) -> bool:
    """Return whether each argument is a literal, a module constant, or such a call itself."""
    assert isinstance(node, ast.Call)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return all(
        isinstance(one, ast.Constant)
        or (isinstance(one, ast.Name) and SQL_NAME.match(one.id) is not None)
        or (is_call_of(one, "fill") and is_filled_by_constants(one))
        for one in given
    )


CHECKS: dict[Callable[[str, ast.Module], list[str]], tuple[str, ...]] = {
    long_functions: ("",),
    mixed_classes: ("storage", "migrations", "benchmarks"),
    loose_sql: ("storage",),
    long_sql: ("storage",),
    numbered_sql: ("storage",),
    assembled_sql: ("storage",),
}
"""Each check, and the folders that it is for."""


# --------------------------------------------------------------------------------------------------
# tests


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 10
    assert len(ALL_PYTHON) > len(SOURCES)


def test_files_are_of_one_topic() -> None:
    lengths = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in ALL_PYTHON}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_PER_FILE} == {}


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    """What each check finds. Each file is parsed once: that takes most of the time."""
    found: dict[str, list[str]] = {check.__name__: [] for check in CHECKS}
    where: dict[str, list[str]] = {}
    for name, tree in trees(ALL_PYTHON):
        for check, folders in CHECKS.items():
            if name.startswith(folders):
                found[check.__name__] += check(name, tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    found["classes"] = [f"{name}: {files}" for name, files in where.items() if len(files) > 1]
    return found


@pytest.mark.xdist_group("tidy")
@pytest.mark.parametrize("check", [*(check.__name__ for check in CHECKS), "classes"])
def test_nothing_is_found(faults: dict[str, list[str]], check: str) -> None:
    """``classes``: names that are used twice."""
    assert faults[check] == []


def test_nothing_is_left_over() -> None:
    found = [
        f"{name_of(path)}:{number} {line.strip()}"
        for path in ALL_PYTHON
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if LEFT_OVER.search(line)
        and not ("time.sleep(" in line and name_of(path) in SLEEP_IS_POLLING)
    ]
    assert found == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    everything = [*TOP, *files_below("storage", "migrations", "benchmarks", "tests", "docs", ".ci")]
    texts = [
        path
        for path in everything
        if path.suffix not in {".png", ".gz", ".zst", ".parquet"} and path != Path(__file__)
    ]
    found = [
        f"{name_of(path)}:{number} {line.strip()[:100]}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if LOCAL_PATH.search(line)
    ]
    assert found == []


def test_the_package_cites_no_page_outside_of_it() -> None:
    found = [
        f"{name_of(path)}:{number} {line.strip()}"
        for path in files_below("storage", "migrations")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OUTSIDE_PAGE.search(line)
    ]
    assert found == []


def test_a_file_that_the_package_names_exists_and_is_another() -> None:
    files = [name_of(path) for path in [*ALL_PYTHON, *files_below("examples", suffix=".py")]]
    found = [
        f"{name}:{number} {line.strip()}"
        for name in files
        if name.startswith("storage/")
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        for named in FILE_NAME.findall(line)
        if not any(f"/{other}".endswith(f"/{named}") for other in files if other != name)
    ]
    assert found == []


@pytest.mark.parametrize(
    "check,source",
    [
        (long_functions, "def f():\n" + "    pass\n" * LINES_PER_FUNCTION),
        (mixed_classes, "class A(B, C): ..."),
        (loose_sql, "def f():\n    return 'SELECT 1'"),
        (loose_sql, "QUERY: Final = 'SELECT 1'"),
        (loose_sql, "def f(x):\n    return f'SELECT {x} FROM y'"),
        (loose_sql, "SQL_X: Final = f'SELECT {x} FROM y'"),
        (long_sql, "SQL_X: Final = 'SELECT 1" + "\\n" * 151 + "'"),
        (long_sql, f"SQL_X: Final = 'SELECT ${PARAMETERS_BY_HAND + 1}'"),
        (numbered_sql, "SQL_X: Final = 'SELECT FROM memberships m WHERE m.membership = 5'"),
        (numbered_sql, "PART_X: Final = 'COALESCE(e.membership, 0) <> 5'"),
        (numbered_sql, "PART_X: Final = 'e.rel_type_nid NOT IN (19, 20)'"),
        (numbered_sql, "SQL_X: Final = 'SELECT pg_advisory_xact_lock(1919905645, $1::int)'"),
        (assembled_sql, "SQL_X: Final = SQL_Y + 'UNION ALL'"),
        (assembled_sql, "SQL_X: Final = 'SELECT 1' + y"),
        (assembled_sql, "SQL_X: Final = 'SELECT %s' % y"),
        (assembled_sql, "SQL_X: Final = f'SELECT {y}'"),
        (assembled_sql, "SQL_X: Final = f'{SQL_Y} LIMIT 1'"),
        (assembled_sql, "SQL_X: Final = SQL_Y.format(y=1)"),
        (assembled_sql, "SQL_X: Final = SQL_Y.replace('a', 'b')"),
        (assembled_sql, "def f(x):\n    return rooms.SQL_Y + x"),
        (assembled_sql, "SQL_X: Final = ' '.join([SQL_Y, PART_Z])"),
        (assembled_sql, "def f(x):\n    return fill(TEMPLATE_X, x='1')"),
        (assembled_sql, "f = lambda x: fill(TEMPLATE_X, x='1')"),
        (assembled_sql, "def f(x):\n    return compose('SELECT :a.columns', x)"),
        (assembled_sql, "SQL_X: Final = fill(TEMPLATE_X, x=argument)"),
        (assembled_sql, "SQL_X: Final = fill(TEMPLATE_X, **given())"),
        (assembled_sql, "def f():\n    return page_statements(TEMPLATE_X, PARTS_X)"),
        (assembled_sql, "SQL_X: Final = directed_statements(TEMPLATE_X, given(), Y)"),
        (assembled_sql, "SQL_X: Final = fill_all(TEMPLATE_X, {'x': argument})"),
        (loose_sql, "parts: Final = {'x': 'SELECT 1'}"),
    ],
)
def test_a_check_sees_what_it_is_for(check: object, source: str) -> None:
    assert len(check("x.py", ast.parse(source))) == 1  # type: ignore[operator]


@pytest.mark.parametrize(
    "check,source",
    [
        (long_functions, "def f():\n" + "    pass\n" * (LINES_PER_FUNCTION - 1)),
        (mixed_classes, "class A(B, Protocol[T]): ..."),
        (loose_sql, "SQL_X: Final = 'SELECT 1'"),
        (loose_sql, "def f():\n    '''SELECT 1 is a statement.'''\n    g('Select a room')"),
        (long_sql, "SQL_X: Final = 'SELECT 1" + "\\n" * 150 + "'"),
        (numbered_sql, "SQL_X: Final = fill('SELECT e.membership = {JOIN}')"),
        (numbered_sql, "SQL_X: Final = 'SELECT COALESCE(e.membership, 0) AS membership'"),
        (loose_sql, "X: Final = compose('SELECT 1', Y)"),
        (loose_sql, "SQL_X: Final = fill('SELECT 1 = {JOIN}')"),
        (loose_sql, "SQL_X: Final = compose('SELECT 1', Y).sql"),
        (long_sql, f"SQL_X: Final = 'SELECT ${PARAMETERS_BY_HAND}'"),
        (assembled_sql, "SQL_X: Final = compose(fill(TEMPLATE_X, x=PART_X), Y).sql"),
        (assembled_sql, "SQL_X: Final = fill(TEMPLATE_X, x='1', y=PART_Y, **PARTS_Z)"),
        (assembled_sql, "SQL_X: Final = fill(TEMPLATE_X, x=fill(TEMPLATE_Y, y=PART_Y))"),
        (assembled_sql, "SQL_X: Final = page_statements(TEMPLATE_X, PARTS_X, Y, room_id='text')"),
        (assembled_sql, "def fill_all(x, y):\n    return fill(x, **{z: fill_all(z) for z in y})"),
        (loose_sql, "PARTS_X: Final = {'x': 'SELECT 1'}"),
        (assembled_sql, "def f(x):\n    return x + 'SELECTED', f'{x} rooms', ', '.join(x)"),
    ],
)
def test_a_check_lets_the_rest_pass(check: object, source: str) -> None:
    assert check("x.py", ast.parse(source)) == []  # type: ignore[operator]
