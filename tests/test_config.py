"""Limits come from one place, and each is explained."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from storage import Config, InputError
from storage import config as module


def test_the_environment_changes_what_it_names() -> None:
    config = Config.from_env({"STORAGE_POOL_SIZE_MAX": "3", "STORAGE_EMBEDDED_FSYNC": "off", "STORAGE_DSN": "ignored"})
    assert config == Config(pool_size_max=3, embedded_fsync=False)
    assert Config.from_env({}) == Config()


@pytest.mark.parametrize(
    "name,value", [("STORAGE_POOL_SIZE_MAX", "three"), ("STORAGE_POOL_SIZE_MAX", ""), ("STORAGE_EMBEDDED_FSYNC", "maybe")]
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        Config.from_env({name: value})


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().pool_size_max = 1  # type: ignore[misc]


def test_each_field_is_explained() -> None:
    [definition] = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    explained = {
        field.target.id
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    assert {field.name for field in fields(Config)} == explained
