"""Torch functions by kind: the sets of functions that the tracer treats alike.

Every spelling of a function is in its set: `torch.x`, `Tensor.x`, `F.x`, and `x_`, which works in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import _torch
from varreg.engine.trace.packed import PACK, PAD, PAD_LIST


def named(*names: str) -> Iterator[Any]:
    """Yield every spelling of an operation: `torch.x`, `Tensor.x`, `F.x`, with `_` in place."""
    for name in names:
        for home in (torch, Tensor, F, torch.special, _torch.functions_of_nn):
            for spelling in (name, f"{name}_"):
                if hasattr(home, spelling):
                    yield getattr(home, spelling)


def methods(names: str) -> Iterator[Any]:
    """Yield those methods of `Tensor` that this version of torch has."""
    for name in names.split():
        if hasattr(Tensor, name):
            yield getattr(Tensor, name)


def name_of(function: Any) -> str:
    """Return a readable name for a torch function, method or property."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", str(function))
    return getattr(owner, "__name__", name) if name == "__get__" else name


def is_in_place(function: Any) -> bool:
    """Return whether the function writes into its first argument, by its name."""
    name = name_of(function)
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__")
    )


def written_arguments(function: Any) -> list[int]:
    """Return the positions of the arguments that an operator writes into, by its schema."""
    if isinstance(function, _torch.OpOverload):
        overloads = [function]
    elif isinstance(function, _torch.OpOverloadPacket):
        overloads = [getattr(function, name) for name in function.overloads()]
    else:
        return []
    arguments = ((i, a) for o in overloads for i, a in enumerate(o._schema.arguments))
    return sorted({i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write})


# ---- one element after the other -----------------------------------------------------------------

_ARITHMETIC = """add sub subtract mul multiply div divide true_divide floor_divide pow where maximum
minimum rsub addcmul addcdiv lerp fmax fmin fmod remainder atan2 arctan2 hypot logaddexp
logaddexp2 xlogy copysign clamp clip clamp_min clamp_max masked_fill float_power heaviside ldexp
bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor gcd lcm nextafter
eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose polar complex"""
_OPERATORS = """__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
__truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __pow__
__rpow__ __ipow__ __mod__ __rmod__ __and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __eq__
__ne__ __lt__ __le__ __gt__ __ge__"""
_ONE_BY_ONE = """abs absolute neg negative positive sign sgn signbit exp exp2 expm1 log log2 log10
log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh
asinh acosh atanh sinc floor ceil round trunc fix frac erf erfc erfinv lgamma digamma sigmoid logit
expit relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus
softsign tanhshrink hardshrink softshrink threshold logsigmoid log_sigmoid dropout alpha_dropout
bitwise_not logical_not isnan isinf isfinite isposinf isneginf nan_to_num angle real imag conj
conj_physical resolve_conj resolve_neg deg2rad rad2deg clone detach contiguous to type float double
half bfloat16 int long short bool byte char cpu cuda type_as requires_grad_ real imag i0 ndtr
log_ndtr special_ndtr entr polygamma as_subclass"""

ELEMENTWISE = frozenset([*named(*_ARITHMETIC.split()), *methods(_OPERATORS)])
"""Functions of several tensors that broadcast, and then work on one element after the other."""
UNARY = frozenset(
    [
        *named(*_ONE_BY_ONE.split()),
        *methods("__neg__ __abs__ __pos__ __invert__"),
        *(getattr(Tensor, name).__get__ for name in ("real", "imag", "data")),
    ]
)
"""Functions of one tensor that work on one element after the other."""
SUMS = frozenset([*named("add", "sub"), *methods("__add__ __radd__ __sub__ __iadd__")])
SHAPE_ONLY = frozenset(methods("view_as reshape_as expand_as type_as to"))
"""Functions that use only the shape or type of their tensors after the first."""
FILLS = (torch.masked_fill, Tensor.masked_fill)
"""Functions that fill with a number."""

# ---- data that only moves ------------------------------------------------------------------------

_LISTS = """cat concat concatenate stack hstack vstack dstack column_stack row_stack
atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors"""
_VIEWS = """reshape view flatten unflatten ravel reshape_as view_as squeeze unsqueeze transpose
permute swapaxes swapdims movedim moveaxis t adjoint select narrow unbind split chunk tensor_split
split_with_sizes hsplit vsplit dsplit expand expand_as broadcast_to repeat tile repeat_interleave
flip fliplr flipud roll rot90 unfold index_select gather take_along_dim masked_select
narrow_copy unsafe_chunk unsafe_split take"""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

