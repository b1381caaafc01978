"""The actions in a generated room, by name.

Each action does one thing that the state of its side allows, or returns None.
"""

from collections.abc import Callable, Mapping
from typing import Final

from storage.testing import assembly
from storage.testing import world as population
from storage.testing.assembly import number_of, server_of
from storage.testing.model import BuiltEvent
from storage.testing.world import MODERATORS_MAX, GeneratedWorld, PartitionSide, RecentMessage

Action = Callable[[GeneratedWorld], BuiltEvent | None]

REACTIONS: Final = ("👍", "❤️", "🎉", "😄", "+1")
VISIBILITIES: Final = ("world_readable", "shared", "shared", "invited", "joined")


# Talk


def message(world: GeneratedWorld) -> BuiltEvent | None:
    """Send a message of some kind."""
    sender = world.speaker()
    return (
        None
        if sender is None
        else world.say(sender, "m.room.message", population.message(world.rng))
    )


def encrypted(world: GeneratedWorld) -> BuiltEvent | None:
    """Send an encrypted message."""
    sender = world.speaker()
    return (
        None
        if sender is None
        else world.say(sender, "m.room.encrypted", population.encrypted(world.rng))
    )


def _speaker_and_message(world: GeneratedWorld) -> tuple[str, RecentMessage] | None:
    sender = world.speaker()
    if sender is None or not world.side(sender).recent:
        return None
    return sender, world.rng.choice(world.side(sender).recent)


def reply(world: GeneratedWorld) -> BuiltEvent | None:
    """Reply to a recent message."""
    pair = _speaker_and_message(world)
    if pair is None:
        return None
    sender, recent = pair
    return world.say(
        sender, "m.room.message", assembly.reply(recent.event_id, population.text(world.rng))
    )


def thread(world: GeneratedWorld) -> BuiltEvent | None:
    """Send a message in a recent thread, or start a thread."""
    pair = _speaker_and_message(world)
    if pair is None:
        return None
    sender, recent = pair
    root = recent.thread or recent.event_id
    return world.say(
        sender,
        "m.room.message",
        assembly.threaded(root, recent.event_id, population.text(world.rng)),
        thread=root,
    )


def reaction(world: GeneratedWorld) -> BuiltEvent | None:
    """React to a recent message."""
    pair = _speaker_and_message(world)
    if pair is None:
        return None
    sender, recent = pair
    return world.send(
        sender, "m.reaction", assembly.reaction(recent.event_id, world.rng.choice(REACTIONS))
    )


def edit(world: GeneratedWorld) -> BuiltEvent | None:
    """Edit a recent message by its sender."""
    pair = _speaker_and_message(world)
    if pair is None or not _says_on(world, pair[1].sender, world.side(pair[0])):
        return None
    recent = pair[1]
    return world.send(
        recent.sender, "m.room.message", assembly.edit(recent.event_id, population.text(world.rng))
    )


def redaction(world: GeneratedWorld) -> BuiltEvent | None:
    """Redact a recent message by its sender, or by a moderator."""
    pair = _speaker_and_message(world)
    if pair is None:
        return None
    recent = pair[1]
    sender = (
        recent.sender if _says_on(world, recent.sender, world.side(pair[0])) else world.moderator()
    )
    if sender is None or world.side(sender) is not world.side(pair[0]):
        return None
    content = {"reason": "taken back"}
    if number_of(world.room.version) >= 11:
        content["redacts"] = recent.event_id
    return world.send(sender, "m.room.redaction", content, redacts=recent.event_id)


def _says_on(world: GeneratedWorld, user: str, side: PartitionSide) -> bool:
    return world.side(user) is side and world.is_joined(user)


# Coming and going


def join(world: GeneratedWorld) -> BuiltEvent | None:
    """Join an invited user, one who left, or a new one.

    If the join rule forbids it, somebody invites them.
    """
    rng = world.rng
    former = (world.invited.draw(rng) if rng.random() < 0.3 else None) or world.former_members.draw(
        rng
    )
    user = world.newcomer() if former is None or rng.random() < world.shape.newcomers else former
    side = world.side(user)
    membership = side.room.membership(user)
    if membership in ("join", "ban"):
        return None
    rule = side.room.content("m.room.join_rules").get("join_rule", "invite")
    if rule == "public" or membership == "invite":
        return world.member(user, user, "join")
    host = world.speaker()
    if host is None or world.side(host) is not side:
        return None
    if rule in ("restricted", "knock_restricted"):
        return world.member(user, user, "join", via=host)
    return world.member(host, user, "invite")


def leave(world: GeneratedWorld) -> BuiltEvent | None:
    """Have a joined user leave; moderators stay."""
    user = world.speaker(skew=1.0)
    return None if user is None or user in world.moderators else world.member(user, user, "leave")


