"""SQL templates: one text for statements that differ in a few parts, such as the direction.

A template is a module constant with `{name}` placeholders. `fill` puts a part into each of them:

    TEMPLATE_PAGE: Final[LiteralString] = "SELECT event_id FROM events ORDER BY depth {order}"
    SQL_NEWEST: Final[LiteralString] = fill(TEMPLATE_PAGE, order="DESC")

Call `fill` at module level only, with constants only. Values of a request are parameters of the
statement (`$1::text`), never parts. `tests/source/test_tidy.py` checks both.
"""

import re
from typing import Final, LiteralString

PLACEHOLDER: Final = re.compile(r"\{([a-z][a-z_]*)\}")


def fill(template: LiteralString, /, **parts: LiteralString) -> LiteralString:
    """Return the template with each `{name}` replaced by the part of that name.

    Blank space around a part is dropped. Other braces, such as those of `'{}'`, stay as they are.
    Raise ValueError for a placeholder without a part, a part without a placeholder, and a part that
    has a placeholder itself.
    """
    named, given = set(PLACEHOLDER.findall(template)), set(parts)
    if named != given:
        raise ValueError(f"no part for {sorted(named - given)}, no use of {sorted(given - named)}")
    unfilled = [name for name, part in parts.items() if PLACEHOLDER.search(part)]
    if unfilled:
        raise ValueError(f"fill these parts first: {unfilled}")
    filled = template
    for name, part in parts.items():
        filled = filled.replace("{" + name + "}", part.strip())
    return filled
