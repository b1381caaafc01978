"""Administration of a running store: verify, repair, purge, censor, archive, collect garbage."""
