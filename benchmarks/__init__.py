"""Benchmarks of the hot paths, one module each, on a Postgres of their own: `python -m benchmarks [names] [--quick] [--profile]`.

harness.py     the server, the clocks, the counters, the results; shared by all
append.py      storing events
peer.py        side by side with Synapse; peers/ has what it takes
report.py      a page of results; compare.py what became worse; readme.py the README's tables of the peer; figures.py reads results
"""
