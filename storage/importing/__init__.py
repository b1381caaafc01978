"""Import archives of PDUs. Read the modules in this order.

reading.py  files and pipes to numbered lines, of bounded length; rows of Parquet as such lines; the
            file of lines that were not stored
run.py      each room's lines in order, rooms in parallel, so that the writer can commit them
            together; lines that wait for events they depend on: sorted by depth, on disk beyond a
            bounded number; the import: once through the files, then the waiting lines again until
            no more are stored
"""

from storage.importing.reading import Reject, Rejects
from storage.importing.run import Import, Summary

__all__ = ["Import", "Reject", "Rejects", "Summary"]
