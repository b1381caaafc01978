"""The command `room-storage`. Each command is a module of this package; `app` lists them."""

from storage.cli.app import main

__all__ = ["main"]
