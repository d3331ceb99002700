"""Number formats: one file a family, one registered instance a format.

`get_format("mxfp8").quantize(weight)` gives a `QuantizedTensor`; `dequantize` gives its exact value back.
`docs/formats.md` states every policy: rounding, scale choice, saturation, NaN and Inf.
"""

from __future__ import annotations

from warpring.errors import ArgumentError
from warpring.formats.base import Format, QuantizedTensor, ceil_div
from warpring.formats.bf16 import Bf16
from warpring.formats.fp8 import Fp8Block, Fp8Channel
from warpring.formats.mx import Mxfp4, Mxfp8, mxfp4_from_gpt_oss
from warpring.formats.nvfp4 import Nvfp4

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (Bf16(), Fp8Block(), Fp8Channel(), Mxfp8(), Mxfp4(), Nvfp4())}


def get_format(name: str) -> Format:
    """The registered format of that name; ArgumentError names the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ArgumentError(f"format must be one of {', '.join(FORMATS)}; got {name!r}.") from None


__all__ = ["FORMATS", "Format", "QuantizedTensor", "ceil_div", "get_format", "mxfp4_from_gpt_oss"]
