"""Observe a forward inside of a graph of torch.compile: our operations are inserted where
parameters meet the batch.

`join.py` is called while torch.compile captures the model. `sites.py` finds the sites in the
captured graph, `rewrite.py` inserts our operations there (`measured.py`), and `graph.py` runs the
graph. For each set of input shapes, one eager run under the tracer shows whether the graph follows
the batch correctly (`certificate.py`), and what the uses in it are (`uses.py`). Each call of the
graph is a pass (`passes.py`). Its backward half measures small sites together (`together.py`).
"""
