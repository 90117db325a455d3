"""What a search tries first, against times of an H200: what won there is among it."""

from __future__ import annotations

from functools import cache

import optuna
import pytest
from flashgen.gen.variant import Value, Variant
from flashgen.tuner.exchange.measured_tables import Measured, read
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.prior import prior_of
from flashgen.tuner.search.ask_tell import Search
from flashgen.tuner.shelf import choice, library

from tests.support import DATA, ROOT
from tests.support.depth import sampled

#: Proposals that are looked at, and how much slower than the fastest the best of them may be.
PROPOSALS, AS_FAST = 10, 1.01
#: Problems of which the fastest timed is, or is as fast as, one of a family's first proposals. Of one row on
#: 131072 keys it is not: what won there since has results meet in a way that the table does not have.
FOUND = (
    "bf16_d128_b32_h32_kv8_n1_m8192",
    "bf16_d576v512_latent_b32_h64_kv1_n1_m8192",
    "bf16_d128_b1_h32_kv8_n1_m4096",
    "bf16_kve4m3_d128_b32_h32_kv8_n1_m8192",
    "bf16_d128_causal_b2_h32_kv8_n512_m8192",
    "bf16_d128_softcap30_causal_b2_n8192",
    "bf16_d256_softcap50_causal_b2_h8_n8192",
    "bf16_d128_alibi_causal_b2_n8192",
    "bf16_d128_biasbf16",
    "bf16_d128_backward_b2_n8192",
    "bf16_d64_backward_b8_h32_n2048",
)


@cache
def tables() -> list[Measured]:
    """What was timed, with older texts of kernels as well: it is which values were tried that counts."""
    return read(DATA / "measured_h200.json", superseded=True)


def measured(name: str) -> Measured:
    (found,) = (each for each in tables() if each.problem.name == name)
    return found


def never_varied(family: type[Variant]) -> dict[str, Value]:
    """Parameters with one value in all that was timed of a family, as those that it had not yet: of their
    other values no table says how fast they are."""
    timed = [each for table in tables() for each in table.variants if type(each) is family]
    values = {p.name: {getattr(each, p.name) for each in timed} for p in family.parameters()}
    return {name: next(iter(found)) for name, found in values.items() if len(found) == 1}


@cache
def tuned() -> list[library.Entry]:
    return library.entries([ROOT / "out"])


@pytest.mark.parametrize("name", sampled(FOUND, 2))
def test_the_fastest_is_among_the_first_proposals(name):
    times = measured(name)
    fastest = times.variants[int(times.us.argmin())]
    search = Search(
        build_catalogue(type(fastest), times.problem, times.limits, never_varied(type(fastest))),
        optuna.create_study(),
        known=choice.nearest_variants(tuned(), times.problem, times.limits, type(fastest)),
        prior=prior_of(times.problem, times.limits),
    )
    proposed = {proposal.variant for proposal in search.ask_many(PROPOSALS)}
    timed = [us for variant, us in zip(times.variants, times.us, strict=True) if variant in proposed]
    assert timed and min(timed) <= AS_FAST * times.us.min()
