"""Write a `ChangeSet` in one statement, or nothing of it."""
