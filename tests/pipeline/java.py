"""What the Java machines of the tests are told: classes are not verified once more, which is a fifth of what it costs to start Spark."""

from typing import Final

from storage.pipeline.session import LOCAL_SETTINGS

QUICK: Final = f"{LOCAL_SETTINGS['spark.driver.extraJavaOptions']} -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
COMMAND: Final = ("--conf", "spark.driver.memory=600m", "--conf", f"spark.driver.extraJavaOptions={QUICK}")
"""For `room-storage spark`, in a process of its own."""
