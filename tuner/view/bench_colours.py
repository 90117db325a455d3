"""The colours of a benchmark's contenders."""

from __future__ import annotations

from ..bench.figures import OURS, OURS_16_BITS, OURS_SAME_BITS
from .bench import LAST_STEP

#: Colours that people tell apart whatever their eyes (Okabe and Ito), flashgen's the warm one.
COLOURS = {
    OURS: "#d55e00",
    "flash": "#0072b2",
    "cudnn": "#56b4e9",
    "mem-eff": "#009e73",
    "math": "#999999",
    "flex": "#cc79a7",
    "fa3": "#f0c000",
    "fa4": "#7a5aa6",
    OURS_SAME_BITS: "#f0a070",
    OURS_16_BITS: "#8f3b00",
    "fa3-det": "#f7df80",
    "fa4-det": "#bdadd3",
    "fa2": "#005f8f",
    "torch-varlen": "#2f8f8f",
    "nested": "#b39ddb",
    "flashmla": "#7fb069",
    "xformers": "#8c6d31",
    "cupy": "#555555",
    LAST_STEP: "#333333",
}
OTHER_COLOUR = "#bbbbbb"
