import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, floor
from typing import ClassVar

import pytest
from flashgen.gen.columns import least
from flashgen.gen.families import FAMILIES, family_named
from flashgen.gen.limits import PRESETS, preset
from flashgen.gen.problem import Problem
from flashgen.gen.serves import IEEE_FLOAT32, Serves
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal, Variant, param, rule
from flashgen.gen.watched import watched

from tests.support import ROOT
from tests.support.depth import sampled


@dataclass(frozen=True)
class Toy(Variant):
    """A family whose space can be walked by hand."""

    family: ClassVar[str] = "toy"
    serves: ClassVar[Serves] = IEEE_FLOAT32

    a: int = param(1, 2, 3, doc="first")
    b: int = param(1, 2, 4, doc="second")
    c: str = param("x", "y", doc="third")

    @rule("a and b", after="b")
    def _sum(self, problem, limits):
        return f"{self.a} + {self.b} exceeds 5" if self.a + self.b > 5 else None

    @rule("c", after="c", advisory=True)
    def _c_is_x_when_a_is_one(self, problem, limits):
        return "c=y gains nothing at a=1" if self.a == 1 and self.c == "y" else None


LIMITS = PRESETS["h200"]
#: A problem of each family's, with all that changes its rules.
CASES = json.loads((ROOT / "tests" / "gen" / "golden" / "cases.json").read_text())


def test_pruned_walk_equals_the_filtered_product():
    space = enumerate_space(Toy, Problem(), LIMITS)
    expected = {
        (a, b, c)
        for a, b, c in product((1, 2, 3), (1, 2, 4), "xy")
        if a + b <= 5 and not (a == 1 and c == "y")
    }
    assert {(v.a, v.b, v.c) for v in space.legal} == expected
    assert space.total == 18
    assert space.removed == {"a and b": 4, "c": 3}
    assert len(space) == len(space.legal) == 18 - 7


def test_held_parameters_and_the_advice_about_them():
    held = enumerate_space(Toy, Problem(), LIMITS, {"a": 1, "c": "y"})
    assert {(v.a, v.b, v.c) for v in held.legal} == {(1, 1, "y"), (1, 2, "y"), (1, 4, "y")}


class Advised(Toy):
    """Its advice leaves nothing: nobody should set b, or c to y."""

    @rule("b", after="b", advisory=True)
    def _no_b(self, problem, limits):
        return "never"

    @rule("c is not y", after="c", advisory=True)
    def _no_y(self, problem, limits):
        return "y" if self.c == "y" else None


def test_advice_that_leaves_nothing_is_waived():
    space = enumerate_space(Advised, Problem(), LIMITS)
    assert space.waived == ("b",)
    assert {(v.a, v.b, v.c) for v in space.legal} == {(a, b, "x") for a in (1, 2, 3) for b in (1, 2, 4)} - {
        (2, 4, "x"),
        (3, 4, "x"),
    }
    both = enumerate_space(Advised, Problem(), LIMITS, {"a": 3, "b": 4})
    assert len(both) == 0 and both.waived == () and both.removed == {"a and b": 2}


@dataclass(frozen=True)
class Asked(Toy):
    """Counts how often its rules are asked; they read little, and more where that says so."""

    d: int = param(*range(50), doc="fourth")
    asked: ClassVar[Counter[str]] = Counter()

    @rule("d", after="d")
    def _d_is_small_unless_b_is_one(self, problem, limits):
        self.asked["d"] += 1
        return "large" if self.d > 40 and self.b > 1 else None

    @rule("other b", after="d", advisory=True)
    def _of_others(self, problem, limits):
        self.asked["other b"] += 1
        return "no" if self.changed(b=4).b == self.b and self.d == 7 else None


def test_a_rule_is_asked_once_for_all_that_take_the_same_path_through_it():
    Asked.asked.clear()
    space = enumerate_space(Asked, Problem(), LIMITS)
    whole = product((1, 2, 3), (1, 2, 4), "xy", range(50))
    assert [(v.a, v.b, v.c, v.d) for v in space.legal] == [
        (a, b, c, d)
        for a, b, c, d in whole
        if a + b <= 5 and (a > 1 or c == "x") and (d <= 40 or b == 1) and (d != 7 or b != 4)
    ]
    assert space.total == 900 and len(space) + sum(space.removed.values()) == 900
    # One variant alone; the large d and the small ones; of the large ones, with each b, those of b > 1, and
    # one by one the nine others: not the 550 that there are.
    assert Asked.asked["d"] == 1 + 2 + 1 + 9
    assert Asked.asked["other b"] == 1 + 5


