"""Options of the kernels in Triton: precision of products, and size of tiles.

    varreg.triton.settings.configure(precision="tf32")

or, before Python starts, `VARREG_TRITON_PRECISION=tf32` and `VARREG_TRITON_TILE=64,64,32,8`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from varreg import thresholds
from varreg.errors import VarregError
from varreg.thresholds import Tile


@dataclass
class Settings:
    """The settings of the next launches."""

    precision: str = "ieee"
    """The precision of products of float32: "ieee" is float32 itself, "tf32" has 10 bits of
    precision, as with `torch.backends.cuda.matmul.allow_tf32`.
    """
    tile: Tile = thresholds.TRITON_TILES["ieee"]
    """The tile of dense layers and convolutions."""


SETTINGS = Settings()


def configure(precision: str | None = None, tile: tuple[int, int, int, int] | None = None) -> None:
    """Set the precision of products and the tile of Triton's kernels.

    Args:
        precision: `"ieee"`, float32 as it is; or `"tf32"`. None: leave it as it is.
        tile: Output features, input features and rows (powers of two from 16 on), and warps. None:
            the default tile of the precision.

    """
    precision = SETTINGS.precision if precision is None else precision
    if precision not in thresholds.TRITON_TILES:
        known = ", ".join(map(repr, thresholds.TRITON_TILES))
        raise VarregError(
            f"varreg: the precision of Triton's products is one of {known}, got {precision!r}."
        )
    if tile is not None and (
        len(tile) != 4
        or any(not isinstance(n, int) or n < 1 or n & (n - 1) for n in tile)
        or min(tile[:3]) < 16
    ):
        raise VarregError(
            "varreg: a tile of Triton's kernels is (output features, input features, rows, warps), "
            f"powers of two, the first three from 16 on; got {tile!r}. Use (32, 32, 32, 4), say."
        )
    SETTINGS.precision = precision
    SETTINGS.tile = thresholds.TRITON_TILES[precision] if tile is None else Tile(*tile)


def _from_environment() -> None:
    text = os.environ.get("VARREG_TRITON_TILE")
    try:
        tile = None if text is None else tuple(int(n) for n in text.split(","))
    except ValueError:
        raise VarregError(
            f"varreg: VARREG_TRITON_TILE is four numbers, as 32,32,32,4; got {text!r}."
        ) from None
    configure(os.environ.get("VARREG_TRITON_PRECISION"), tile)  # type: ignore[arg-type]


_from_environment()
