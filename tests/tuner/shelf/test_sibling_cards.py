"""What was measured on another card of the same architecture, and what it counts for in choices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from flashgen.gen.limits import DeviceLimits, preset
from flashgen.gen.problem import Problem
from flashgen.tuner.shelf import choice, expected
from flashgen.tuner.shelf.expected import CLEARLY, Errors, measured_on, of_sibling, predicted_us
from flashgen.tuner.shelf.library import Entry

from tests.support.tuned_kernels import H100, H200, LADDER, entry

ASKED = Problem(head_dim=64, seqlen_q=2048, seqlen_k=2048)
NEAR = replace(ASKED, seqlen_q=2000, seqlen_k=2000)
#: Of its architecture, and no preset's.
GH200 = replace(H200, name="NVIDIA GH200 480GB")
A100 = replace(preset("a100"), name="NVIDIA A100-SXM4-80GB")


def measured(us: float, problem: Problem = ASKED, limits: DeviceLimits = H200, **others) -> Entry:
    made = entry(problem, limits, **others)
    taken = replace(made.kernel.measurement, median_us=us)
    return replace(made, kernel=replace(made.kernel, measurement=taken))


def told_of(limits: DeviceLimits, problem: Problem = ASKED, variant=None) -> float:
    found = predicted_us(variant or LADDER(), problem, limits)
    assert found is not None
    return found[0]


def error_of(record: Entry, limits: DeviceLimits) -> float:
    told = told_of(limits, record.kernel.problem, record.kernel.variant)
    return math.log(record.kernel.measurement.median_us / told)


@pytest.mark.parametrize("here", [H100, preset("h100")], ids=["driver", "preset"])
def test_the_models_error_is_that_on_the_card_that_measured(here):
    record = measured(1.3 * told_of(preset("h200")))
    assert measured_on(record, here) == preset("h200") and of_sibling(record, here)
    found = Errors([record], here).expect(record, ASKED)
    assert found is not None and found.us == pytest.approx(1.3 * told_of(here))
    assert measured_on(record, H200) is H200 and not of_sibling(record, H200)


@pytest.mark.parametrize("limits", [A100, GH200], ids=["another architecture", "no preset"])
def test_what_other_cards_measured_says_nothing(limits):
    record = measured(1e6, limits=limits)
    assert measured_on(record, H100) is None and not of_sibling(record, H100)
    errors = Errors([record], H100)
    found = errors.expect(record, ASKED)
    assert errors.mean_of(LADDER) == 0
    assert found is not None and found.us == pytest.approx(told_of(H100))


def test_what_was_predicted_for_another_card_says_nothing():
    record = measured(1e6, limits=preset("h200"), predicted=True)
    assert measured_on(record, H100) is None
    assert Errors([record], H100).mean_of(LADDER) == 0


def test_a_family_has_the_mean_error_of_its_card_else_that_of_its_architecture():
    elsewhere, strange = measured(1000.0), measured(1e6, limits=GH200)
    assert Errors([elsewhere, strange], H100).mean_of(LADDER) == pytest.approx(
        error_of(elsewhere, preset("h200"))
    )
    here = measured(3000.0, NEAR, H100)
    errors = Errors([elsewhere, here, strange], H100)
    assert errors.mean_of(LADDER) == pytest.approx(error_of(here, H100))
    # The one of a card that nothing is known of takes the mean.
    found = errors.expect(strange, ASKED)
    assert found is not None and found.us == pytest.approx(told_of(H100) * math.exp(errors.mean_of(LADDER)))


def rivals(faster: float, on: DeviceLimits = H100) -> tuple[Entry, Entry]:
    """A kernel tuned for what is asked on an H200, and one tuned for almost that which should be so much
    faster on a card."""
    exact = measured(1000.0)
    other = LADDER(br=32)
    here = Errors([exact], on).expect(exact, ASKED)
    assert here is not None
    us = 1.0
    for _ in range(30):  # what it is expected to take depends on the mean of both
        second = measured(us, NEAR, variant=other)
        told = Errors([exact, second], on).expect(second, ASKED)
        assert told is not None
        us *= here.us / faster / told.us
    return exact, measured(us, NEAR, variant=other)


@pytest.mark.parametrize("faster", [0.9, 1.05, 0.98 * CLEARLY])
def test_what_was_tuned_for_just_this_elsewhere_serves(faster):
    exact, other = rivals(faster)
    match = choice.find([other, exact], ASKED, H100)
    assert match is not None and match.entry == exact and not match.exact
    assert "tuned on another card of sm_90, NVIDIA H200" in match.how


def test_what_was_only_predicted_for_the_card_leaves_what_was_measured_elsewhere_in_front():
    exact, other = rivals(0.98 * CLEARLY)
    predicted = measured(1.0, limits=H100, variant=LADDER(br=64), predicted=True)
    match = choice.find([predicted, other, exact], ASKED, H100)
    assert match is not None and match.entry == exact


def test_what_is_clearly_faster_serves():
    exact, other = rivals(1.02 * CLEARLY)
    match = choice.find([other, exact], ASKED, H100)
    assert match is not None and match.entry == other
    assert "NVIDIA H200" in match.how and "seqlen 2000, asked for" in match.how
    # On the card that measured it, it is known to be the fastest.
    match = choice.find([other, exact], ASKED, H200)
    assert match is not None and match.entry == exact and match.exact


@pytest.mark.parametrize(("faster", "serves"), [(0.98 * CLEARLY, True), (1.02 * CLEARLY, False)])
def test_what_was_shipped_serves_where_nothing_is_clearly_faster(monkeypatch, faster, serves):
    """Others may have been found since; one's own is known to be the fastest."""
    exact, other = rivals(faster, on=H200)
    match = choice.find([other, exact], ASKED, H200)
    assert match is not None and match.entry == exact
    monkeypatch.setattr(expected, "is_shipped", lambda _: True)
    match = choice.find([other, exact], ASKED, H200)
    assert match is not None and (match.entry == exact) == serves
    assert ("what was tuned for just this should be far slower" in match.how) != serves


