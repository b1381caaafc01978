"""Read Spark's event log by stage: tasks, median and longest duration, shuffled and spilled bytes.

Source: Spark's documentation, "Monitoring and Instrumentation" (spark.eventLog).
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MEGABYTE: Final = 1_000_000
SPILLED: Final = ("Memory Bytes Spilled", "Disk Bytes Spilled")


def log_settings(folder: Path) -> dict[str, str]:
    """Return settings of a session that logs to this folder, as one file of JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": folder.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }


@dataclass(slots=True)
class Stage:
    """One stage: the milliseconds of each of its tasks, and bytes."""

    name: str
    task_ms: list[int] = field(default_factory=list)
    shuffled: int = 0
    spilled: int = 0

    def row(self) -> dict[str, Any]:
        """Return the row of a stage in seconds and megabytes; ``skew``: longest by median task."""
        usual, longest = statistics.median(self.task_ms), max(self.task_ms)
        return {
            "stage": self.name,
            "tasks": len(self.task_ms),
            "task_seconds": round(sum(self.task_ms) / 1_000, 2),
            "median_seconds": round(usual / 1_000, 2),
            "longest_seconds": round(longest / 1_000, 2),
            "skew": round(longest / max(usual, 1), 1),
            "shuffled_megabytes": round(self.shuffled / MEGABYTE, 1),
            "spilled_megabytes": round(self.spilled / MEGABYTE, 1),
        }


def stages(folder: Path, begun_ms: int, ended_ms: int) -> list[dict[str, Any]]:
    """Return the stages with tasks that ran between these moments (Unix time in ms), in order.

    The session must have ended.
    """
    found: dict[int, Stage] = {}
    for event in _events(folder):
        if event["Event"] == "SparkListenerStageSubmitted":
            info = event["Stage Info"]
            found[info["Stage ID"]] = Stage(info["Stage Name"].partition(" at ")[0])
        elif (
            event["Event"] == "SparkListenerTaskEnd"
            and begun_ms <= event["Task Info"]["Launch Time"] <= ended_ms
        ):
            _add(found[event["Stage ID"]], event)
    return [stage.row() for _, stage in sorted(found.items()) if stage.task_ms]


def _add(stage: Stage, event: Mapping[str, Any]) -> None:
    info, metrics = event["Task Info"], event.get("Task Metrics") or {}
    stage.task_ms.append(info["Finish Time"] - info["Launch Time"])
    stage.shuffled += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
    stage.spilled += sum(metrics.get(name, 0) for name in SPILLED)


def _events(folder: Path) -> Iterator[Any]:
    [path] = [path for path in folder.iterdir() if not path.name.startswith(".")]
    with path.open("rb") as lines:
        for line in lines:
            yield json.loads(line)
