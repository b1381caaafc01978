"""References and packs: what is written is read, and no damage goes unnoticed."""

import pytest

from storage.codec import LostBytes, Reference, StoredBytes, decode
from storage.codec.codec import FORMAT, LENGTH_MAX, REFERENCE_BYTES
from storage.codec.pack import (
    END,
    START,
    TRAILER_BYTES,
    PackBuilder,
    PackEntry,
    damaged_entries,
    parse_index,
    record_range,
    stored_form,
)
from storage.errors import StorageCorrupt

FORMS = [b"{}", b'{"a":1}', b"\xc2" + bytes(40), b'{"long":"' + b"x" * 300 + b'"}']


def built(pack: int = 7) -> tuple[bytes, list[Reference], list[PackEntry]]:
    builder = PackBuilder(pack)
    references = [
        builder.add(f"!{number // 2}:a", f"${number}", form) for number, form in enumerate(FORMS)
    ]
    return builder.finished(), references, builder.entries


@pytest.mark.parametrize(
    "numbers", [(0, 0, 0), (7, 8, 270), ((1 << 31) - 1, (1 << 32) - 1, LENGTH_MAX)]
)
def test_a_reference_is_read_as_it_was_written(numbers: tuple[int, int, int]) -> None:
    stored = Reference(*numbers).to_bytes()
    assert len(stored) == REFERENCE_BYTES
    assert Reference.parse(stored) == numbers
    assert Reference.parse(stored + b"\0") is None
    assert Reference.parse(b"{" + stored[1:]) is None


def test_no_flipped_bit_makes_a_reference_of_another_form_or_one_of_a_reference() -> None:
    others = {0x7B, 0x20, 0x09, 0x0A, 0x0D, 0xC1, 0xC2}
    assert not {FORMAT[0] ^ 1 << bit for bit in range(8)} & others


def test_all_forms_are_read_again() -> None:
    data, references, entries = built()
    for reference, form in zip(references, FORMS, strict=True):
        start, end = record_range(reference)
        assert stored_form(reference, data[start:end]) == form
    assert parse_index(data) == parse_index(data[-400:]) == entries
    assert [one.reference(7) for one in entries] == references
    assert damaged_entries(7, data, entries) == []
    assert (data[:8], data[-8:]) == (START, END)


def test_each_flipped_bit_is_noticed() -> None:
    data, references, _ = built()
    for bit in range(8 * len(START), 8 * (len(data) - len(END))):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        wrong = bytes(flipped)
        try:
            found = damaged_entries(7, wrong, parse_index(wrong))
        except ValueError:
            continue
        assert len(found) == 1, bit
        [reference] = [one for one in references if one.offset == found[0].offset]
        start, end = record_range(reference)
        with pytest.raises(ValueError, match="checksum"):
            stored_form(reference, wrong[start:end])


def test_the_record_of_another_reference_does_not_fit() -> None:
    data, references, _ = built()
    start, end = record_range(references[1])
    record = data[start:end]
    for wrong in (
        references[1]._replace(pack=6),
        references[1]._replace(offset=references[1].offset + 1),
    ):
        with pytest.raises(ValueError, match="checksum"):
            stored_form(wrong, record)
    with pytest.raises(ValueError, match="cut off"):
        stored_form(references[1], record[:-1])
    with pytest.raises(ValueError, match="removed"):
        stored_form(references[1], bytes(len(record)))


@pytest.mark.parametrize("size", [0, 10, TRAILER_BYTES, 60])
def test_a_pack_that_is_cut_off_has_no_index(size: int) -> None:
    with pytest.raises(ValueError, match=r"end of the pack|index"):
        parse_index(built()[0][:size])


def test_lost_bytes_and_references_are_never_decoded() -> None:
    reference = Reference(7, 8, 9)
    lost = LostBytes.of(reference, "the pack is missing", "file:///pack-7-a")
    with pytest.raises(StorageCorrupt, match="the pack is missing") as error:
        decode(StoredBytes(lost), "$a", "!r:a")
    assert error.value.ids == {"event_id": "$a", "pack": 7, "url": "file:///pack-7-a"}
    with pytest.raises(StorageCorrupt):
        decode(StoredBytes(reference.to_bytes()), "$a", "!r:a")


def test_a_form_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        PackBuilder(1).add("!r:a", "$a", bytes(LENGTH_MAX + 1))
