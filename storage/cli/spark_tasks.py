"""Progress of Spark's jobs: the tasks that are done, of those of the running stages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from storage.cli.progress import ProgressDisplay
from storage.observability.progress import Progress

LOOK_SECONDS: Final = 1.0


@contextmanager
def tasks_shown(spark: Any, *, quiet: bool) -> Iterator[None]:
    """Show during the block how many tasks are done. A task takes several rooms."""
    if quiet:
        yield
        return
    ended = threading.Event()
    with ProgressDisplay() as show:
        thread = threading.Thread(target=_watch, args=(spark, show, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _watch(spark: Any, show: ProgressDisplay, ended: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(LOOK_SECONDS):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        running = [stage for stage in stages if stage is not None]
        if total := sum(stage.numTasks for stage in running):
            done = sum(stage.numCompletedTasks for stage in running)
            show(Progress("spark", done, total, "tasks"))
