"""Caches of rows: what they return, and that garbage collection does not visit the rows."""

import gc

from storage.persist.model.caches import RowCache
from storage.persist.model.rows import VisibilityRow

ROW = VisibilityRow(((1, 5), (7, None)), 12, 1, 0)


def test_a_row_comes_back_as_it_was() -> None:
    cache = RowCache[str, VisibilityRow](10, VisibilityRow)
    cache.keep("a", ROW)
    cache.keep_all({"b": ROW._replace(joined_count=2)})
    found = cache.row("a")
    assert found == ROW
    assert isinstance(found, VisibilityRow)
    assert cache.row("c") is None
    assert cache.take("b") == ROW._replace(joined_count=2)
    assert cache.take("b") is None
    assert list(cache) == ["a"]


def test_it_drops_its_older_half() -> None:
    cache = RowCache[int, VisibilityRow](4, VisibilityRow)
    for key in range(5):
        cache.keep(key, ROW)
    cache.trim()
    assert list(cache) == [3, 4]


def test_the_collector_does_not_visit_rows() -> None:
    cache = RowCache[int, VisibilityRow](1_000, VisibilityRow)
    for key in range(1_000):
        cache.keep(key, VisibilityRow(((key, key + 1),), key, 1, 0))
    for _ in range(3):  # inner tuples first
        gc.collect()
    assert not any(map(gc.is_tracked, cache.values()))
    kept = [VisibilityRow(*row) for row in cache.values()]
    gc.collect()
    assert all(map(gc.is_tracked, kept))  # named tuples would be visited
