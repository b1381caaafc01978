"""Actions: what a viewer may change. They exist only if the inspector was made with ``read_write``.

catalogue.py  the actions, by name: their fields, what they do, and the function; the pages: list,
              confirmation, and the request that runs one; actions that take long, and their results
"""

from storage.inspector.actions.catalogue import ACTION_ROUTES, POST_ROUTES

__all__ = ["ACTION_ROUTES", "POST_ROUTES"]
