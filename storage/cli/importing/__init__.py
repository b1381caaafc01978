"""Importing archives of PDUs. Read in this order.

reading.py     files and pipes to numbered lines, of bounded length
parquet.py     rows of Parquet as such lines
lanes.py       each room's lines in order, rooms side by side, so that the writer can commit them together
held.py        lines that wait for events they build on: sorted by depth, on disk beyond a bounded number
rejects.py     the file of what was not stored
run.py         the whole: once through the files, then the held lines again until nothing more gets stored
"""

from storage.cli.importing.rejects import Reject, Rejects
from storage.cli.importing.run import Import, Summary

__all__ = ["Import", "Reject", "Rejects", "Summary"]
