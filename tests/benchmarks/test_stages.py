"""What is told of Spark's stages: of those tasks that ran in the time in question."""

import json
from pathlib import Path
from typing import Any

from benchmarks.stages import stages


def _task(stage: int, began: int, took: int, **metrics: Any) -> dict[str, Any]:
    info = {"Launch Time": began, "Finish Time": began + took}
    return {
        "Event": "SparkListenerTaskEnd",
        "Stage ID": stage,
        "Task Info": info,
        "Task Metrics": metrics,
    }


def test_stages_of_a_time(tmp_path: Path) -> None:
    submitted = [
        {
            "Event": "SparkListenerStageSubmitted",
            "Stage Info": {"Stage ID": number, "Stage Name": name},
        }
        for number, name in enumerate(
            ["collect at before.py:1", "parquet at <unknown>:0", "collect at after.py:2"]
        )
    ]
    written = {"Shuffle Write Metrics": {"Shuffle Bytes Written": 2_000_000}}
    spilled = {"Memory Bytes Spilled": 1_000_000, "Disk Bytes Spilled": 500_000}
    tasks = [
        _task(0, 99, 5),
        _task(1, 100, 10),
        _task(1, 150, 10, **written),
        _task(1, 200, 30, **spilled),
        _task(2, 201, 1),
    ]
    lines = [{"Event": "SparkListenerLogStart"}, *submitted, *tasks]
    (tmp_path / "app-1").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / ".app-1.crc").write_bytes(b"\x00")
    assert stages(tmp_path, 100, 200) == [
        {
            "stage": "parquet",
            "tasks": 3,
            "task_seconds": 0.05,
            "median_seconds": 0.01,
            "longest_seconds": 0.03,
            "skew": 3.0,
            "shuffled_megabytes": 2.0,
            "spilled_megabytes": 1.5,
        }
    ]
