"""The pictures of the documentation, drawn by programs.

`python -m docs.pictures` draws them again; a test compares the files with what the programs draw.
Where a picture shows numbers, the engine's own code computes them.
"""
