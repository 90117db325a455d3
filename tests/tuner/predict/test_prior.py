"""A prior that remembers what it said."""

from __future__ import annotations

from dataclasses import replace

from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.prior import prior_of, remembered


def test_each_variant_is_predicted_once_and_what_is_known_is_taken_for_true():
    problem, limits = Problem(head_dim=64), PRESETS["gtx-1080"]
    catalogue = build_catalogue(FAMILIES["ladder"], problem, limits, {"hoisted": True})
    asked = []

    def prior(variant) -> float:
        asked.append(variant)
        return prior_of(problem, limits)(variant)

    variants = [catalogue.variant(row) for row in range(3)]
    said = {1: 7.0}
    recalled = remembered(prior, catalogue, said)
    predicted = [recalled(variant) for variant in (*variants, *variants)]
    assert asked == [variants[0], variants[2]]
    assert predicted[:3] == predicted[3:] == [said[row] for row in range(3)] and predicted[1] == 7.0
    # What is no variant of the catalogue is predicted each time.
    outside = replace(variants[0], hoisted=False)
    assert recalled(outside) == recalled(outside) and asked[2:] == [outside] * 2
