"""What the Java machines of the tests are told: classes are not verified once more, which is a fifth of what it costs to start Spark."""

from typing import Final

from storage.pipeline.session import LOCAL_SETTINGS

UNVERIFIED: Final = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
QUICK: Final = f"{LOCAL_SETTINGS['spark.driver.extraJavaOptions']} {UNVERIFIED}"
EXECUTOR: Final = f"-XX:TieredStopAtLevel=1 {UNVERIFIED}"
"""Of the smallest that Spark lets run: with the serial collector it would have less of its memory than that."""
COMMAND: Final = (
    "--conf",
    "spark.driver.memory=600m",
    "--conf",
    f"spark.driver.extraJavaOptions={QUICK}",
)
"""For `room-storage spark`, in a process of its own."""
