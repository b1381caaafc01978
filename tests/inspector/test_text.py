"""Text for people: what hides becomes visible, and numbers and times have one form."""

import math
import re
from pathlib import Path

import pytest

from storage.inspector import rendering
from storage.inspector.rendering import Links, environment
from storage.inspector.text import (
    ago,
    counted,
    duration,
    level,
    moment,
    number,
    one_line,
    shortened,
    size,
    visible,
)

PACKAGE = Path(rendering.__file__).parent


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain", "plain"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("käse 日本語 שלום", "käse 日本語 שלום"),
        ("a\u202eb", "a⟦U+202E⟧b"),  # reverses what follows
        ("a\u2066b\u2069", "a⟦U+2066⟧b⟦U+2069⟧"),
        ("a\0b\x1b[31m\x7f\x85", "a⟦U+0000⟧b⟦U+001B⟧[31m⟦U+007F⟧⟦U+0085⟧"),
        ("zero\u200bwidth\ufeff\u2060", "zero⟦U+200B⟧width⟦U+FEFF⟧⟦U+2060⟧"),
        ("soft\u00adhyphen", "soft⟦U+00AD⟧hyphen"),
        ("line\u2028separator", "line⟦U+2028⟧separator"),
        ("tag\U000e0041", "tag⟦U+E0041⟧"),
        ("blank\u3164\u2800", "blank⟦U+3164⟧⟦U+2800⟧"),
        ("variation\ufe0f\U000e0100", "variation⟦U+FE0F⟧⟦U+E0100⟧"),
        ("private\ue000", "private⟦U+E000⟧"),
        ("carriage\r", "carriage⟦U+000D⟧"),
        ("a" + "\u0301" * 6, "a" + "\u0301" * 4 + "⟦U+0301⟧⟦U+0301⟧"),  # a pile of accents
    ],
)
def test_what_hides_becomes_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert "\n" not in one_line(text)


def test_values_have_one_form() -> None:
    assert (number(1234567.4), counted(1, "event"), counted(2_000, "event")) == (
        "1,234,567",
        "1 event",
        "2,000 events",
    )
    assert [size(one) for one in (0, 999, 1_000, 1_999_999, 5 * 10**9, 10**15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.9 MB",
        "5.0 GB",
        "1000.0 TB",
    ]
    assert [moment(one) for one in (None, 0, 1_700_000_000_999, 2**63 - 1)] == [
        "",
        "1970-01-01 00:00:00",
        "2023-11-14 22:13:20",
        "9223372036854775807 ms",
    ]
    assert [duration(one) for one in (999, 60_000, 7_200_000, 3 * 86_400_000)] == [
        "0 seconds",
        "1 minute",
        "2 hours",
        "3 days",
    ]
    assert [ago(one, 100_000) for one in (None, 40_000, 160_000)] == [
        "",
        "1 minute ago",
        "in 1 minute",
    ]
    assert (shortened("abc"), shortened("a" * 20)) == ("abc", "a" * 14 + "…")
    assert (level(100), level(math.inf), level(math.inf, "none")) == ("100", "creator", "none")


def test_links_encode_every_value() -> None:
    link = Links("/a b/")
    assert link("/room", id="!a/b?c#d&e:ü", other=None) == (
        "/a%20b/room?id=%21a%2Fb%3Fc%23d%26e%3A%C3%BC"
    )
    assert link.to("/room", {"self": "x", "a b": '"'}) == "/a%20b/room?self=x&a%20b=%22"
    assert link("/") == "/a%20b/"


def test_a_template_escapes_and_shows_every_value() -> None:
    template = environment().from_string('<a title="{{ x }}">{{ x }}</a>{{ y }}{{ z }}')
    given = "\"'><script>\u202e"
    shown = "&#34;&#39;&gt;&lt;script&gt;⟦U+202E⟧"
    assert template.render(x=given, y=7, z=None) == f'<a title="{shown}">{shown}</a>7'


def test_no_template_marks_a_value_as_markup() -> None:
    templates = sorted((PACKAGE / "templates").glob("*.html"))
    assert len(templates) > 15
    for path in templates:
        text = path.read_text("utf-8")
        assert not re.search(r"\|\s*safe|autoescape|Markup", text), path.name
        assert not re.search(r"\sstyle=|<style|\son[a-z]+=|javascript:", text), path.name
        for script in re.findall(r"<script[^>]*>", text):
            assert "src=" in script, path.name
            assert 'nonce="{{ nonce }}"' in script, path.name
        assert not re.search(r'(href|src|action)="(https?:)?//', text), path.name
        for unquoted in re.findall(r"=\{\{", text):
            raise AssertionError(f"{path.name}: {unquoted} without quotes")


def test_no_script_makes_markup_of_text() -> None:
    for path in (PACKAGE / "static").glob("*.js"):
        text = path.read_text("utf-8")
        sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(sinks, text), path.name
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path.name
