"""One call of a torch function, with its tensors sorted by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from varreg.engine.trace.arguments import tensors_in
from varreg.engine.trace.functions import is_in_place, name_of
from varreg.engine.trace.layout import Lost, Place

Carriers = Sequence[tuple[Tensor, Place]]
"""Tensors that carry the batch, each with its place: where its samples are."""


class Call:
    """One call of a torch function in an observed forward.

    The tracer makes it when the call has no plan. Its tensors are sorted into lists by their marks;
    a tensor that is in no list is a constant.
    """

    __slots__ = (
        *("args", "carriers", "key", "function", "kwargs"),
        *("lost", "out", "parameters", "summed"),
    )

    def __init__(
        self,
        function: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        carriers: Carriers = (),
        key: tuple[Any, ...] | None = None,
    ):
        self.function, self.args = function, args
        self.kwargs = kwargs or {}
        self.out: Any = None
        """The argument `out=`. `kwargs` lacks it, since the call writes it and does not read it."""
        if "out" in self.kwargs:
            self.kwargs = {k: v for k, v in self.kwargs.items() if k != "out"}
            self.out = kwargs["out"]  # type: ignore[index]
        self.key = key
        """The key of the call's plan; None if a plan would not be valid for other calls."""
        self.carriers: list[tuple[Tensor, Place]] = list(carriers)
        self.parameters: list[Tensor] = []
        """Observed parameters, and tensors made of parameters alone."""
        self.lost: list[tuple[Tensor, Lost]] = []
        """Tensors that depend on the batch, but whose samples are not known."""
        self.summed: list[Tensor] = []
        """Sums over samples."""

    @property
    def name(self) -> str:
        """Return the readable name of the function."""
        return name_of(self.function)

    @property
    def is_in_place(self) -> bool:
        return is_in_place(self.function)

    @property
    def depends_on_batch(self) -> bool:
        """Return whether the result depends on the batch."""
        return bool(self.carriers or self.lost or self.summed)

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments, without `out`."""
        return tensors_in(self.args, self.kwargs)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or its name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def run(self) -> Any:
        """Call the function with all of its arguments."""
        if self.out is None:
            return self.function(*self.args, **self.kwargs)
        return self.function(*self.args, **self.kwargs, out=self.out)

    def with_carriers(self, carriers: Carriers) -> Call:
        """Return a copy of the call with other carriers."""
        return Call(self.function, self.args, self.kwargs, carriers)

    def with_arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], carriers: Carriers
    ) -> Call:
        """Return a call of the same function with other arguments."""
        return Call(self.function, args, kwargs, carriers)
