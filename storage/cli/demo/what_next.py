"""The end of the demonstration: commands to go on with, which work as they are printed."""

import shlex
from collections.abc import Iterator

from storage.cli.demo.place import DemoPlace
from storage.cli.demo.story import BOB, DemoStory
from storage.cli.demo.teller import TablePrinter


def what_next(teller: TablePrinter, place: DemoPlace, story: DemoStory) -> None:
    """Print the commands."""
    teller.line("\nWhat next\n")
    for command in commands(place, story):
        teller.line(f"  {command}")
    teller.line(f"\nTo delete the data: {place.removal}")


def commands(place: DemoPlace, story: DemoStory) -> Iterator[str]:
    """Yield lines for a shell: settings first, then commands that use the story's room."""
    room, event = story.room.room_id, story.marks["secret"].event_id
    yield place.settings
    for arguments in (
        ["stats"],
        ["explain-visibility", event, BOB],
        ["explain", "messages", "--user", BOB, "--room", room],
        ["export", "demo.ndjson", "--room", room],
        ["verify", "--room", room],
    ):
        yield shlex.join(["room-storage", *arguments])
