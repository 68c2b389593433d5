"""`varreg reproduce`: the paper's experiments, with a control."""
