"""Users and texts: seeded choice of users, neutral text, lengths like those of real rooms."""

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final

_SYLLABLES: Final = (
    "ka",
    "lo",
    "mi",
    "ren",
    "tu",
    "sol",
    "vé",
    "dan",
    "piü",
    "ost",
    "ra",
    "nim",
    "ße",
    "gor",
    "ell",
    "日",
    "wy",
    "三",
    "fe",
    "qua",
)
_TEXT_WORDS: Final = 4_000
_MEAN_LOG_LENGTH: Final = 4.7
_SPREAD_LOG_LENGTH: Final = 0.9
_LENGTH_MAX: Final = 4_000


class Roster:
    """A set of users with a random draw at constant cost, in a reproducible order."""

    def __init__(self, users: Iterable[str] = ()) -> None:
        self._users = list(users)
        self._places = {user: place for place, user in enumerate(self._users)}

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, user: object) -> bool:
        return user in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._users)

    def add(self, user: str) -> None:
        """Add a user; one who is in stays in place."""
        if user not in self._places:
            self._places[user] = len(self._users)
            self._users.append(user)

    def discard(self, user: str) -> None:
        """Remove a user, if in; the last one moves to the free position."""
        place = self._places.pop(user, None)
        if place is None:
            return
        last = self._users.pop()
        if last != user:
            self._users[place] = last
            self._places[last] = place

    def draw(self, rng: random.Random, *, skew: float = 1.0) -> str | None:
        """Return a user, None if there is none; a `skew` above 1 prefers a few of them."""
        if not self._users:
            return None
        return self._users[int(len(self._users) * rng.random() ** skew)]


def server_names(count: int) -> tuple[str, ...]:
    """Return ``s1.test`` to ``s<count>.test``."""
    return tuple(f"s{number}.test" for number in range(1, count + 1))


def _made_text() -> str:
    rng = random.Random(0)  # noqa: S311  (text, not secrets)
    return " ".join(
        "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(_TEXT_WORDS)
    )


_TEXT: Final = _made_text()


def text(rng: random.Random) -> str:
    """Return a message body: mostly a line, rarely some thousand characters.

    The length is log-normal, 165 characters on average.
    """
    length = min(
        _LENGTH_MAX, int(math.exp(_MEAN_LOG_LENGTH + _SPREAD_LOG_LENGTH * rng.gauss(0, 1))) + 1
    )
    start = int(rng.random() * (len(_TEXT) - length))
    return _TEXT[start : start + length].strip() or "ok"


def letters(rng: random.Random, length: int) -> str:
    """Return random letters and digits, like those of media ids and ciphertexts."""
    return f"{rng.getrandbits(length * 5):x}".ljust(length, "0")[:length]


def profile(rng: random.Random, user_id: str) -> dict[str, Any]:
    """Return the display name and avatar of a member event."""
    name, server = user_id[1:].split(":", 1)
    return {"avatar_url": f"mxc://{server}/{letters(rng, 24)}", "displayname": name.capitalize()}


def message(rng: random.Random) -> dict[str, Any]:
    """Return the content of a message: text, formatted text, or an image."""
    kind = rng.random()
    body = text(rng)
    if kind < 0.85:
        return {"body": body, "msgtype": "m.text"}
    if kind < 0.94:
        return {
            "body": body,
            "format": "org.matrix.custom.html",
            "formatted_body": f"<p>{body}</p>",
            "msgtype": "m.text",
        }
    info = {
        "h": rng.randint(100, 2_000),
        "mimetype": "image/png",
        "size": rng.randint(10_000, 5_000_000),
        "w": rng.randint(100, 2_000),
    }
    return {
        "body": "image.png",
        "info": info,
        "msgtype": "m.image",
        "url": f"mxc://s1.test/{letters(rng, 24)}",
    }


def encrypted(rng: random.Random) -> dict[str, Any]:
    """Return the content of m.room.encrypted, with noise for a ciphertext."""
    return {
        "algorithm": "m.megolm.v1.aes-sha2",
        "ciphertext": letters(rng, rng.randint(200, 500)),
        "device_id": letters(rng, 10).upper(),
        "sender_key": letters(rng, 43),
        "session_id": letters(rng, 43),
    }
