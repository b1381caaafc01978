"""What the stages share: rows, caches, the view of a batch over them, and what a batch and an event change."""
