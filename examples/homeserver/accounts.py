"""Users, passwords and devices, in one JSON file."""

import hashlib
import hmac
import json
import re
import secrets
from pathlib import Path

from .web import Json, MatrixError


class Accounts:
    """The accounts of one server. The file is replaced as a whole after each change."""

    def __init__(self, path: Path, server_name: str) -> None:
        self._path, self._server_name = path, server_name
        self._data: dict[str, Json] = {"passwords": {}, "tokens": {}}
        if path.exists():
            self._data = json.loads(path.read_text("utf-8"))

    def register(self, name: str, password: str, device: str | None) -> Json:
        """Add a user, and log in."""
        user, salt = f"@{name}:{self._server_name}", secrets.token_hex(16)
        if not re.fullmatch(r"[a-z0-9._=/+-]{1,200}", name):
            raise MatrixError(400, "M_INVALID_USERNAME", "use a-z, 0-9 and ._=/+-")
        if user in self._data["passwords"]:
            raise MatrixError(400, "M_USER_IN_USE", f"{user} exists")
        self._data["passwords"][user] = [salt, _hashed(password, salt)]
        return self.log_in(user, password, device)

    def log_in(self, name: str, password: str, device: str | None) -> Json:
        """Return a new access token for a device of a user whose password is right."""
        user = name if name.startswith("@") else f"@{name}:{self._server_name}"
        salt, expected = self._data["passwords"].get(user, ("", ""))
        if not hmac.compare_digest(_hashed(password, salt), expected):
            raise MatrixError(403, "M_FORBIDDEN", "wrong user name or password")
        device, token = device or secrets.token_hex(5).upper(), secrets.token_urlsafe(32)
        self._data["tokens"][token] = [user, device]
        new = self._path.with_suffix(".new")
        new.touch(0o600)
        new.write_text(json.dumps(self._data), "utf-8")
        new.replace(self._path)
        return {"user_id": user, "device_id": device, "access_token": token}

    def owner(self, token: str) -> tuple[str, str]:
        """Return the user and the device of an access token."""
        if token not in self._data["tokens"]:
            raise MatrixError(401, "M_UNKNOWN_TOKEN" if token else "M_MISSING_TOKEN", "log in")
        user, device = self._data["tokens"][token]
        return user, device

    def devices(self, user: str) -> set[str]:
        """Return the devices of a user that are logged in."""
        return {device for owner, device in self._data["tokens"].values() if owner == user}


def _hashed(password: str, salt: str) -> str:
    return hashlib.scrypt(password.encode(), salt=salt.encode(), n=2**14, r=8, p=1).hex()
