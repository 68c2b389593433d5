"""Mechanisms: they measure the uses of parameters. `choose.py` chooses one; each other file
`by_….py` has the forward half and the backward half of one mechanism.
"""
