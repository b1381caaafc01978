"""A mirror of a store as tables of Delta Lake that stay true.

tables.py       the tables: columns, keys, partitions, the version of the schema
positions.py    the position of a table: streams "events", "backfill" and "caches" as a token
facts.py        what the stream "caches" says about rows that changed or went
event_rows.py   rows of `events` as Arrow tables, pruned as an outsider gets them
room_rows.py    rows of the other tables, for whole rooms
event_pass.py, room_pass.py   the changes of a table between two positions, as one commit
files.py        Parquet files and what the log says about them
delta_table.py  one table: its position, its rows, its commits; the only use of deltalake
bulk.py         many rows, by tasks of Spark
rounds.py       passes over all tables, once or until stopped
reading.py      the tables as data frames, as of now or earlier
"""
