"""The pages of the reference that are made from the code, when the site is built.

None of them is committed, so none can be out of date. `docs.generate.hook` adds them to the site.
"""
