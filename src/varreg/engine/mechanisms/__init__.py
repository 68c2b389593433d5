"""How a use of a parameter is measured. One file per mechanism, with its forward half and its
backward half.
"""
