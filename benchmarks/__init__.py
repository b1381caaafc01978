"""Benchmarks of the latency-critical paths, one module each, on a separate Postgres.

python -m benchmarks [names] [--quick] [--profile]

harness.py     the server, clocks, counters and results; shared by all
append.py      storing events
peer.py        a comparison with Synapse; peers/ has its parts
report.py      a page of results; compare.py finds regressions; readme.py writes the tables of
               the peer; figures.py reads results
"""
