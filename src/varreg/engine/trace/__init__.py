"""Following the batch through a forward pass: where each tensor carries it, and where a parameter
meets it.
"""
