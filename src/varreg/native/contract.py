"""The contract between Python and C: structs whose fields have names, and enums.

`tasks.h` declares the same structs for C. When the library is built, `header()` writes the enums,
the thresholds that C uses, and an assertion for the size of each struct and the place of each
field. If the two sides differ, the compiler reports it. In C, `History.MEAN` is `HISTORY_MEAN`.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

from varreg import thresholds


class History(IntEnum):
    """Histories of ρ that have a kernel."""

    SUM = 0
    MEAN = 1
    HARMONIC = 2


class Form(IntEnum):
    """Forms of λ that have a kernel."""

    RATIONAL = 0
    AFFINE = 1


class Counts(IntEnum):
    """Forms of the numbers of ρ in the history."""

    WIDE = 0
    """A number for each element, of the history's type."""
    SHARED = 1
    """One number for all elements, of the history's type."""
    NARROW = 2
    """A 16-bit number for each element."""


class Increment(IntEnum):
    """Increments that have a kernel."""

    GRADIENT = 0
    HEAVY_BALL = 1
    NESTEROV = 2
    ADAM = 3


class Layer(IntEnum):
    """Layers whose sums can be computed with those of others, in one call."""

    DENSE = 0
    """A matrix product: S and W of its weight, and of its bias."""
    NORM = 1
    """A normalization of rows: S and W of its factor, and of its bias."""
    VALUES = 2
    """A parameter that is added: contributions are in memory."""


ENUMS: tuple[type[IntEnum], ...] = (History, Form, Counts, Increment, Layer)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Task(ctypes.Structure):
    """One tensor's part of a call for many tensors. `tasks.h` explains each field."""

    _fields_ = (
        *_fields(ctypes.c_int64, "n increment history form scale_free counts is_outgrown"),
        *_fields(ctypes.c_void_p, "total square grad products"),
        *_fields(ctypes.c_void_p, "variance delta rho_sum rho_count lam absent x steps"),
        *_fields(ctypes.c_void_p, "average squares N C V"),
        *_fields(ctypes.c_void_p, "recent spent times"),
        *_fields(ctypes.c_double, "scale m factor rounding"),
        *_fields(ctypes.c_double, "s half limit low high lr"),
        *_fields(ctypes.c_double, "keep_N keep_C keep_V take_N take_C take_V"),
        *_fields(ctypes.c_double, "sign decay mu again"),
        *_fields(ctypes.c_double, "unbias_n unbias_p eps known"),
        *_fields(ctypes.c_int64, "is_left is_changed"),
        *_fields(ctypes.c_double, "most precision take"),
        *_fields(ctypes.c_void_p, "root root_threads"),
        *_fields(ctypes.c_int64, "root_mode"),
        *_fields(ctypes.c_double, "shrink blend keep_p take_p root_c2 step_size"),
    )


class Convolution(ctypes.Structure):
    """The sizes and strides of a convolution: see `tasks.h`."""

    _fields_ = tuple(
        _fields(
            ctypes.c_int64,
            "images per groups c h w o oh ow kh kw sy sx py px dy dx "
            "x_image x_channel x_row x_column d_image d_channel d_pixel parts scratch",
        )
    )


class LayerTask(ctypes.Structure):
    """A layer whose sums are computed with those of others: see `tasks.h`."""

    _fields_ = (
        *_fields(ctypes.c_int64, "kind uses_threads batch groups r o i at_once weight bias centre"),
        ("eps", ctypes.c_double),
    )


THRESHOLDS = (
    *("BLOCK", "CHAIN", "SUMS_AT_ONCE", "SHORT_SUM", "TOGETHER", "WORTH_THREADS"),
    *("SHARED_KERNEL", "SHARED_IMAGES", "OWN_IMAGES", "WORKERS", "PATIENCE"),
    *("RECENT", "SMALLEST_SQUARE", "LARGEST_SQUARE", "PARALLEL"),
)
"""The thresholds that C uses, by their names in thresholds.py."""


def header() -> str:
    """Return the C header that states this contract."""
    lines = [f"#define {name} {getattr(thresholds, name)!r}" for name in THRESHOLDS]
    lines.append(f"#define LARGEST_HISTORY ((REAL){thresholds.LARGEST_HISTORY!r})")
    for enum in ENUMS:
        prefix = enum.__name__.upper()
        lines += [f"#define {prefix}_{member.name} {member.value}" for member in enum]
        lines.append(f"#define {prefix}_KINDS {len(enum)}")
    for struct in (Task, Convolution, LayerTask):
        name = struct.__name__
        checks = [f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");']
        checks += [
            f"_Static_assert(offsetof({name}, {field}) == {getattr(struct, field).offset}, "
            f'"{name}.{field}");'
            for field in (entry[0] for entry in struct._fields_)
        ]
        lines.append(f"#define CHECK_{name.upper()} {' '.join(checks)}")
    return "\n".join(lines) + "\n"
