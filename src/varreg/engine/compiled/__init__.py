"""torch.compile: an observed forward inside of a compiled graph, with operations of ours where
parameters meet the batch.

`join.py` is called while torch.compile looks at the model. `sites.py` finds in the captured graph
where parameters meet the batch, `rewrite.py` puts our operations there (`measured.py`), and
`graph.py` runs it. What a graph may assume of the batch is found out by running it once, eagerly,
under the tracer, for each form of the inputs (`certificate.py`).
"""
