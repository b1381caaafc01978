"""A mirror of a store as tables of Delta Lake, and answers to questions from it.

tables.py       the tables: columns, keys, partitions, the version of the schema
positions.py    the position of a table: streams "events", "backfill" and "caches" as a token
facts.py        what the stream "caches" says about rows that changed or went
event_rows.py   rows of `events` as Arrow tables, pruned as an outsider gets them
room_rows.py    rows of the other tables, for whole rooms
room_sums.py    a number for the rows of each room, by which two tables are compared
comparison.py   events of the table and of the store, compared piece by piece
event_pass.py, room_pass.py   the changes of a table between two positions, as one commit
files.py        Parquet files and what the log says about them
compaction.py   which small files are merged into one
delta_table.py  one table: its position, its rows, its commits
bulk.py         many rows, by tasks of Spark
rounds.py       passes over all tables, once or until stopped
sweep.py        rooms that changed without a fact that names them
reading.py      the tables as data frames, as of now or earlier
questions.py    the questions, and the daily tables between them and the mirror; queries/ has SQL
day_table.py    one daily table: the version of the mirror that it has read, its commits
answering.py    refreshes daily tables, and reads the answers from them

Only delta_table.py and day_table.py use deltalake.
"""
