"""The errors that varreg raises. A message says what was expected, what came, and what to do."""

from __future__ import annotations


class VarregError(ValueError):
    """Says what was expected, what came, and what to do. Its message begins with "varreg: ".

    >>> import torch, varreg
    >>> try:
    ...     varreg.observe(torch.nn.Linear(1, 1), groups=0)
    ... except varreg.VarregError as error:
    ...     print(error)
    varreg: groups must be a positive whole number, or None for exact moments; got 0.
    """


class MeasurementError(VarregError, RuntimeError):
    """Says why a forward, backward or step cannot be measured. A RuntimeError, like torch's own
    errors.
    """
