"""The tests' Java options: classes are not verified again.

Verification is a fifth of the cost of starting Spark.
"""

from typing import Final

from storage.pipeline.session import LOCAL_SETTINGS

UNVERIFIED: Final = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
QUICK: Final = f"{LOCAL_SETTINGS['spark.driver.extraJavaOptions']} {UNVERIFIED}"
EXECUTOR: Final = f"-XX:TieredStopAtLevel=1 {UNVERIFIED}"
"""For the smallest executor that Spark allows: the serial collector would leave it less memory."""
COMMAND: Final = (
    "--conf",
    "spark.driver.memory=600m",
    "--conf",
    f"spark.driver.extraJavaOptions={QUICK}",
)
"""For `room-storage spark`, in a process of its own."""
