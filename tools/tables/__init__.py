"""Tables of the docs, each rendered from a saved result.

    python -m tools.tables --check    # fail if a table on a page differs from its file
    python -m tools.tables --write    # renew all tables
    python -m tools.tables peers benchmarks/results/peers.json    # print one

On a page, a table stands between two marks, which name its function and its files:

    <!-- table: peers from benchmarks/results/peers.json -->
    <!-- end of table -->

`catalog.py` has the functions by name. A function need not return a table: a sentence with numbers
in it is made in the same way.
"""
