"""Follow the batch through a forward pass: where each tensor carries the batch, and which calls are
uses of a parameter.
"""
