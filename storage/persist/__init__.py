"""The one way in: from PDUs to rows. Read in this order.

intake.py      bytes to events: room version, parsing, signatures, order within a batch
plan.py        one event's decision, from receipt checks to the rows it adds (place, receive, states, merge, audience, redactions)
plain.py       the same for an ordinary message, in a sixth of the time
context.py     what planning reads, and how it asks for more; load.py answers
draft.py       the rows that one write changes; step.py the scratch space of one event
prefetch.py    what a batch names and the caches lack; ahead.py loads it
write.py       the one statement that applies a draft
attempts.py    planning and writing, and what follows when that fails
writer.py      group commit: many appends, one write at a time, the next one planned meanwhile
"""

from storage.persist.results import AppendResult, Origin, Outcome
from storage.persist.writer import Writer

__all__ = ["AppendResult", "Origin", "Outcome", "Writer"]
