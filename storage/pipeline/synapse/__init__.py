"""A running Synapse as a source: its database, and the checkpoint of an import that goes on."""
