"""Lines of NDJSON: the PDU is cut out as it stands, whatever the spelling around it and in it."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import InvalidEvent
from storage.event.ndjson import Line, envelope, member, pdus_of, read_line
from storage.testing import SHAPES, generate_room, ndjson_line, respell

PDU = r'{ "type" : "m.x","content":{"a":[1e2, -0 ,1.0],"b":"\u00e9\/ \"}{é"} ,"depth":1e400 }'

SPELLINGS = {
    "alone": PDU,
    "alone with a line break": f" \t{PDU} \r\n",
    "a PDU with a key pdu": '{"sender":"@a:b","pdu":{"type":"not this"}}',
    "first": f'{{"pdu":{PDU},"origin":"live"}}',
    "last, odd spacing": f' {{ "origin"\t:\r"live" ,\t"pdu" :  {PDU}  }} ',
    "an escaped key": rf'{{"\u0070d\u0075":{PDU}}}',
    "the key nested before": f'{{"x":{{"pdu":{{"type":"no"}}}},"pdu":{PDU}}}',
    "the key nested after": f'{{"pdu":{PDU},"x":[{{"pdu":{{"type":"no"}}}}]}}',
    "the key as a text": f'{{"x":"\\"pdu\\":{{}}","pdu":{PDU},"y":"pdu"}}',
    "twice": f'{{"pdu":{{"type":"no"}},"pdu":{PDU}}}',
    "twice, first wrong": f'{{"pdu":[1,{{}}],"pdu":{PDU}}}',
    "numbers beyond measure": f'{{"x":{"9" * 6000},"y":-1e99999,"pdu":{PDU},"z":NaN}}',
    "braces in texts": f'{{"}}{{":"}}","pdu":{PDU}}}',
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_bytes_are_those_of_the_line(name: str) -> None:
    wanted = SPELLINGS[name] if name == "a PDU with a key pdu" else PDU
    assert read_line(SPELLINGS[name].encode()).pdu == wanted.encode()


def test_an_envelope_says_how_to_store() -> None:
    line = read_line(
        (
            f'{{"state_before":["$a","$b"],"room_version":"4","pdu":{PDU},'
            '"origin":"backfill","received":5}'
        ).encode()
    )
    assert line == Line(PDU.encode(), "4", "backfill", ("$a", "$b"))
    assert (line.room_id, line.depth) == (None, None)
    for text in ('{"room_id":"!r:s","depth":7}', '{"x":1,"pdu":{"room_id":"!r:s","depth":7}}'):
        line = read_line(text.encode())
        assert (line.room_id, line.depth) == ("!r:s", 7)
    for text in ('{"room_id":7,"depth":"7"}', '{"depth":NaN}', '{"depth":1e999}', '{"depth":null}'):
        line = read_line(text.encode())
        assert (line.room_id, line.depth) == (None, None)
    assert read_line(f'{{"pdu":{PDU}}}'.encode()) == Line(PDU.encode(), None, None, None)
    assert read_line(
        f'{{"pdu":{PDU},"origin":null,"room_version":null,"state_before":null}}'.encode()
    ) == Line(PDU.encode())


def test_lone_surrogates_and_control_characters_are_left_to_the_parser() -> None:
    for text in (r'{"type":"\ud800"}', '{"type":"\x01"}'):
        assert read_line(f'{{"pdu":{text}}}'.encode()).pdu == text.encode()


@pytest.mark.parametrize(
    "raw,told",
    [
        (b"", "not JSON: Expecting value at character 1"),
        (b"nonsense", "not JSON: Expecting value at character 1"),
        (b'{"type":"m.', "not JSON: Unterminated string starting at character 9"),
        (b'{"type":1', "not JSON: Expecting ',' delimiter at character 10"),
        (b'{"type":1}}', "not JSON: there is more after the end of the value, at character 11"),
        (
            b'{"type":1} {"type":2}',
            "not JSON: there is more after the end of the value, at character 11",
        ),
        (
            b"{'type':1}",
            "not JSON: Expecting property name enclosed in double quotes at character 2",
        ),
        (b'{"pdu":{}', "not JSON: Expecting ',' delimiter at character 10"),
        (b'["pdu"]', "not a JSON object"),
        (b"7", "not a JSON object"),
        (b'{"type":"\xff"}', "not UTF-8: byte 10 of the line"),
        (b'{"type":"\xed\xa0\x80"}', "not UTF-8: byte 10 of the line"),
        (b'{"pdu":' + b"[" * 100_000, "nested too deeply"),
        (b'{"pdu":"{}"}', "pdu is not an object"),
        (b'{"pdu":null}', "pdu is not an object"),
        (b'{"pdu":{},"room_version":11}', "room_version is not a string"),
        (
            b'{"pdu":{},"origin":"sideways"}',
            "origin 'sideways' is none of live, backfill, outlier, out_of_band",
        ),
        (
            b'{"pdu":{},"origin":["live"]}',
            "origin ['live'] is none of live, backfill, outlier, out_of_band",
        ),
        (b'{"pdu":{},"state_before":"$a"}', "state_before is not a list of event ids"),
        (b'{"pdu":{},"state_before":["$a",1]}', "state_before is not a list of event ids"),
        (b'{"pdu":{},"stripped_state":{}}', "stripped_state is not a list of objects"),
        (b'{"pdu":{},"stripped_state":[{},1]}', "stripped_state is not a list of objects"),
        (b'{"pdu_base64":"W10="}', "pdu_base64 is not an object"),
    ],
)
def test_a_bad_line_is_told_apart(raw: bytes, told: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        read_line(raw)
    assert caught.value.reason == told


@pytest.mark.parametrize("value", [r'"\ud800"', "1e999", "NaN"])
def test_stripped_state_that_cannot_be_stored_is_refused(value: str) -> None:
    with pytest.raises(InvalidEvent, match="stripped_state is not JSON: "):
        read_line(f'{{"pdu":{{}},"stripped_state":[{{"content":{value}}}]}}'.encode())


@pytest.mark.parametrize(
    "raw",
    [b'{"type":1,}', b'{"pdu_base64":"e30=!"}', b'{"pdu_base64":"e30"}', b'{"pdu_base64":"/w=="}'],
)
def test_a_bad_line_is_refused_with_the_words_of_the_reader(raw: bytes) -> None:
    with pytest.raises(InvalidEvent, match=r"^(pdu_base64 is )?not JSON( in base64)?: "):
        read_line(raw)


def test_generated_rooms_come_out_as_they_went_in() -> None:
    rng = random.Random(1)
    for event in generate_room(SHAPES["fork_heavy"], 300, seed=3):
        other = respell(event, rng)
        line = read_line(ndjson_line(other))
        assert (line.pdu, line.room_version, line.origin) == (
            other.pdu,
            other.room_version,
            other.origin,
        )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("pdu"), inner, max_size=3)
    ),
    max_leaves=10,
)
SPACE = st.text(" \t\r", max_size=2)


@given(
    pdu=st.dictionaries(st.text() | st.just("pdu"), VALUES),
    around=st.lists(st.tuples(st.text() | st.sampled_from(["pdu", "x"]), VALUES), max_size=4),
    place=st.integers(0, 4),
    ascii_only=st.booleans(),
    space=SPACE,
    data=st.data(),
)
def test_any_object_is_cut_out_of_any_envelope(
    pdu: dict[str, object],
    around: list[tuple[str, object]],
    place: int,
    ascii_only: bool,
    space: str,
    data: st.DataObject,
) -> None:
    own = {"room_version", "origin", "state_before", "sender"}
    inner = json.dumps(pdu, ensure_ascii=ascii_only, separators=(space + ",", ": "))
    members = [(key, json.dumps(value)) for key, value in around if key not in own]
    members = [
        *members[:place],
        ("pdu", inner),
        *((key, value) for key, value in members[place:] if key != "pdu"),
    ]
    glue = data.draw(SPACE)
    text = (
        "{"
        + f"{glue},{space}".join(
            f"{json.dumps(key)}{space}:{glue}{value}" for key, value in members
        )
        + space
        + "}"
    )
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # a lone surrogate that was not escaped has no bytes
        return
    assert read_line(encoded).pdu == inner.encode()


@pytest.mark.parametrize(
    "pdu", [PDU, '{"pdu":{}}', '{"a":\n1}', ' {"a":1} ', '{"pdu_base64":"e30="}']
)
def test_an_envelope_is_read_as_what_was_put_into_it(pdu: str) -> None:
    line = envelope(pdu.encode(), "11", None, ["$a"])
    assert b"\n" not in line
    assert read_line(line) == Line(pdu.encode(), "11", None, ("$a",))
    assert read_line(envelope(pdu.encode(), None, None)) == Line(pdu.encode())


def is_object(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw), dict)
    except ValueError:
        return False


@given(
    st.one_of(
        st.binary().filter(lambda raw: not is_object(raw)),
        st.sampled_from([b'{"a":1},"origin":"live"', b"[]", b"\xff{}", b'{"a":1']),
    )
)
def test_what_is_no_pdu_stays_none_in_an_envelope(raw: bytes) -> None:
    with pytest.raises(InvalidEvent):
        read_line(envelope(raw, "11", "live"))


@pytest.mark.parametrize("encoded", ["7", '"!"', '"e30"', '"/w=="', '"bm8="', '"W10="', "null"])
def test_bytes_given_as_base64_are_judged_as_well(encoded: str) -> None:
    with pytest.raises(InvalidEvent, match="pdu_base64"):
        read_line(f'{{"pdu_base64":{encoded}}}'.encode())
    assert read_line(b'{"pdu_base64":"eyJ4IjoKMX0="}').pdu == b'{"x":\n1}'


def test_an_envelope_holds_the_pdu_as_it_is_and_what_is_known_of_it() -> None:
    assert (
        envelope(b'{"a": 1}', "11", "live", ["$a"])
        == b'{"pdu":{"a": 1},"room_version":"11","origin":"live","state_before":["$a"]}'
    )
    assert envelope(b"{}", None, None) == b'{"pdu":{}}'
    stripped = [{"type": "m.room.name", "content": {"name": "é"}}]
    line = envelope(b"{}", None, "out_of_band", None, stripped)
    assert (
        line
        == (
            '{"pdu":{},"origin":"out_of_band",'
            '"stripped_state":[{"type":"m.room.name","content":{"name":"é"}}]}'
        ).encode()
    )
    assert read_line(line) == Line(b"{}", None, "out_of_band", None, tuple(stripped))
    assert read_line(b'{"pdu":{},"stripped_state":null}') == Line(b"{}")
    assert read_line(b'  {"stripped_state": [ ] ,"pdu":{}}') == Line(b"{}", stripped_state=())
    assert envelope(b"{}\n", None, "outlier") == b'{"pdu_base64":"e30K","origin":"outlier"}'
    assert envelope(b"[", "1", None) == b'{"pdu_base64":"Ww==","room_version":"1"}'


@pytest.mark.parametrize(
    "raw,pdus",
    [
        ('{"pdus":[]}', []),
        (' { "x" : [1] , "pdus" : [ {"a": "é]"} ,{ } ] , "y":2}', ['{"a": "é]"}', "{ }"]),
        ('{"pdus":[{"a":1},{"b":[2]},{"c":3}]}', ['{"a":1}', '{"b":[2]}', '{"c":3}']),
        ('{"pdus":[7, "x" ]}', ["7", '"x"']),
        ('{"pdus":[1],"pdus":[2]}', ["2"]),
    ],
)
def test_the_pdus_of_an_answer_come_out_byte_for_byte(raw: str, pdus: list[str]) -> None:
    assert pdus_of(raw.encode()) == [pdu.encode() for pdu in pdus]


@pytest.mark.parametrize(
    "raw,told",
    [
        (b"[]", "not an object with a list pdus"),
        (b"{}", "not an object with a list pdus"),
        (b'{"pdus":{}}', "not an object with a list pdus"),
        (
            b"{",
            "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (
            b"\xff",
            "not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
    ],
)
def test_an_answer_without_pdus_is_refused(raw: bytes, told: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        pdus_of(raw)
    assert caught.value.reason == told


def test_a_member_is_the_last_of_its_name_or_none() -> None:
    text = ' {"a" : 1 ,"b":[ 2 ], "a":"x" }'
    assert member(text, 1, "a") == '"x"'
    assert member(text, 1, "b") == "[ 2 ]"
    assert member(text, 1, "c") is None
    assert member("{ }", 0, "a") is None
