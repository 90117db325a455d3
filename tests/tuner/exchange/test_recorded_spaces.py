"""What is claimed of the search, on spaces whose every variant was timed on a card."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from flashgen.tuner.exchange.recorded_spaces import read
from flashgen.tuner.exchange.replay import ReplayOptions, replay
from flashgen.tuner.exchange.replay_curves import GOAL, Replayed
from flashgen.tuner.exchange.replay_methods import NO_PRIOR
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.tune.options import TuneOptions

from tests.support import DATA
from tests.support.depth import sampled

#: Whatever `flashgen record` has put there.
FILES = sorted(path.name for path in DATA.glob("*.jsonl.xz"))
OURS = str(SamplerName.GP)
EVALUATIONS, EARLY = 100, 12


@cache
def replayed(name: str) -> Replayed:
    methods = (OURS, str(SamplerName.TPE), str(SamplerName.RANDOM))
    options = ReplayOptions(methods=methods, seeds=2, evaluations=EVALUATIONS)
    return replay([(name, read(DATA / name))], options)[0]


def test_there_are_recorded_spaces():
    assert len(FILES) >= 2
    assert TuneOptions.__dataclass_fields__["sampler"].default == OURS


@pytest.mark.parametrize("name", sampled(FILES, 1))
def test_the_cost_model_orders_what_was_measured(name):
    assert replayed(name).rho >= 0.7


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_nearly_the_optimum_is_found_soon_and_nobody_is_ahead(name):
    found = replayed(name)
    (ours,) = (c for c in found.curves if c.method == OURS)
    assert found.space.unknown == 0 and not found.space.predicted
    # Each start.
    assert found.allowed >= EVALUATIONS
    assert ours.shares[:, -1].min() >= GOAL
    assert found.ahead_of(OURS) == []


@pytest.mark.parametrize("name", FILES)
def test_to_start_from_the_cost_model_beats_to_start_at_random(name):
    options = ReplayOptions(methods=(OURS, OURS + NO_PRIOR), seeds=3, evaluations=EARLY)
    primed, blind = replay([(name, read(DATA / name))], options)[0].curves
    assert primed.mean[0] > blind.mean[0] and primed.mean[-1] > blind.mean[-1]
    assert np.median(primed.until()) < np.median(blind.until())


def test_noise_between_neighbouring_runs_does_not_lead_astray():
    """Every time off by some 3 %, as neighbouring runs of one kernel differ."""
    space = read(DATA / FILES[0])
    draws = np.random.default_rng(1)
    noisy = tuple(
        e if e.median_us is None else replace(e, median_us=e.median_us * (1 + 0.03 * draws.standard_normal()))
        for e in space.entries
    )
    options = ReplayOptions(methods=(OURS + NO_PRIOR, str(SamplerName.RANDOM)), seeds=2, evaluations=50)
    ours, chance = replay([("noisy", replace(space, entries=noisy))], options)[0].curves
    assert ours.mean[-1] > chance.mean[-1] and ours.mean[-1] > 0.92
