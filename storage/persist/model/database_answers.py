"""Answers of the database to questions that no cache can answer."""

from collections.abc import Hashable
from typing import Any

from storage.persist.model.missing_data import MissingData


class Answers:
    """Answers of the database, collected while a batch is planned (`storage.persist.load`)."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def answer(self, question: Hashable) -> Any:
        """Return the answer to a question; `MissingData` if it was not asked yet."""
        if question not in self.known:
            raise MissingData("questions", (question,))
        return self.known[question]
