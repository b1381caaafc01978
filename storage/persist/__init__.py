"""Store PDUs: receive, plan, load, write, commit. Read in this order.

append.py            the entry point: PDUs in, results out
receive.py           bytes to events: room version, parsing, signatures, order within a batch
model/               rows, caches, the views of a batch over them (cache_view.py), `ChangeSet`
                     (all views of a batch), `EventChanges` (the changes of one event)
plan/                decide what an event changes, without I/O: event.py for any event, fast_path.py
                     for an ordinary message
load/                load what planning lacks: prefetch.py before a batch is planned,
                     on_demand.py when planning raises `MissingData`
write/               write a `ChangeSet` in one statement: all_tables.py, made of a part per file,
                     with a smaller one for a state event, or messages_only.py for messages
commit/              group_commit.py batches appends and pipelines plan and write; retry.py handles
                     a refused write; a batch that a constraint refuses is written event by event;
                     publish.py the committed facts

plan, load and write never import each other (`[tool.importlinter]`). An append visits each stage
once, except for a retry.
"""

from storage.persist.commit.group_commit import Writer
from storage.persist.model.results import AppendResult, Origin, Outcome, SendResult

__all__ = ["AppendResult", "Origin", "Outcome", "SendResult", "Writer"]
