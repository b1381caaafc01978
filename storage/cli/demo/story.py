"""A room written by hand, so that a reader can check the results.

Alice and Bob are on this server, Carol and Mallory on others. Alice opens the room and shares its
history. For a while only members may see messages. Mallory is banned while his server is
unreachable, and his last messages arrive late. Two topics are set at the same time. A spam message
is redacted. Bob joins last, and Dave has joined and left.
"""

from dataclasses import dataclass, field
from typing import Final

from storage.testing import BuiltEvent, RoomBuilder

SERVERS: Final = ("s1.test", "s2.test", "s3.test")
ALICE, CAROL, MALLORY, BOB, DAVE = (
    "@user1:s1.test",
    "@user2:s2.test",
    "@user3:s3.test",
    "@user4:s1.test",
    "@user7:s1.test",
)
NAMES: Final = {ALICE: "Alice", CAROL: "Carol", MALLORY: "Mallory", BOB: "Bob", DAVE: "Dave"}


@dataclass(slots=True)
class DemoStory:
    """The room, and the events that the demonstration queries."""

    room: RoomBuilder
    marks: dict[str, BuiltEvent] = field(default_factory=dict)


def write(seed: int) -> DemoStory:
    """Return the room; its id follows from the seed."""
    story = DemoStory(RoomBuilder("11", servers=SERVERS, seed=seed))
    _beginning(story)
    _among_members(story)
    _apart(story)
    _together(story)
    return story


def _beginning(story: DemoStory) -> None:
    room = story.room
    room.start(ALICE, history_visibility="shared", users={CAROL: 50}, name="The pantry")
    room.topic(ALICE, "What is in the pantry?")
    room.message(ALICE, "The key hangs behind the door.")
    room.join(CAROL, displayname="Carol")
    room.join(DAVE, displayname="Dave")
    story.marks["early"] = room.message(CAROL, "There are still two jars of plums.")


def _among_members(story: DemoStory) -> None:
    room = story.room
    room.history_visibility(ALICE, "joined")
    room.message(DAVE, "Who ate the quince jelly?")
    story.marks["secret"] = room.message(ALICE, "It was me. Nobody needs to know.")
    room.leave(DAVE)
    room.join(MALLORY, displayname="Mallory")
    story.marks["spam"] = room.message(MALLORY, "CHEAP JAM!!! CHEAP JAM!!!")


def _apart(story: DemoStory) -> None:
    """Fork the room twice: Alice's and Mallory's servers, then Alice's and Carol's, are apart."""
    room = story.room
    here, there = room.fork(2)
    story.marks["ban"] = here.ban(ALICE, MALLORY, reason="advertising")
    there.message(MALLORY, "EVEN CHEAPER JAM!!!", expected="soft_failed")
    room.merge(here)
    here, there = room.fork(2)
    here.topic(ALICE, "Jam, but not for sale")
    story.marks["fork"] = there.topic(CAROL, "Plums and quinces")
    there.message(CAROL, "I tidied up the topic.")
    room.merge(here, there)


def _together(story: DemoStory) -> None:
    room = story.room
    room.redact(ALICE, story.marks["spam"], reason="advertising")
    room.history_visibility(ALICE, "shared")
    room.message(CAROL, "Both topics at once, how odd.")
    room.join(BOB, displayname="Bob")
    asked = room.message(BOB, "Hello! What did I miss?")
    room.react(CAROL, asked, "👋")
    story.marks["last"] = room.reply(ALICE, asked, "Nothing at all.")
