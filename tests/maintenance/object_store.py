"""A store of fsspec that behaves as `s3fs` where that differs from a store in memory.

A range that begins behind the end of a file is an error, and a listing is cached.
"""

import errno
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class ObjectStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files at object-store://name."""

    protocol = "object-store"
    store: dict[str, Any] = {}  # noqa: RUF012  # as its base

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("object-store://").strip("/")

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        """Return bytes of a file."""
        found: bytes = super().cat_file(path, start, end, **options)
        if start is not None and not found:
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """List a folder; `info` believes the listing from then on."""
        found = self.dircache[path] = super().ls(path, detail=True, **options)
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the size of a file."""
        name = self._strip_protocol(path)
        cached = self._ls_from_cache(name)
        found: dict[str, Any] = cached[0] if cached else super().info(name, **options)
        return found

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget all listings."""
        del path
        self.dircache.clear()


fsspec.register_implementation("object-store", ObjectStore)