def profile(world: GeneratedWorld) -> BuiltEvent | None:
    """Change the name or avatar of a joined user."""
    user = world.speaker()
    return None if user is None else world.member(user, user, "join")


def invite(world: GeneratedWorld) -> BuiltEvent | None:
    host = world.speaker()
    return None if host is None else world.member(host, world.newcomer(), "invite")


def reject(world: GeneratedWorld) -> BuiltEvent | None:
    """Have an invited user reject the invite."""
    user = world.invited.draw(world.rng)
    if user is None or world.side(user).room.membership(user) != "invite":
        return None
    return world.member(user, user, "leave")


def knock(world: GeneratedWorld) -> BuiltEvent | None:
    """Have a user knock, or answer a knock by an invite."""
    waiting = world.knocking.draw(world.rng)
    if waiting is not None and world.rng.random() < 0.7:
        host = world.moderator()
        return (
            None
            if host is None or world.side(host).room.membership(waiting) != "knock"
            else world.member(host, waiting, "invite")
        )
    user = world.newcomer()
    rule = world.side(user).room.content("m.room.join_rules").get("join_rule")
    return world.member(user, user, "knock") if rule in ("knock", "knock_restricted") else None


def _against_somebody(world: GeneratedWorld, membership: str) -> BuiltEvent | None:
    host, target = world.moderator(), world.speaker(skew=1.0)
    if host is None or target is None or target in world.moderators:
        return None
    side = world.side(host)
    if side.room.membership(target) != "join" or world.level(side, target) >= world.level(
        side, host
    ):
        return None
    return world.member(host, target, membership)


def kick(world: GeneratedWorld) -> BuiltEvent | None:
    """Kick somebody, by a moderator."""
    return _against_somebody(world, "leave")


def ban(world: GeneratedWorld) -> BuiltEvent | None:
    """Ban somebody, by a moderator."""
    return _against_somebody(world, "ban")


def unban(world: GeneratedWorld) -> BuiltEvent | None:
    """Lift a ban."""
    host, target = world.moderator(), world.banned.draw(world.rng)
    if host is None or target is None or world.side(host).room.membership(target) != "ban":
        return None
    return world.member(host, target, "leave")


# Housekeeping


def power(world: GeneratedWorld) -> BuiltEvent | None:
    """Make somebody a moderator, or an ordinary user again, by the creator."""
    host, target = world.creator, world.speaker()
    if target is None or target == host or not world.is_joined(host):
        return None
    present = world.side(host).room.content("m.room.power_levels")
    users = dict(present["users"])
    if target in users:
        del users[target]
    elif len(users) <= MODERATORS_MAX:
        users[target] = 50
        if target not in world.moderators:
            world.moderators.append(target)
    else:
        return None
    return world.send(host, "m.room.power_levels", {**present, "users": users}, state_key="")


def _setting(
    world: GeneratedWorld, level: int, type_: str, content: Mapping[str, object]
) -> BuiltEvent | None:
    host = world.moderator(level)
    return None if host is None else world.send(host, type_, content, state_key="")


def topic(world: GeneratedWorld) -> BuiltEvent | None:
    return _setting(world, 50, "m.room.topic", {"topic": population.text(world.rng)})


def name(world: GeneratedWorld) -> BuiltEvent | None:
    return _setting(world, 50, "m.room.name", {"name": population.text(world.rng)[:60]})


def visibility(world: GeneratedWorld) -> BuiltEvent | None:
    """Change the history visibility."""
    return _setting(
        world,
        100,
        "m.room.history_visibility",
        {"history_visibility": world.rng.choice(VISIBILITIES)},
    )


def join_rule(world: GeneratedWorld) -> BuiltEvent | None:
    """Change the join rule to one of the room version; mostly back to that of the shape."""
    version = number_of(world.room.version)
    rules = (
        ["public", "invite"]
        + ["knock"] * (version >= 7)
        + ["restricted"] * (version >= 8)
        + ["knock_restricted"] * (version >= 10)
    )
    rule = world.rng.choice(rules) if world.rng.random() < 0.5 else world.shape.join_rule
    allowed = [f"!space:{server_of(world.creator)}"] if "restricted" in rule else []
    return _setting(world, 50, "m.room.join_rules", assembly.join_rules(rule, allowed))


ACTIONS: Final[Mapping[str, Action]] = {
    action.__name__: action
    for action in (
        message,
        encrypted,
        reply,
        thread,
        reaction,
        edit,
        redaction,
        join,
        leave,
        profile,
        invite,
        reject,
        knock,
        kick,
        ban,
        unban,
        power,
        topic,
        name,
        visibility,
        join_rule,
    )
}
