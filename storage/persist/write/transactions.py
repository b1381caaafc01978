"""The part of the write that stores the transactions of local users with their events."""

from typing import Final, LiteralString

from storage.database.columns import LOCAL_TRANSACTIONS
from storage.database.placeholders import ColumnValues, by_column
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.transaction_view import TransactionRow

NEW_TRANSACTION: Final = LOCAL_TRANSACTIONS.rows(
    "new_transaction", LOCAL_TRANSACTIONS.but("sent_ts")
)

PART_TRANSACTIONS: Final[LiteralString] = """
new_transaction AS (  -- refused by the primary key if another process has stored the request
    INSERT INTO local_transactions (:new_transaction.columns, sent_ts)
    SELECT :new_transaction.values, :received_ts
    FROM :new_transaction.rows AS i
)"""


def transaction_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    return {"new_transaction": by_column(TransactionRow._fields, change_set.transactions.new)}
