"""An extension of griffe, which reads the package for mkdocstrings.

`Store` lists functions of other modules: `append = writing.append`. To griffe these are attributes;
here they become methods. A NamedTuple gets a constructor with its fields, and public names in
docstrings become links. Docstrings name the errors of a call as a sentence: "Raises" is added.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from griffe import (
    Attribute,
    Class,
    Expr,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
)
from griffe import Parameters as GriffeParameters

import storage

FACADE: Final = "store.facade.Store"
NAME: Final = re.compile(r"(?<![`\[])`(?P<name>\w+(?:\.\w+)?)`(?!`)")


ERRORS: Final = "|".join(
    name
    for name in storage.__all__
    if isinstance(getattr(storage, name), type)
    and issubclass(getattr(storage, name), storage.StorageError)
)
RAISED: Final = re.compile(
    rf"(?P<before>^|\n\s*\n\s*|\.\s)(?P<error>`(?:{ERRORS})`(?=[.,]| for | if | or | and ))"
)
"""A sentence of a docstring that begins with the name of an error."""


class StoreCalls(Extension):
    """Replaces the attributes of `Store` by methods, once the package is loaded."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Change the loaded package."""
        if pkg.name != storage.__name__:
            return
        facade = pkg[FACADE]
        for name, target in calls(facade):
            found = pkg[target.removeprefix(f"{pkg.name}.")]
            facade.set_member(name, method_of(found, facade))
        for found in documented(pkg):
            if isinstance(found, Class) and "NamedTuple" in map(str, found.bases):
                found.set_member("__init__", constructor_of(found))
            if found.docstring:
                said = RAISED.sub(r"\g<before>Raises \g<error>", found.docstring.value)
                found.docstring.value = NAME.sub(linked, said)


def calls(facade: Class) -> Iterator[tuple[str, str]]:
    """Yield the name of each call, and the path of its function."""
    for name, member in list(facade.members.items()):
        if isinstance(member, Attribute) and isinstance(member.value, Expr):
            yield name, member.value.canonical_path


def method_of(function: Function, facade: Class) -> Function:
    """Return a function as a method: without its first parameter, the store."""
    method = Function(
        function.name,
        parameters=GriffeParameters(*list(function.parameters)[1:]),
        returns=function.returns,
        lineno=function.lineno,
        endlineno=function.endlineno,
        docstring=function.docstring,
        parent=facade,
    )
    method.labels = set(function.labels)
    return method


def constructor_of(row: Class) -> Function:
    """Return the constructor of a NamedTuple: its fields are the parameters."""
    fields = [
        Parameter(
            member.name,
            annotation=member.annotation,
            kind=ParameterKind.positional_or_keyword,
            default=member.value,
        )
        for member in row.members.values()
        if isinstance(member, Attribute) and "instance-attribute" in member.labels
    ]
    own = Parameter("self", kind=ParameterKind.positional_or_keyword)
    return Function("__init__", parameters=GriffeParameters(own, *fields), parent=row)


def documented(found: Object) -> Iterator[Object]:
    """Yield an object and its members, without those that are imported."""
    yield found
    for member in found.members.values():
        if not member.is_alias:
            yield from documented(member)  # type: ignore[arg-type]  # no alias


def linked(match: re.Match[str]) -> str:
    """Return a link for a public name, or a call of a store; else the text."""
    name = match["name"]
    owner, _, attribute = name.rpartition(".")
    if not owner and name in storage.__all__ and isinstance(getattr(storage, name), type):
        return f"[`{name}`][storage.{name}]"
    if owner in {"store", "Store"} and callable(getattr(storage.Store, attribute, None)):
        return f"[`{name}`][storage.Store.{attribute}]"
    return match[0]
