"""What a card's arithmetic can do at most, beside its data sheet's figures."""

from __future__ import annotations

import pytest
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.predict.peak import peak_of

#: TFLOP/s by card and dtype, as the vendor's data sheets give them (dense, sums in float32).
SHEETS = {
    ("h200", "bf16"): 989,
    ("h100", "e4m3"): 1979,
    ("a100", "f16"): 312,
    ("l4", "bf16"): 121,
    ("t4", "f16"): 65,
    ("rtx-4090", "f16"): 165,
    ("rtx-5090", "bf16"): 209.5,
    ("b200", "f16"): 2250,
}


@pytest.mark.parametrize(("card", "dtype"), SHEETS)
def test_peaks_are_the_data_sheets(card, dtype):
    peak = peak_of(Problem(dtype=dtype), preset(card))
    assert peak is not None
    assert peak.tflops == pytest.approx(SHEETS[card, dtype], rel=0.01)
    assert peak.share(peak.tflops / 4) == 0.25


def test_float32_is_held_against_the_fastest_way_that_is_accurate():
    def of(card: str, precision: str) -> float | None:
        peak = peak_of(Problem(precision=precision), preset(card))
        return None if peak is None else round(peak.tflops, 1)

    assert of("h200", "ieee") == 66.9
    assert of("h200", "auto") == of("h200", "3xf16") == 329.8
    assert of("a100", "tf32") == 155.9 and of("a100", "3xtf32") == 52.0
    assert of("rtx-3090", "auto") == of("rtx-3090", "ieee") == 35.6
    assert of("gtx-1080", "auto") == of("gtx-1080", "ieee") == 8.9
    assert of("gtx-1080", "3xf16") is None and of("t4", "tf32") is None


def test_a_card_without_such_arithmetic_has_no_peak():
    assert peak_of(Problem(dtype="f16"), preset("gtx-1080")) is None
    assert peak_of(Problem(dtype="e4m3"), preset("a100")) is None
