"""Load what planning needs, in as few statements as can be."""
