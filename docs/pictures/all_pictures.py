"""The pictures by name."""

from collections.abc import Callable, Mapping
from typing import Final

from docs.pictures import (
    append,
    audience_numbers,
    chain_cover,
    event_life,
    positions,
    purge_phases,
    schema,
    state_group_levels,
    sync,
)
from docs.pictures.canvas import Canvas

PICTURES: Final[Mapping[str, Callable[[], Canvas]]] = {
    "append": append.draw,
    "audience-numbers": audience_numbers.draw,
    "chain-cover": chain_cover.draw,
    "event-life": event_life.draw,
    "positions": positions.draw,
    "purge-phases": purge_phases.draw,
    "schema": schema.draw,
    "state-group-levels": state_group_levels.draw,
    "sync": sync.draw,
}
