"""Other engines to compare with, each in a process and a virtual environment of its own; `python -m benchmarks peer`.

`environment.py` makes the environment, `synapse_driver.py` is run by its interpreter, `process.py` speaks with it. Nothing of a peer
is imported by the product, or by anything here but the driver.
"""
