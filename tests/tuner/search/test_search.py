"""The catalogue of legal variants and the search over it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import product

import optuna
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal, Variant
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.ranking import predicted_fastest
from flashgen.tuner.search import samplers
from flashgen.tuner.search.ask_tell import Search
from flashgen.tuner.search.sampler_names import SamplerName
from flashgen.tuner.search.samplers import Origin, SurrogateSampler
from flashgen.tuner.store.liveness import OWNER, owner
from flashgen.tuner.store.studies import OUTCOME, open_storage, open_study, outcomes
from optuna.trial import TrialState

from tests.support.depth import sampled

LADDER = FAMILIES["ladder"]
PROBLEM = Problem(head_dim=40)
CARD = preset("gtx-1080")


def cost(variant: Variant) -> float:
    """A made-up time with one clear optimum, in microseconds."""
    v = variant.to_dict()
    us = 100.0 + 3 * abs(int(v["br"]) - 64) / 32 + 2 * abs(int(v["bc"]) - 16) / 4
    return (
        us + sum(11.0 for name in ("hoisted", "coalesced", "transposed") if not v[name]) + 20 / int(v["vec"])
    )


def outcome(variant: Variant, us: float | None = None) -> Outcome:
    us = cost(variant) if us is None else us
    measurement = Measurement(
        times_us=(us,),
        median_us=us,
        spread=0.0,
        tflops=1.0,
        registers=32,
        spill_bytes=0,
        smem_bytes=1024,
        occupancy=0.5,
        error=1e-7,
    )
    return Outcome(variant=variant, status=Status.OK, measurement=measurement)


def failure(variant: Variant, status: Status = Status.WRONG) -> Outcome:
    return Outcome(variant=variant, status=status, reason="made to fail")


def new_study() -> optuna.Study:
    return open_study(optuna.storages.InMemoryStorage(), "memory", "test", {})


def run(search: Search, trials: int) -> list[Outcome]:
    done = []
    for _ in range(trials):
        proposal = search.ask()
        if proposal is None:
            break
        done.append(outcome(proposal.variant))
        search.tell(proposal, done[-1])
    return done


@pytest.mark.parametrize("held", [{}, {"br": 64, "vec": 2}])
def test_catalogue_holds_exactly_the_legal_variants(held):
    catalogue = build_catalogue(LADDER, PROBLEM, CARD, held)
    choices = [(held[p.name],) if p.name in held else p.choices for p in LADDER.parameters()]
    names = [p.name for p in LADDER.parameters()]
    legal, broken = set(), Counter()
    for values in product(*choices):
        variant = LADDER(**dict(zip(names, values, strict=True)))
        try:
            variant.check(PROBLEM, CARD)
            legal.add(variant)
        except Illegal as error:
            broken[error.rule] += 1
    assert {catalogue.variant(row) for row in range(len(catalogue))} == legal
    assert all(catalogue.row(catalogue.variant(row)) == row for row in range(len(catalogue)))
    assert dict(catalogue.removed) == dict(broken)
    assert catalogue.total == len(legal) + broken.total()
    assert set(enumerate_space(LADDER, PROBLEM, CARD, held).legal) == legal


def test_nearest_is_the_closest_unseen():
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    variant = catalogue.variant(17)
    assert catalogue.nearest(variant) == 17
    catalogue.take(17)
    near = catalogue.nearest(variant)
    assert near is not None and near != 17
    differing = [k for k, v in catalogue.variant(near).to_dict().items() if v != variant.to_dict()[k]]
    assert len(differing) == 1
    # Numbers are nearer the closer their ranks: the next size is taken before a flipped switch.
    assert differing[0] in {"br", "bc", "vec"}
    for row in range(len(catalogue)):
        catalogue.take(row)
    assert catalogue.nearest(variant) is None


def test_neighbours_differ_in_one_parameter():
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    row = catalogue.row(LADDER(br=64, bc=16, vec=4, q_in_registers=False))
    assert row is not None
    around = catalogue.neighbours(row)
    assert len(around) >= 8
    here = catalogue.variant(row).to_dict()
    for other in around:
        there = catalogue.variant(int(other)).to_dict()
        assert sum(here[k] != there[k] for k in here) == 1


def test_sample_gives_different_unseen_rows():
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    rng = random.Random(0)
    for row in range(len(catalogue) - 30):
        catalogue.take(row)
    rows = catalogue.sample(20, rng)
    assert len(set(rows)) == 20 and all(catalogue.unseen[r] for r in rows)
    assert len(catalogue.sample(100, rng)) == 30


@pytest.mark.parametrize("sampler", SamplerName)
def test_every_trial_is_legal_and_new(sampler):
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    search = Search(catalogue, new_study(), seed=3, sampler=sampler)
    tried = [o.variant for o in run(search, 40)]
    assert len(set(tried)) == 40
    for variant in tried:
        variant.check(PROBLEM, CARD)


def test_trial_parameters_are_the_variant():
    study = new_study()
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=3)
    done = run(search, 30)
    assert [LADDER(**t.params) for t in study.trials] == [o.variant for o in done]
    assert [t.value for t in study.trials] == [o.measurement.median_us for o in done if o.measurement]


@pytest.mark.parametrize("sampler", sampled([SamplerName.GP, SamplerName.FOREST, SamplerName.TPE], 1))
def test_search_beats_chance(sampler):
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    best = min(cost(catalogue.variant(row)) for row in range(len(catalogue)))
    found = []
    for seed in range(3):
        search = Search(build_catalogue(LADDER, PROBLEM, CARD), new_study(), seed=seed, sampler=sampler)
        run(search, 50)
        found.append(search.best_us)
    rng = random.Random(0)
    chance = [min(cost(catalogue.variant(r)) for r in catalogue.sample(50, rng)) for _ in range(20)]
    assert sum(found) / 3 < sum(chance) / 20
    assert min(found) <= 1.03 * best


def test_the_cost_model_is_a_better_start_than_chance():
    """A word that is right about half of what matters, and a start with it or without."""

    def roughly(variant: Variant) -> float:
        return cost(variant) * random.Random(variant.name).uniform(1.0, 1.2)

    def best_after(trials: int, **how) -> float:
        found = []
        for seed in range(3):
            search = Search(build_catalogue(LADDER, PROBLEM, CARD), new_study(), seed=seed, **how)
            run(search, trials)
            found.append(search.best_us)
        return sum(found) / 3

    assert best_after(8, prior=roughly) < best_after(8, seeded=False)
    assert best_after(20, prior=roughly) <= best_after(20, seeded=False)


def test_the_whole_is_swept_in_the_cost_models_order():
    held = {"hoisted": True, "coalesced": True, "vec": 4}
    catalogue = build_catalogue(LADDER, PROBLEM, CARD, held)
    search = Search(catalogue, new_study(), prior=cost, sampler=SamplerName.EXHAUSTIVE)
    assert search.sweeps
    costs = [cost(o.variant) for o in run(search, 10_000)]
    assert len(costs) == len(catalogue)
    assert costs[2:] == sorted(costs[2:])  # after the first and the default


def test_same_seed_same_proposals():
    runs = [
        [o.variant for o in run(Search(build_catalogue(LADDER, PROBLEM, CARD), new_study(), seed=5), 40)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_seeds_come_first():
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    illegal = LADDER(br=256, bc=64, q_in_registers=False)
    with pytest.raises(Illegal):
        illegal.check(PROBLEM, CARD)
    search = Search(catalogue, new_study(), known=[illegal], prior=cost)
    first = [search.ask() for _ in range(3)]
    assert [p.origin for p in first if p] == [Origin.KNOWN, Origin.PREDICTED, Origin.DEFAULT]
    known, predicted, default = (p.variant for p in first if p)
    assert cost(predicted) == min(cost(catalogue.variant(r)) for r in range(len(catalogue)))
    assert catalogue.row(known) == catalogue.nearest(illegal, among_unseen=False)
    assert default == LADDER()


def test_a_large_space_is_ranked_in_part(monkeypatch):
    monkeypatch.setattr("flashgen.tuner.predict.ranking.RANKED_WHOLE", 1000)
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    asked = []

    def prior(variant: Variant) -> float:
        asked.append(variant)
        return cost(variant)

    ranked = predicted_fastest(catalogue, prior, seed=1)
    assert len(asked) == len(set(asked)) == len(ranked) < len(catalogue)
    assert ranked == sorted(ranked)
    best = min(cost(catalogue.variant(row)) for row in range(len(catalogue)))
    assert ranked[0][0] <= 1.05 * best


def test_a_budget_for_all_tries_all():
    held = {"hoisted": True, "coalesced": True, "transposed": True, "vec": 4, "q_in_registers": False}
    catalogue = build_catalogue(LADDER, PROBLEM, CARD, held)
    search = Search(catalogue, new_study(), budget=len(catalogue))
    assert search.sweeps and not Search(catalogue, new_study(), budget=len(catalogue) - 1).sweeps
    done = run(search, 10_000)
    assert len({o.variant for o in done}) == len(done) == len(catalogue) > 20
    assert search.ask() is None


def test_failures_are_pruned_and_do_not_return():
    study = new_study()
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=1)
    failed = []
    for i in range(60):
        proposal = search.ask()
        assert proposal is not None
        if i % 3:
            search.tell(proposal, outcome(proposal.variant))
        else:
            failed.append(proposal.variant)
            search.tell(proposal, failure(proposal.variant, Status.COMPILE_FAILED))
    states = Counter(t.state for t in study.trials)
    assert states == {TrialState.COMPLETE: 40, TrialState.PRUNED: 20}
    assert len({LADDER(**t.params) for t in study.trials}) == 60
    kept = [o for _, o in outcomes(study, LADDER) if o.status is Status.COMPILE_FAILED]
    assert [o.variant for o in kept] == failed
    assert {o.reason for o in kept} == {"made to fail"}


def test_a_batch_in_flight_holds_no_duplicates():
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), new_study(), seed=2)
    run(search, 20)
    batch = [search.ask() for _ in range(16)]
    assert len({p.variant for p in batch if p}) == 16
    for proposal in batch:
        assert proposal is not None
        search.tell(proposal, outcome(proposal.variant))


def test_resumes_without_repeating(tmp_path):
    where = str(tmp_path / "trials.sqlite3")
    tried: list[Variant] = []
    for _ in range(3):
        study = open_study(open_storage(where), where, "resumed", {})
        search = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=0)
        assert [o.variant for o in search.earlier] == tried
        tried += [o.variant for o in run(search, 15)]
    assert len(set(tried)) == 45


def test_what_a_dead_run_left_is_tried_again(tmp_path):
    where = str(tmp_path / "trials.sqlite3")
    study = open_study(open_storage(where), where, "killed", {})
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=0)
    run(search, 3)
    left = [search.ask() for _ in range(4)]
    for proposal in left:
        assert proposal is not None
        host, pid, *_ = owner().split("/")
        proposal.trial.set_user_attr(OWNER, f"{host}/{pid}/1")  # a process of that number, but not this one
    study = open_study(open_storage(where), where, "killed", {})
    assert Counter(t.state for t in study.trials) == {TrialState.COMPLETE: 3, TrialState.FAIL: 4}
    again = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=0)
    assert again.catalogue.num_unseen == len(again.catalogue) - 3


def test_what_a_living_run_holds_is_left_alone(tmp_path):
    where = str(tmp_path / "trials.sqlite3")
    study = open_study(open_storage(where), where, "shared", {})
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=0)
    held = search.ask()
    assert held is not None
    other = open_study(open_storage(where), where, "shared", {})
    assert [t.state for t in other.trials] == [TrialState.RUNNING]
    second = Search(build_catalogue(LADDER, PROBLEM, CARD), other, seed=0)
    assert held.variant not in [o.variant for o in run(second, 10)]
    search.tell(held, outcome(held.variant))


def test_held_parameters_share_the_study():
    study = new_study()
    run(Search(build_catalogue(LADDER, PROBLEM, CARD, {"vec": 4}), study, seed=0), 20)
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), study, seed=0)
    assert len(search.earlier) == 20
    run(search, 20)
    assert len({LADDER(**t.params) for t in study.trials}) == 40


def test_outcomes_survive_the_storage(tmp_path):
    where = str(tmp_path / "trials.journal")
    study = open_study(open_storage(where), where, "whole", {"flashgen": "1"})
    search = Search(build_catalogue(LADDER, PROBLEM, CARD), study)
    proposal = search.ask()
    assert proposal is not None
    told = outcome(proposal.variant)
    search.tell(proposal, told)
    again = open_study(open_storage(where), where, "whole", {})
    assert [o for _, o in outcomes(again, LADDER)] == [told]
    assert again.user_attrs["flashgen"] == "1"
    assert again.trials[0].user_attrs[OUTCOME]["status"] == "ok"


def test_a_storage_that_cannot_be_opened_says_so(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(FlashgenError, match="--storage"):
        open_storage(str(blocked / "trials.sqlite3"))
    with pytest.raises(FlashgenError, match="--storage"):
        open_storage(str(blocked))  # a file, but no database
    with pytest.raises(FlashgenError, match="--storage"):
        open_storage("nosuch://host/db")


def test_runs_that_start_at_once_share_a_new_file(tmp_path):
    where = str(tmp_path / "trials.sqlite3")
    program = (
        "import sys; from flashgen.tuner.store.studies import *; "
        "print(open_study(open_storage(sys.argv[1]), sys.argv[1], 'shared', {'seed': 1}).study_name)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, where], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [run.communicate()[0] for run in runs] == ["shared\n"] * 4


def test_a_model_is_told_of_no_more_than_so_many_trials_and_of_the_same_ones(monkeypatch):
    monkeypatch.setattr(samplers, "MOST_TOLD", 20)
    catalogue = build_catalogue(LADDER, PROBLEM, CARD)
    sampler = SurrogateSampler(catalogue, seed=3)
    for row in range(100):
        sampler.hear(row, row, None if row % 4 == 0 else 50.0 + (row * 37) % 100)
    times, failed = sampler._learned_from()
    every = sampler._times
    assert len(times) == len(failed) == 20 and set(times.items()) <= set(every.items())
    assert set(sorted(every, key=every.__getitem__)[:10]) <= set(times)
    assert list(times) == sorted(times)
    sampler.hear(100, 100, 1000.0)
    again, failed_again = sampler._learned_from()
    assert len(set(times) ^ set(again)) <= 2 and failed == failed_again
    few = SurrogateSampler(catalogue, seed=3)
    few.hear(0, 5, 7.0)
    assert few._learned_from() == (few._times, [])
