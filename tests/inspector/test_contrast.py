"""Contrast of the colours, computed from the variables of the style sheet (WCAG 2.2, level AA)."""

import re
from itertools import product
from pathlib import Path

import pytest

from storage.inspector import rendering

STYLE = (Path(rendering.__file__).parent / "static" / "inspector.css").read_text("utf-8")
SURFACES = ("background", "card")
LANES = [f"lane-{number}" for number in range(6)]
TEXT = [
    *product(("text", "muted", "link"), (*SURFACES, "field")),
    ("flag-text", "flag-background"),
    ("warn-text", "warn-background"),
    ("bad-text", "bad-background"),
    ("good-text", "good-background"),
    ("button-text", "button-background"),
]
MARKS = [
    *product((*LANES, "focus", "line", "bad-text"), SURFACES),
    ("link", "flag-background"),  # the edge of an answer
    ("good-text", "good-background"),
]


def themes() -> dict[str, dict[str, str]]:
    """Return the colours of both themes: the dark one overrides."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
    pairs = {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for name, block in (("light", light), ("dark", dark))
    }
    return {"light": pairs["light"], "dark": pairs["light"] | pairs["dark"]}


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_formula() -> None:
    assert contrast("#000000", "#ffffff") == 21
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_have_enough_contrast(theme: str) -> None:
    colours = themes()[theme]
    low = {
        f"{one} on {other}": round(contrast(colours[one], colours[other]), 2)
        for pairs, least in ((TEXT, 4.5), (MARKS, 3.0))
        for one, other in pairs
        if contrast(colours[one], colours[other]) < least
    }
    assert low == {}


def test_every_colour_is_a_variable_and_is_checked() -> None:
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE))
    rules = STYLE.split("* { box-sizing", 1)[1]
    assert re.findall(r"#[0-9a-f]{3,8}\b", rules) == []
    checked = {name for pair in (*TEXT, *MARKS) for name in pair}
    assert used - checked == {"faint", "row", "lanes"}  # a line that only decorates; two lengths
    assert set(themes()["light"]) - used == set()
    assert "colour" not in re.findall(r"\bcolor: (\w+)", rules)
