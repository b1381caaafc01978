"""Group appends into batches, write them one at a time, retry what was refused, and publish what is committed."""
