"""Counting failures by reason."""

from __future__ import annotations

from flashgen.gen.families import FAMILIES
from flashgen.tuner.evaluate.outcome import Outcome, Status
from flashgen.tuner.evaluate.reasons import count_reasons

VARIANT = FAMILIES["ladder"]()


def counted(*outcomes: tuple[Status, str]) -> dict[str, int]:
    return count_reasons(Outcome(variant=VARIANT, status=s, reason=r) for s, r in outcomes)


def test_reasons_that_differ_in_numbers_are_one():
    spills = [(Status.SPILLED, f"{n} bytes of registers spilled to memory, 0 allowed") for n in (32, 8, 290)]
    wrong = [(Status.WRONG, f"head 0: error {e}, 2e-06 allowed\nmore") for e in ("1.5e-05", "0.25")]
    assert list(counted(*wrong, *spills).items()) == [
        ("spilled: 8 to 290 bytes of registers spilled to memory, 0 allowed", 3),
        ("wrong: head 0: error 1.5e-05 to 0.25, 2e-06 allowed", 2),
    ]


def test_digits_in_names_are_no_numbers():
    reasons = counted((Status.COMPILE_FAILED, "sm_61: f32x2"), (Status.COMPILE_FAILED, "sm_70: f32x2"))
    assert reasons == {"compile-failed: sm_61: f32x2": 1, "compile-failed: sm_70: f32x2": 1}


def test_other_words_or_another_status_are_another_reason():
    assert counted((Status.WRONG, "3 of 4"), (Status.SLOW, "3 of 4"), (Status.WRONG, "3 or 4")) == {
        "wrong: 3 of 4": 1,
        "slow: 3 of 4": 1,
        "wrong: 3 or 4": 1,
    }
    assert counted((Status.ILLEGAL, "")) == {"illegal": 1}
