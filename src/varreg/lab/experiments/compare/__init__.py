"""`varreg compare`: optimizers against a base, tuned alike, judged on fresh seeds."""
