"""A storage engine for the rooms of a Matrix homeserver, on Postgres.

`import storage` alone loads nothing more, for programs that start often. The first use of a public
name loads them all, which takes a second; `storage.public` lists them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.public import *  # noqa: F403  # the names are listed there only
    from storage.public import __all__ as __all__
else:  # a type checker would accept any name because of this function

    def __getattr__(name: str) -> object:
        """Load a public name, or the module that `from storage import errors` names."""
        value = globals()[name] = _load_public(name)
        return value

    def __dir__() -> list[str]:
        """Return the public names, for completion in a shell and for `help`."""
        return sorted({*globals(), *__getattr__("__all__")})

    def _load_public(name: str) -> object:
        if name == "__version__":
            return importlib.import_module("storage.version").__version__
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
        elif name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = importlib.import_module("storage.public")
        if not hasattr(public, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(public, name)
