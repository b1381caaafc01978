"""Group appends into batches, write one batch at a time, retry refused writes, publish commits."""
