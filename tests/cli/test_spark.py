"""`room-storage spark`: what it says where something is missing.

What it does is tested in tests/pipeline.
"""

import pytest
from unpaddedbase64 import encode_base64

from storage.cli import spark as commands
from storage.errors import DatabaseUnavailable, InputError
from tests.cli.running import NOBODY, room_storage

pytest.importorskip("pyspark")

from storage.pipeline.failures import of_text
from storage.pipeline.session import check_java


def test_java_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="openjdk-17"):
        check_java({"PATH": ""})
    with pytest.raises(InputError, match="JAVA_HOME=/nowhere"):
        check_java({"PATH": "", "JAVA_HOME": "/nowhere"})


def test_a_setting_has_a_name_and_a_value() -> None:
    assert commands._setting("spark.a=b=c") == ("spark.a", "b=c")
    with pytest.raises(InputError, match="KEY=VALUE"):
        commands._setting("spark.a")


def test_an_error_of_an_executor_is_told_by_its_name() -> None:
    trace = (
        "org.apache.spark.SparkException: …\nTraceback:\n  File x\n"
        "storage.errors.DatabaseUnavailable: no route (SQLSTATE 08001)\n\n"
    )
    assert "DatabaseUnavailable in an executor: no route" in str(of_text(trace))
    assert isinstance(of_text(trace), DatabaseUnavailable)
    assert (
        str(of_text("Aborted\nCaused by: java.io.IOException: No space left on device\n\tat x.y"))
        == "Spark: IOException: No space left on device"
    )
    assert isinstance(of_text("storage.errors.WrongServerName: other"), InputError)
    assert str(of_text("something else\nmore")) == "Spark: something else"


def test_how_a_command_ends_that_cannot_begin() -> None:
    without_java = room_storage("spark", "verify", "--dsn", NOBODY, PATH="", JAVA_HOME="")
    assert (without_java.returncode, without_java.stdout) == (2, "")
    assert without_java.stderr.startswith("error: Spark needs Java 17")


def test_a_database_that_cannot_be_reached_is_told_before_spark_starts() -> None:
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    done = room_storage("spark", "verify", "--dsn", NOBODY)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)


def test_a_key_is_a_server_a_key_id_and_base64() -> None:
    text = encode_base64(bytes(range(32)))
    assert bytes(commands._keys([f"s1.test ed25519:1 {text}"])["s1.test", "ed25519:1"]) == bytes(
        range(32)
    )
    assert commands._keys(None) == {}
    for wrong in ("s1.test ed25519:1", f"s1.test rsa:1 {text}", "s1.test ed25519:1 short"):
        with pytest.raises(InputError, match="allow-key"):
            commands._keys([wrong])