@pytest.mark.parametrize(("faster", "serves"), [(0.9, True), (1.2, True), (1.02 * CLEARLY, False)])
def test_what_was_shipped_for_the_card_serves_before_what_was_for_another(monkeypatch, faster, serves):
    """Both for just what is asked: the card's own may have been timed as it was warm."""
    other = measured(1000.0, limits=H100, variant=LADDER(br=32))
    there = Errors([other], H200).expect(other, ASKED)
    assert there is not None
    own = measured(faster * there.us)
    monkeypatch.setattr(expected, "is_shipped", lambda _: True)
    match = choice.find([other, own], ASKED, H200)
    assert match is not None and (match.entry == own) == match.exact == serves


def test_ones_own_kernel_serves_where_it_was_tuned_for_just_this_or_should_be_faster():
    exact = measured(1000.0)
    far, other = Problem(head_dim=64, batch=1, seqlen_q=16, seqlen_k=16), LADDER(br=64)
    slow = measured(10 * told_of(H100, far, other), far, H100, variant=other)
    match = choice.find([slow, exact], ASKED, H100)
    assert match is not None and match.entry == exact
    own = measured(2000.0, limits=H100, variant=LADDER(br=32))
    match = choice.find([own, exact], ASKED, H100)
    assert match is not None and match.entry == own and match.exact


def test_cards_without_a_preset_come_last():
    strange, far = (
        measured(1.0, limits=GH200),
        measured(5000.0, replace(ASKED, batch=64), variant=LADDER(br=32)),
    )
    match = choice.find([strange, far], ASKED, H100)
    assert match is not None and match.entry == far
    match = choice.find([strange], ASKED, H100)
    assert match is not None and match.entry == strange and "NVIDIA GH200 480GB" in match.how


def test_searches_begin_with_the_nearest_winners_of_the_architecture():
    exact = measured(1000.0)
    own = [
        measured(100.0, Problem(head_dim=64, batch=batch, seqlen_q=64, seqlen_k=64), H100, variant=variant)
        for batch, variant in ((1, LADDER(br=32)), (2, LADDER(br=64)))
    ]
    other = measured(1.0, limits=A100, variant=LADDER(br=128))
    assert choice.nearest_variants([*own, other, exact], ASKED, H100, LADDER)[0] == exact.kernel.variant
    same = measured(1000.0, limits=H100, variant=LADDER(br=64))
    seeds = choice.nearest_variants([exact, same, other], ASKED, H100, LADDER)
    assert seeds == [same.kernel.variant, exact.kernel.variant]
