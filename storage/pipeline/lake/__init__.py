"""A mirror of a store as tables of Delta Lake, and answers to questions from it.

tables.py       the tables: columns, keys, partitions, the version of the schema; the position of a
                table: streams "events", "backfill" and "caches" as a token; what the stream
                "caches" says about rows that changed or went
event_rows.py   rows of `events` as Arrow tables, pruned as an outsider gets them; one daily table:
                the version of the mirror that it has read, its commits
room_rows.py    rows of the other tables, for whole rooms; a number for the rows of each room, by
                which two tables are compared
bulk.py         events of the table and of the store, compared piece by piece; many rows, by tasks
                of Spark; rooms that changed without a fact that names them
event_pass.py   the changes of a table between two positions, as one commit
delta_table.py  Parquet files and what the log says about them; which small files are merged into
                one; one table: its position, its rows, its commits
rounds.py       passes over all tables, once or until stopped
questions.py    the tables as data frames, as of now or earlier; the questions, and the daily tables
                between them and the mirror; queries/ has SQL
answering.py    refreshes daily tables, and reads the answers from them

Only delta_table.py and event_rows.py use deltalake.
"""
