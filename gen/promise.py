"""What a class of arithmetic promises of every input: by it, results on adversarial inputs are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .problem import EIGHT, Problem

#: float32's smallest number that a card's builds do not flush to zero.
LEAST = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a kernel of the class may lose, beside what its type's range leaves no room for.

    ``tolerance`` bounds ‖o - ref‖ / ‖ref‖ of a head whose scores are of ordinary size. ``roundoff`` is the
    relative error of one sum in a score: a score is off by a few of it times scale · Σ|q·k|. A weight below
    ``weight_floor``, of a row's largest, may be lost. In every class numbers below `LEAST` may be, and with
    ``scales_queries`` elements of q times the scale are such numbers, before keys make scores of them.
    ``row_share``: each element of o may be off by this much of the mean |o| of its row, so that small columns
    feel large ones. ``headroom`` is how far below float32's largest number a row's sum of |v| has to stay to
    be finite. ``isolates_values``: a NaN or an infinity in a value leaves rows alone that do not see it;
    otherwise they may become NaN.
    """

    tolerance: float
    roundoff: float
    weight_floor: float = 0.0
    scales_queries: bool = False
    row_share: float = 0.0
    headroom: float = 1.0
    isolates_values: bool = True

    def words(self) -> str:
        """Says in one line what is promised."""
        told = [f"{self.tolerance:.0e} per head on scores of ordinary size"]
        told.append(f"scores to {self.roundoff:.0e} of their sum of |q·k|")
        if self.weight_floor:
            told.append(f"weights from {self.weight_floor:.0e} of the largest on")
        told.append(f"numbers from {LEAST:.0e} on")
        if self.row_share:
            told.append(f"elements of o to {self.row_share:.0e} of their row's mean")
        if self.headroom < 1:
            told.append(f"sums of |v| up to {self.headroom:.0e} of float32's range")
        return ", ".join(told)


UNIT = 2.0**-24
#: Weights of f16 are multiples of 2^-24 of the largest.
F16_WEIGHT_FLOOR = 2.0**-25
#: Those of e4m3 keep their bits down to 2^-14 of it; by straight lines they end not far below.
E4M3_WEIGHT_FLOOR = 2.0**-14
#: Exponentials by polynomials, and the second parts of TF32, end at float32's smallest normal
#: number; twice that, for what else is lost beside it.
NORMAL_WEIGHT_FLOOR = 2.0**-125
#: Rescaling waits until a row's maximum has grown by 2^8.
LAZY_HEADROOM = 2.0**-8
#: What parts of f16, with one power of two for all columns of v, may make of a row: beyond that it is
#: computed again in double precision (templates/common/f16_parts.cu.jinja).
F16_PARTS_SHARE = 2.0**-19

_FLOAT32 = Promise(tolerance=2e-6, roundoff=UNIT, isolates_values=False)
#: By precision of float32 and, for other types, by type or a precision that is asked for.
PROMISES = {
    "ieee": replace(_FLOAT32, scales_queries=True),
    "auto": replace(_FLOAT32, scales_queries=True, row_share=F16_PARTS_SHARE),
    "3xf16": replace(_FLOAT32, row_share=F16_PARTS_SHARE, isolates_values=True),
    "3xtf32": replace(_FLOAT32, weight_floor=NORMAL_WEIGHT_FLOOR, isolates_values=True),
    "tf32": Promise(
        tolerance=1e-3,
        roundoff=2.0**-11,
        headroom=LAZY_HEADROOM,
        isolates_values=False,
    ),
    "f16": Promise(tolerance=2e-3, roundoff=2 * UNIT, weight_floor=F16_WEIGHT_FLOOR, isolates_values=False),
    "bf16": Promise(
        tolerance=1e-2,
        roundoff=2 * UNIT,
        weight_floor=NORMAL_WEIGHT_FLOOR,
        headroom=LAZY_HEADROOM,
        isolates_values=False,
    ),
    # Tensor cores keep thirteen bits behind the first of a sum of products of e4m3; its weights are f16.
    "e4m3": Promise(tolerance=1e-2, roundoff=2.0**-14, weight_floor=F16_WEIGHT_FLOOR, isolates_values=False),
    # Of each weight four bits are kept, or straight lines between powers of two stand for it: an element of o
    # is off by up to a twelfth of its row's mean of |v|.
    EIGHT: Promise(tolerance=9e-2, roundoff=2.0**-14, weight_floor=E4M3_WEIGHT_FLOOR, isolates_values=False),
}


def class_of(problem: Problem) -> str:
    """Returns the name of a problem's class of arithmetic: the precision of float32, or one that is asked
    for; of other types the type."""
    return problem.precision if problem.dtype == "f32" or problem.precision != "auto" else problem.dtype


def promise_of(problem: Problem) -> Promise:
    """Returns what a kernel of the problem's type and precision promises."""
    promise = PROMISES[class_of(problem)]
    if problem.kv_dtype and problem.dtype != "f32":
        # Weights beside such keys are of f16, whatever the queries are.
        return replace(promise, weight_floor=max(promise.weight_floor, F16_WEIGHT_FLOOR))
    return promise
