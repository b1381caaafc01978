"""What a process counts, times and traces of itself, and how it is read."""
