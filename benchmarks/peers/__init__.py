"""Other engines to compare with, each in a separate process and virtual environment.

`python -m benchmarks peer` runs them. `environment.py` creates the environment, its interpreter
runs `synapse_driver.py`, and `process.py` talks to it. Only the driver imports a peer.
"""
