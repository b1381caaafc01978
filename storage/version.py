"""The version of the installed package; pyproject.toml is the one place that states it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTION: Final = "room-storage"


def installed_version() -> str:
    """Return the version in the metadata of the package.

    Return "unknown" for a source tree on the import path that was never installed: it has no
    metadata.
    """
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


__version__: Final = installed_version()
