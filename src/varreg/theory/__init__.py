"""Numerical checks of the paper's claims. The files here compute; `claims/` has the table of
checks.
"""
