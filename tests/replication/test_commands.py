"""Every command, as a line and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import ProtocolError
from storage.replication import commands
from storage.replication.commands import (
    LARGEST_TOKEN,
    LINE_BYTES_MAX,
    CancelTask,
    ClearUserSync,
    Command,
    Error,
    FederationAck,
    LockReleased,
    Name,
    NewActiveTask,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    ServerCommand,
    UserIp,
    UserSync,
    encode,
    parse,
)

OF_THE_DOCUMENT = [
    ("SERVER example.com", ServerCommand("example.com")),
    ("REPLICATE", Replicate()),
    ("POSITION events master 53 53", Position("events", "master", 53, 53)),
    ("SERVER localhost:8823", ServerCommand("localhost:8823")),
    ("PING 1490197665618", Ping("1490197665618")),
    ("NAME synapse.app.appservice", Name("synapse.app.appservice")),
    ("POSITION events master 1 1", Position("events", "master", 1, 1)),
    ("POSITION backfill master 1 1", Position("backfill", "master", 1, 1)),
    ("POSITION caches master 1 1", Position("caches", "master", 1, 1)),
    (
        (
            "RDATA caches master 2 "
            '["get_user_by_id",["@01register-user:localhost:8823"],1490197670513]'
        ),
        Rdata(
            "caches",
            "master",
            2,
            ["get_user_by_id", ["@01register-user:localhost:8823"], 1490197670513],
        ),
    ),
    (
        (
            'RDATA events master 14 ["$149019767112vOHxz:localhost:8823", '
            '"!AFDCvgApUmpdfVjIXm:localhost:8823","m.room.guest_access","",null]'
        ),
        Rdata(
            "events",
            "master",
            14,
            [
                "$149019767112vOHxz:localhost:8823",
                "!AFDCvgApUmpdfVjIXm:localhost:8823",
                "m.room.guest_access",
                "",
                None,
            ],
        ),
    ),
    ("PING 1490197675618", Ping("1490197675618")),
    ("ERROR server stopping", Error("server stopping")),
    (
        'RDATA caches master batch ["get_user_by_id",["@test:localhost:8823"],1490197670513]',
        Rdata(
            "caches", "master", None, ["get_user_by_id", ["@test:localhost:8823"], 1490197670513]
        ),
    ),
    (
        'RDATA caches master 54 ["get_user_by_id",["@test4:localhost:8823"],1490197670513]',
        Rdata("caches", "master", 54, ["get_user_by_id", ["@test4:localhost:8823"], 1490197670513]),
    ),
    (
        'RDATA caches master 550953771 ["get_user_by_id", ["@bob:example.com"], 1550574873251]',
        Rdata(
            "caches", "master", 550953771, ["get_user_by_id", ["@bob:example.com"], 1550574873251]
        ),
    ),
    (
        'RDATA caches master 550953772 ["get_user_by_id", null, 1550574873252]',
        Rdata("caches", "master", 550953772, ["get_user_by_id", None, 1550574873252]),
    ),
]

OF_THE_FIELD = [
    (
        "USER_SYNC worker1 @a:b.c PHONE start 1490197665618",
        UserSync("worker1", "@a:b.c", "PHONE", True, 1490197665618),
    ),
    ("USER_SYNC worker1 @a:b.c None end 0", UserSync("worker1", "@a:b.c", None, False, 0)),
    (
        "USER_SYNC worker1 @a:b.c start 12",
        UserSync("worker1", "@a:b.c", None, True, 12, has_device=False),
    ),
    (
        "USER_SYNC worker1 @a:b.c my start phone end 12",
        UserSync("worker1", "@a:b.c", "my start phone", False, 12),
    ),
    ("USER_SYNC worker1 @a:b.c  end 12", UserSync("worker1", "@a:b.c", "", False, 12)),
    ("CLEAR_USER_SYNC worker1", ClearUserSync("worker1")),
    ("FEDERATION_ACK sender1 4711", FederationAck("sender1", 4711)),
    ("REMOTE_SERVER_UP matrix.org", RemoteServerUp("matrix.org")),
    (
        'USER_IP @a:b.c ["tok","::1","curl 8",null,7]',
        UserIp("@a:b.c", "tok", "::1", "curl 8", None, 7),
    ),
    (
        'USER_IP @a:b.c ["tok", "::1", "curl \\u00e9", "D", 7]',
        UserIp("@a:b.c", "tok", "::1", "curl \u00e9", "D", 7),
    ),
    ('LOCK_RELEASED ["w1","purge","!r:b.c"]', LockReleased("w1", "purge", "!r:b.c")),
    ("NEW_ACTIVE_TASK 0a1b", NewActiveTask("0a1b")),
    ("CANCEL_TASK 0a1b", CancelTask("0a1b")),
    ("PING", Ping("")),
    ("ERROR", Error("")),
    ("ERROR  two  spaces ", Error(" two  spaces ")),
    ("POSITION backfill master -12 -10", Position("backfill", "master", -12, -10)),
]


@pytest.mark.parametrize("line,command", OF_THE_DOCUMENT + OF_THE_FIELD)
def test_a_line_is_read_and_written_as_it_was(line: str, command: Command) -> None:
    assert parse(line) == command
    assert str(parse(line)) == line
    assert encode(parse(line)) == line.encode() + b"\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_end_of_a_line_does_not_count(end: str) -> None:
    assert parse("PING 1" + end) == Ping("1")


@pytest.mark.parametrize("line", ["REPLICATE ", "PING ", "ERROR "])
def test_a_space_after_a_lone_name_does_not_count(line: str) -> None:
    assert str(parse(line)) == line.strip()


def test_json_is_written_without_spaces_and_in_ascii() -> None:
    assert str(Rdata("events", "w", 7, ["$é", None, {"a": 1}, "\U0001f600\n\x7f"])) == (
        'RDATA events w 7 ["$\\u00e9",null,{"a":1},"\\ud83d\\ude00\\n\\u007f"]'
    )


def test_every_command_of_the_protocol_is_known() -> None:
    names = """SERVER RDATA POSITION ERROR PING NAME REPLICATE USER_SYNC CLEAR_USER_SYNC
    FEDERATION_ACK REMOTE_SERVER_UP USER_IP LOCK_RELEASED NEW_ACTIVE_TASK CANCEL_TASK"""
    assert {kind.NAME for kind in commands.COMMANDS} == set(names.split())


def test_an_access_token_is_not_shown() -> None:
    assert "secret" not in repr(UserIp("@a:b.c", "secret", "::1", "curl", None, 7))


# --------------------------------------------------------------------------------------------------
# bad lines


@pytest.mark.parametrize(
    "line,reason",
    [
        ("", "blank"),
        ("   ", "blank"),
        ("HELLO", "unknown command"),
        ("hello there", "unknown command"),
        ("ping 1", "unknown command"),
        (" PING 1", "unknown command"),
        ("SERVER", "server name"),
        ("SERVER a b", "server name"),
        ("NAME", "name"),
        ("NAME  ", "name"),
        ("REPLICATE all now", "no arguments"),
        ("RDATA", "0 of 4"),
        ("RDATA events", "1 of 4"),
        ("RDATA events w 1", "3 of 4"),
        ("RDATA events w 1 ", "not JSON"),
        ("RDATA events w 1 [1", "not JSON"),
        ("RDATA events w 1 [NaN]", "not JSON"),
        ("RDATA events w one [1]", "not a number"),
        ("RDATA events w 01 [1]", "not a number"),
        ("RDATA events w 1.0 [1]", "not a number"),
        ("RDATA events w 9223372036854775808 [1]", "not a number"),
        ("RDATA events w Batch [1]", "not a number"),
        ("RDATA  w 1 [1]", "stream name"),
        ("RDATA events  1 [1]", "instance name"),
        ('RDATA events w 1 ["\\ud800"]', "not JSON"),
        ("POSITION events w 1", "3 of 4"),
        ("POSITION events w 1 2 3", "not a number"),
        ("POSITION events w 1 ", "not a number"),
        ("POSITION events w +1 2", "not a number"),
        ("POSITION events w \u0661 2", "not a number"),
        ("USER_SYNC w @a:b.c", "2 of 3"),
        ("USER_SYNC w @a:b.c start", "neither start nor end"),
        ("USER_SYNC w @a:b.c begin 1", "neither start nor end"),
        ("USER_SYNC w @a:b.c D start now", "not a number"),
        ("CLEAR_USER_SYNC", "instance name"),
        ("FEDERATION_ACK 12", "1 of 2"),
        ("FEDERATION_ACK w 12 13", "not a number"),
        ("REMOTE_SERVER_UP", "server name"),
        ("USER_IP @a:b.c", "1 of 2"),
        ('USER_IP @a:b.c ["t","ip","ua",null]', "not [access token"),
        ('USER_IP @a:b.c ["t","ip","ua",null,"7"]', "not [access token"),
        ('USER_IP @a:b.c {"access_token":"t"}', "not [access token"),
        ('LOCK_RELEASED ["w","n"]', "not [worker"),
        ("LOCK_RELEASED w n k", "not JSON"),
        ("NEW_ACTIVE_TASK", "task id"),
        ("CANCEL_TASK ", "task id"),
        ("PING 1\nPING 2", "more than one line"),
        ("PING a\rb", "line break"),
    ],
)
def test_a_bad_line_is_refused_with_its_reason(line: str, reason: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(line)
    assert reason in caught.value.reason
    assert caught.value.line == line


def test_a_line_has_at_most_16_kib() -> None:
    fits = "ERROR " + "x" * (LINE_BYTES_MAX - 6)
    assert str(parse(fits)) == fits
    for longer in (fits + "x", "ERROR " + "é" * (LINE_BYTES_MAX // 2)):
        with pytest.raises(ProtocolError, match="more than 16384 bytes"):
            parse(longer)
        with pytest.raises(ProtocolError, match="more than 16384 bytes"):
            encode(Error(longer[6:]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerCommand("a b"),
        lambda: Rdata("events", "two words", 1, []),
        lambda: Rdata("ev\nents", "w", 1, []),
        lambda: Position("", "w", 1, 1),
        lambda: Error("two\nlines"),
        lambda: UserSync("w", "@a:b.c", "None", True, 1),
        lambda: UserSync("w", "@a:b.c", "D", True, 1, has_device=False),
        lambda: UserSync("w", "@a:b.c", "D\n", True, 1),
        lambda: Name(" "),
        lambda: str(Rdata("events", "w", 1, [object()])),
        lambda: encode(Error("\ud800")),
    ],
)
def test_what_would_not_come_back_from_its_line_is_refused(make: object) -> None:
    with pytest.raises(ProtocolError):
        make()  # type: ignore[operator]


def test_any_reason_can_be_told_as_an_error() -> None:
    line = encode(Error.of("two\nlines " + "é" * LINE_BYTES_MAX)).decode()
    assert line.startswith("ERROR two lines é")
    assert line.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# round trips

words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=" \r\n"), min_size=1, max_size=20
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=40)
some_text = texts.filter(lambda text: text.strip() != "")
tokens = st.integers(-LARGEST_TOKEN, LARGEST_TOKEN)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | any_text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=10,
)
some_commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(ServerCommand, words),
    st.builds(Rdata, words, words, st.none() | tokens, json_values),
    st.builds(Position, words, words, tokens, tokens),
    st.builds(Error, texts),
    st.builds(Ping, texts),
    st.builds(Name, some_text),
    st.builds(Replicate),
    st.builds(
        UserSync,
        words,
        words,
        st.none() | texts.filter(lambda text: text != "None"),
        st.booleans(),
        tokens,
    ),
    st.builds(UserSync, words, words, st.none(), st.booleans(), tokens, st.just(False)),
    st.builds(ClearUserSync, words),
    st.builds(FederationAck, words, tokens),
    st.builds(RemoteServerUp, words),
    st.builds(
        UserIp, words, any_text, any_text, any_text, st.none() | any_text, st.integers(0, 2**53)
    ),
    st.builds(LockReleased, any_text, any_text, any_text),
    st.builds(NewActiveTask, some_text),
    st.builds(CancelTask, some_text),
)


@given(some_commands)
def test_every_command_comes_back_from_its_line(command: Command) -> None:
    line = str(command)
    assert "\n" not in line
    assert parse(line) == command
    assert str(parse(line)) == line


@given(words, words, tokens, json_values)
def test_a_row_may_be_written_in_any_json(
    stream: str, writer: str, token: int, row: object
) -> None:
    line = f"RDATA {stream} {writer} {token} {json.dumps(row, ensure_ascii=False)}"
    assert parse(line) == Rdata(stream, writer, token, row)
    assert str(parse(line)) == line


@given(st.sampled_from(commands.COMMANDS), st.text(max_size=60))
def test_no_line_does_anything_but_parse_or_be_refused(kind: type[Command], rest: str) -> None:
    try:
        command = parse(f"{kind.NAME} {rest}")
    except ProtocolError:
        return
    assert parse(str(command)) == command
