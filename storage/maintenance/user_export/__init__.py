"""Export all that one local user has sent and could see, for the user.

run.py  statements: the rooms of the user, what they sent, their account data and receipts; HTML
        that a person reads: an index, and a page for each room; `export_user`, which writes both
        forms into a folder
"""

from storage.maintenance.user_export.run import UserExport, export_user

__all__ = ["UserExport", "export_user"]
