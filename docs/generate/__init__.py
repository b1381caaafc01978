"""The pages of the reference that are made from the code, when the site is built.

None of them is committed, so none can be out of date. `docs.generate.hook` adds them to the site.
Only the assembled statements below `docs/reference/sql` are committed, and compared by a test.
"""
