"""A running Synapse as a source: its database, and the checkpoint of a repeated import."""
