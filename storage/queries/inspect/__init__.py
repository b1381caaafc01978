"""Reads for people who look into a room: each in a snapshot, with a bounded number of rows.

No homeserver needs them to serve clients. They read every event, also those that no user may see,
so a caller must check first who asks. None of them returns the content of an event.

  lines          events without content: by id, and windows of a room's graph
  merges         events with several parents, and whether their states differed
  edges          parents, children, auth events and relations of an event
  resolution     a resolution replayed, with the reason for each key
  reasons        the sentences of such a replay
  state_path     the path of a state group, with its levels
  key_history    the changes of the current state
  readers        the local users to whom an event is visible
  audiences      the ranges of a user or server in its rooms
  rooms          rooms: by activity, by id, the largest; one by one
  growth         positions by time; events by room and by week
  search         ids that begin with a text; rooms by alias
  writers        the positions of all writers, and whether they are live
  activity       statements that run now
"""
