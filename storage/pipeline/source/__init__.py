"""The data source "room_events": events of a store as rows, read, streamed and written."""