MOVERS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(named(*_VIEWS.split(), *_LISTS.split()), (0,)),
    **dict.fromkeys([getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH")], (0,)),
    Tensor.__getitem__: (0,),
    Tensor.__iter__: (0,),
    Tensor.__setitem__: (0, 2),
    **dict.fromkeys([Tensor.copy_, Tensor.set_], (0, 1)),
    **dict.fromkeys(named("index_copy", "scatter"), (0, 3)),
    **dict.fromkeys(named("index_put", "masked_scatter"), (0, 2)),
    **dict.fromkeys(named("select_scatter", "slice_scatter"), (0, 1)),
    _SET_DATA: (0, 1),
    **dict.fromkeys((PACK, PAD, PAD_LIST), (0,)),
}
"""Functions that move data without changing values, with the positions of the arguments that hold
data. The other arguments say where the data goes.
"""
MOVERS.pop(F.unfold, None)  # im2col: another function of that name

VARIADIC = frozenset(
    named("broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "block_diag")
)
"""Movers whose arguments all hold data."""
JOINS = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))
RESHAPES = frozenset(
    named(
        *("reshape", "view", "flatten", "unflatten", "ravel"),
        *("reshape_as", "view_as", "squeeze", "unsqueeze"),
    )
)
"""Functions that keep the row-major order of all elements."""
RESHAPERS = frozenset(f for f in MOVERS if is_in_place(f) and MOVERS[f] == (0,))
"""Functions that change the shape of their argument in place."""
BY_INDEX = frozenset(named("index_select", "gather"))
SELECTS = (torch.index_select, Tensor.index_select)
ADDERS: dict[Any, tuple[int, Any, Any]] = {
    **dict.fromkeys(named("index_add"), (3, torch.index_copy, torch.index_select)),
    **dict.fromkeys(named("scatter_add"), (3, torch.scatter, torch.gather)),
}
"""Functions that add rows to the rows that an index selects: the position of the added rows among
the arguments, the function that writes to the selected rows, and the function that reads them.
"""
PUTS = frozenset(named("index_put"))
WRITERS = frozenset(
    [
        *(f for f in MOVERS if is_in_place(f) and f not in RESHAPERS),
        Tensor.__setitem__,
        _SET_DATA,
        *ADDERS,
    ]
)
"""Functions that write data into their first argument, or into a copy of it."""
DETACH = frozenset((Tensor.detach, torch.detach, Tensor.data.__get__))  # type: ignore[attr-defined]

# ---- products and recurrent cells ----------------------------------------------------------------

PRODUCTS = frozenset(
    (
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
        *(torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm),
    )
)
CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)

# ---- functions that read no values, and functions that let values out ----------------------------

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
CREATORS = frozenset(
    [
        *methods("new_zeros new_ones new_empty new_full new_tensor"),
        *(getattr(torch, name) for name in _LIKE),
    ]
)
"""Functions whose result depends on their first argument by shape and type alone."""

ESCAPES = frozenset(
    [
        *methods("item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__"),
        *methods("__contains__ __dlpack__ is_nonzero data_ptr equal allclose __format__"),
        *(torch.equal, torch.allclose, torch.is_nonzero),
        *(torch.zeros, torch.ones, torch.empty),  # values decide the size of the result
    ]
)
"""Functions through which values of the batch leave torch, and may come back as constants."""

CALLBACKS = frozenset(methods("apply_ map_ map2_"))
"""Functions that pass each element to a Python function, which may store it. They are called once,
and not tried."""

_SIZED = frozenset(
    named(
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"),
        *("histc", "arange", "linspace", "logspace", "eye", "full", "rand", "randn", "randint"),
        *("randperm", "one_hot", "repeat_interleave", "combinations", "cartesian_prod"),
        "tril_indices",
    )
)
_SPLITS = frozenset(named("tensor_split"))
_SHAPES = """shape size dim ndim ndimension numel nelement stride storage_offset dtype device layout
element_size itemsize nbytes requires_grad grad_fn grad _version names get_device sparse_dim
dense_dim __len__ __hash__ retain_grad register_hook output_nr is_leaf type result_type
promote_types can_cast retains_grad backward _backward_hooks broadcast_shapes name data_ptr __dir__
_base"""
_METADATA = frozenset(_SHAPES.split())


def is_sized_by_values(function: Any, args: Any, index_types: Any) -> bool:
    """Return whether values decide the size of the result, which Python can then read.

    `index_types` are the types of the tensors behind the first argument.
    """
    if function is Tensor.__getitem__:
        return torch.bool in index_types
    if function in _SPLITS:
        return bool(index_types)
    return function in _SIZED or (function is torch.where and len(args) == 1)


def takes_numbers(function: Any) -> bool:
    """Return whether a function may read a tensor without dimensions, behind its first argument, as
    a number: a size, a dimension, a position. Element-wise functions and indexing read it as data.
    """
    return not (
        function in ELEMENTWISE
        or function in UNARY
        or function in JOINS
        or function in (Tensor.__getitem__, Tensor.__setitem__)
    )


def tells_shapes_only(function: Any) -> bool:
    """Return whether the result of a function depends on shapes and types only, and not on
    values.
    """
    name = name_of(function)
    return (
        name in _METADATA
        or name.startswith(("is_", "_is_", "has_"))
        or function is Tensor.requires_grad_
    )


def without_override_check(function: FunctionType) -> Callable[..., Any]:
    """Return a copy of a torch function written in Python that does not pass itself to the active
    modes, so that they see the functions that it calls.
    """
    never: Callable[..., bool] = lambda *_: False  # noqa: E731
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(checks, never)}
    copy = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