@dataclass(frozen=True)
class Reckoned(Toy):
    """Its rules do with parameters what Python does with numbers."""

    d: int = param(*range(1, 60), doc="fourth")
    e: bool = param(False, True, doc="fifth")

    @rule("arithmetic of d", after="d")
    def _reckons(self, problem, limits):
        words = {1: "one", 2: "two", 4: "four"}
        rest = -(-self.d // self.b) % 5 + divmod(self.d, 3)[1] + least(self.d, 7) - max(self.a, self.b)
        if rest in (3, 4) or self.d & -self.d == 16 or not self.d ^ 21:
            return f"{rest:.1f} is no rest of {words[self.b]}"
        return "long" if floor(self.d / 2 + self.a) ** 2 > 600 or ceil(self.d / 4) == 9 else None

    @rule("e", after="e")
    def _counts(self, problem, limits):
        if self.e and sum(n for n in range(self.d) if n % 2) > 100:
            return "many"
        return "e" if (self.e + (self.d > 3) + (self.c == "y")) == 3 and [0, 1, 2][self.d % 3] else None


def test_rules_say_of_many_variants_what_they_say_of_each():
    space = enumerate_space(Reckoned, Problem(), LIMITS)
    legal, broken = [], Counter()
    for values in product(*(p.choices for p in Reckoned.parameters())):
        variant = Reckoned(**dict(zip((p.name for p in Reckoned.parameters()), values, strict=True)))
        verdicts = ((each.name, each.verdict(variant, Problem(), LIMITS)) for each in Reckoned.rules())
        first = next((name for name, reason in verdicts if reason is not None), None)
        if first is None:
            legal.append(variant)
        else:
            broken[first] += 1
    assert list(space.legal) == legal and space.removed == broken
    assert len(broken) == 4 and min(broken.values()) > 30


def test_parameters_that_have_no_value_yet_are_at_their_defaults():
    class Early(Toy):
        @rule("early", after="a")
        def _reads_ahead(self, problem, limits):
            return "b is 1 here" if self.b == 1 and self.a == 2 else None

    assert {v.a for v in enumerate_space(Early, Problem(), LIMITS).legal} == {1, 3}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_a_changed_variant_is_the_one_that_dataclasses_make(family):
    variant = family()
    other = {p.name: p.choices[-1] for p in family.parameters()[:2]}
    assert variant.changed(**other) == replace(variant, **other) and variant == family()


def test_what_is_read_of_a_variant_is_noted_in_its_changes_too():
    read = set[str]()
    made = watched(Toy, {"a": 1, "b": 2, "c": "x"}, read)
    assert (made.a, made.changed(b=4).b, made.changed(a=3).c) == (1, 4, "x")
    assert read == {"a", "c"}


@pytest.mark.parametrize("card", ["gtx-1080", "h200"])
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(64, 1, 1), (128, 1, 4096), (256, 4096, 1)])
def test_the_shortest_sequences_can_be_tuned_for(card, head_dim, seqlen_q, seqlen_k):
    problem = Problem(head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert len(enumerate_space(family_named("simt"), problem, PRESETS[card]))
    if card == "h200":
        # Held to spare the walk most of a wide space.
        held = {"bc": 16, "layout": "padded"}
        for dtype in ("f16", "f32"):
            space = enumerate_space(family_named("mma"), replace(problem, dtype=dtype), PRESETS[card], held)
            assert len(space)


def test_check_names_the_rule_and_both_numbers():
    with pytest.raises(Illegal, match="a and b: 3 \\+ 4 exceeds 5"):
        Toy(a=3, b=4).check(Problem(), LIMITS)
    Toy(a=1, c="y").check(Problem(), LIMITS)
    assert Toy(a=1, c="y").advice(Problem(), LIMITS) == "c: c=y gains nothing at a=1"
    assert Toy(a=2, c="y").advice(Problem(), LIMITS) is None


def test_settings_are_parsed_against_the_choices():
    assert Toy.parse({"a": "2", "c": "y"}) == {"a": 2, "c": "y"}
    with pytest.raises(ValueError, match="a=7 is not a choice; choose from 1, 2, 3"):
        Toy.parse({"a": "7"})
    with pytest.raises(ValueError, match="no parameter 'z'"):
        Toy.parse({"z": "7"})
    simt = family_named("simt")
    with pytest.raises(ValueError, match="did you mean 'k_layout'"):
        simt.parse({"k_layot": "row"})
    assert simt.parse({"q_in_registers": "true"}) == {"q_in_registers": True}


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'simt'"):
        family_named("simd")
    with pytest.raises(ValueError, match="did you mean 'gtx-1080'"):
        preset("gtx1080")


def _families_with_a_problem():
    return [
        (family, Problem(head_dim=d, causal=causal), card)
        for family, d, causal, card in [
            ("simt", 64, True, "h200"),
            ("simt", 40, False, "gtx-1080"),
            ("ladder", 64, False, "gtx-1080"),
            ("mma", 64, True, "h200"),
        ]
    ] + [
        ("mma", Problem(dtype="f16", head_dim=64), "t4"),
        ("mma", Problem(dtype="bf16", head_dim=40, head_dim_v=64), "rtx-3090"),
    ]


@pytest.mark.parametrize(("family", "problem", "card"), _families_with_a_problem())
def test_no_rule_reads_a_parameter_that_is_set_after_it(family, problem, card):
    """A rule that looked ahead would prune, with one subtree, variants that are legal."""
    klass, limits = FAMILIES[family], PRESETS[card]
    parameters = klass.parameters()
    names = [p.name for p in parameters]
    for each in klass.rules():
        later = parameters[names.index(each.after) + 1 :]
        for variant in (klass(), klass(**{p.name: p.choices[-1] for p in parameters if p not in later})):
            said = each.verdict(variant, problem, limits)
            for other in later:
                for choice in other.choices:
                    changed = klass(**{**variant.to_dict(), other.name: choice})
                    assert (each.verdict(changed, problem, limits) is None) == (said is None), (
                        each,
                        other.name,
                    )


@pytest.mark.parametrize("name", sampled(CASES, 4, thorough=12))
def test_what_is_enumerated_is_legal(name):
    case = CASES[name]
    problem, limits = Problem.from_dict(case["problem"]), PRESETS[case["card"]]
    space = enumerate_space(FAMILIES[case["family"]], problem, limits)
    names = [p.name for p in space.family.parameters()]
    for i in random.Random(name).sample(range(len(space)), min(len(space), 3000)):
        codes = zip(names, space.choices, space.codes[:, i].tolist(), strict=True)
        space.family.with_values({each: choices[code] for each, choices, code in codes}).check(
            problem, limits
        )


@pytest.mark.parametrize("card", sampled(["p100", "t4", "a100", "rtx-4090", "h200"], 1))
@pytest.mark.parametrize("head_dim", sampled([1, 65, 128, 256], 1))
def test_every_card_can_run_every_head_dim(card, head_dim):
    # Held to spare the walk most of the narrow head dims' many variants.
    held = {"p_passes": 1, "q_in_registers": False}
    space = enumerate_space(FAMILIES["simt"], Problem(head_dim=head_dim), PRESETS[card], held)
    assert len(space) > 0
    for variant in space.legal[:: max(1, len(space) // 20)]:
        variant.check(space.problem, space.limits)
        assert variant.smem_bytes(space.problem, space.limits) <= space.limits.smem_per_block


@pytest.mark.parametrize(
    ("card", "dtype", "precision"),
    [
        ("t4", "f16", "auto"),
        ("a100", "bf16", "auto"),
        ("rtx-4090", "f32", "tf32"),
        ("h200", "f32", "auto"),
        ("b200", "f16", "auto"),
    ],
)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (65, 33), (192, 128), (256, 256)])
def test_tensor_cores_serve_every_head_dim(card, dtype, precision, head_dim, head_dim_v):
    problem = Problem(dtype=dtype, precision=precision, head_dim=head_dim, head_dim_v=head_dim_v)
    # Held to spare the walk most of the narrow head dims' many variants.
    space = enumerate_space(FAMILIES["mma"], problem, PRESETS[card], {"bc": 16, "rows_per_warp": 16})
    assert len(space) > 0
    for variant in space.legal[:: max(1, len(space) // 20)]:
        variant.check(space.problem, space.limits)
        assert variant.smem_bytes(space.problem, space.limits) <= space.limits.smem_per_block


def test_every_rule_of_tensor_cores_counts():
    problem = Problem(dtype="f16", head_dim=128)
    space = enumerate_space(FAMILIES["mma"], problem, PRESETS["t4"])
    assert sum(space.removed.values()) + len(space) == space.total
    assert {"shared memory", "registers", "copies", "divisibility", "occupancy"} <= space.removed.keys()
    nothing = enumerate_space(FAMILIES["mma"], Problem(dtype="bf16"), PRESETS["t4"])
    assert len(nothing) == 0 and set(nothing.removed) == {"arithmetic"}


def test_every_rule_counts():
    space = enumerate_space(FAMILIES["simt"], Problem(), PRESETS["gtx-1080"])
    assert sum(space.removed.values()) + len(space) == space.total
    assert {"shared memory", "registers", "threads", "divisibility", "occupancy"} <= space.removed.keys()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_a_variant_of_values_is_the_one_that_its_constructor_makes(family):
    values = {p.name: p.choices[-1] for p in family.parameters()}
    made = family.with_values(values)
    assert (
        made == family(**values)
        and hash(made) == hash(family(**values))
        and repr(made) == repr(family(**values))
    )
    assert (
        made.to_dict() == values == family.from_dict({name: str(v) for name, v in values.items()}).to_dict()
    )
    # What a study of an older version does not say is at its default.
    name, *_ = values
    rest = {n: v for n, v in values.items() if n != name}
    assert family.from_dict(rest) == family(**rest)
    with pytest.raises(ValueError, match="choose from"):
        family.from_dict(values | {name: "none"})
    with pytest.raises(ValueError, match="no parameter"):
        family.from_dict(values | {"none": 1})
