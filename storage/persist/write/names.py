"""The part of the write that interns new names."""

from typing import Final, LiteralString

from storage.database.columns import EVENT_TYPES, PRINCIPALS, STATE_KEYS
from storage.database.placeholders import ColumnValues, by_column
from storage.persist.model.change_set import ChangeSet

NEW_TYPE: Final = EVENT_TYPES.rows("new_type")
NEW_STATE_KEY: Final = STATE_KEYS.rows("new_state_key")
NEW_PRINCIPAL: Final = PRINCIPALS.rows("new_principal")
NAME_INPUTS: Final = (NEW_TYPE, NEW_STATE_KEY, NEW_PRINCIPAL)

PART_NAMES: Final[LiteralString] = """
new_type AS (
    INSERT INTO event_types (:new_type.columns)
    SELECT * FROM :new_type.rows AS i
),
new_state_key AS (
    INSERT INTO state_keys (:new_state_key.columns)
    SELECT * FROM :new_state_key.rows AS i
),
new_principal AS (
    INSERT INTO principals (:new_principal.columns)
    SELECT * FROM :new_principal.rows AS i
)"""


def name_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    return {
        "new_type": by_column(("type", "type_nid"), change_set.names.new_types.items()),
        "new_state_key": by_column(
            ("type_nid", "state_key", "state_key_nid"),
            ((*key, nid) for key, nid in change_set.names.new_state_keys.items()),
        ),
        "new_principal": by_column(
            ("name", "principal_nid"), change_set.names.new_principals.items()
        ),
    }
