"""Draws the sample of each family's kernels that its identity is of, anew.

    python tests/support/identity_sample.py [family ...]

For each problem and card of the golden cases whose scores nothing changes: legal variants that together have
every value of every parameter, for numbers of each width. A sample that is drawn anew, as it must be where a
parameter or a value is gained, changes the identity though the kernels did not change: then the old identity
goes to `flashgen.gen.identity.SAME_MACHINE_CODE`.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.gen.families import FAMILIES, family_named
from flashgen.gen.identity import SAMPLE
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import ITEM_BYTES, Problem
from flashgen.gen.variant import Variant
from flashgen.tuner.predict.catalogue import build_catalogue

CASES = Path(__file__).parents[1] / "gen" / "golden" / "cases.json"
#: Legal variants of a case among which some are chosen.
DRAWN = 1000
Feature = tuple[str, str, Any]


def main(names: list[str]) -> None:
    samples = json.loads(SAMPLE.read_text()) if SAMPLE.exists() else {}
    for name in names or FAMILIES:
        samples[name] = drawn(family_named(name))
        print(f"{name}: {sum(len(case['variants']) for case in samples[name])} kernels")
    SAMPLE.write_text(json.dumps(dict(sorted(samples.items())), indent=1) + "\n")


def drawn(family: type[Variant]) -> list[dict[str, Any]]:
    """The cases of a family with the variants chosen for each."""
    cases = {
        (case["card"], json.dumps(case["problem"]))
        for case in json.loads(CASES.read_text()).values()
        if case["family"] == family.family and "scoring" not in case["problem"]
    }
    ordered = [(card, Problem(**json.loads(problem))) for card, problem in sorted(cases)]
    candidates = [
        (i, variant)
        for i, (card, problem) in enumerate(ordered)
        for variant in some_legal(family, problem, PRESETS[card], {})
    ]
    missing = {(p.name, choice) for p in family.parameters() for choice in p.choices}
    missing -= {feature[1:] for i, variant in candidates for feature in features(variant, ordered[i][1])}
    for name, choice in sorted(missing, key=str):
        # Of no use by advice, but legal where it is asked for.
        for i, (card, problem) in enumerate(ordered):
            found = some_legal(family, problem, PRESETS[card], {name: choice})
            candidates += [(i, variant) for variant in found[:20]]
            if found:
                break
    wanted = {feature for i, variant in candidates for feature in features(variant, ordered[i][1])}
    wanted |= {("case", str(i), None) for i in range(len(ordered))}
    chosen: list[list[Variant]] = [[] for _ in ordered]
    offers = [(i, v, features(v, ordered[i][1]) | {("case", str(i), None)}) for i, v in candidates]
    while wanted:
        i, variant, has = max(offers, key=lambda offer: len(offer[2] & wanted))
        wanted -= has
        chosen[i].append(variant)
    default = asdict(Problem())
    return [
        {
            "card": card,
            "problem": {k: v for k, v in problem.to_dict().items() if v != default[k]},
            "variants": [settings(variant) for variant in variants],
        }
        for (card, problem), variants in zip(ordered, chosen, strict=True)
    ]


def some_legal(
    family: type[Variant], problem: Problem, limits: DeviceLimits, held: dict[str, Any]
) -> list[Variant]:
    catalogue = build_catalogue(family, problem, limits, held)
    rows = random.Random(1).sample(range(len(catalogue)), min(DRAWN, len(catalogue)))
    return [catalogue.variant(row) for row in np.sort(rows)]


def features(variant: Variant, problem: Problem) -> set[Feature]:
    """Each value of a parameter, for each kind of numbers: of 8, 16 and 32 bits."""
    kind = f"{8 * ITEM_BYTES[problem.dtype]} bits"
    return {(kind, name, value) for name, value in variant.to_dict().items()}


def settings(variant: Variant) -> str:
    """The parameters that are not at their defaults, as ``--set`` takes them."""
    values = variant.to_dict()
    return " ".join(f"{p.name}={values[p.name]}" for p in variant.parameters() if values[p.name] != p.default)


if __name__ == "__main__":
    main(sys.argv[1:])
