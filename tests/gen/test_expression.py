"""Expressions print what they compute."""

from __future__ import annotations

import ctypes
import pickle
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flashgen.gen.expression import (
    Constant,
    Expression,
    Kind,
    Load,
    Name,
    apply,
    conjuncts,
    divided_up,
    loads_of,
    maximum,
    minimum,
    names_of,
    replaced,
    statements,
    with_buffers,
)
from flashgen.gen.tree.functions import FUNCTIONS, Unit

from ..support import formulas

NAMES = ("a", "b", "c")


def drawn(rng: random.Random, depth: int) -> Expression:
    if depth == 0:
        return rng.choice([*map(Name, NAMES), Constant(rng.randint(1, 9), rng.choice(["", "kBr"]))])
    left, right = drawn(rng, depth - 1), drawn(rng, depth - 1)
    return rng.choice(
        [
            lambda: left + right,
            lambda: left + rng.randint(0, 5),
            lambda: left - 1,
            lambda: left - right,
            lambda: left * right,
            lambda: left // Constant(rng.randint(1, 7)),
            lambda: divided_up(left, Constant(rng.randint(1, 7), "kBr")),
            lambda: minimum(left, right),
            lambda: maximum(left, right),
        ]
    )()


@pytest.mark.parametrize("seed", range(60))
def test_python_and_numpy_agree(seed: int) -> None:
    rng = random.Random(seed)
    expression = drawn(rng, 3)
    values = {name: rng.randint(1, 99) for name in NAMES}
    assert eval(expression.python(), {"min": min, "max": max}, values) == expression.value(values)
    arrays = {name: np.full(3, value) for name, value in values.items()}
    assert (np.asarray(expression.value(arrays)) == expression.value(values)).all()
    assert expression.names() <= set(NAMES)


@pytest.mark.parametrize("seed", range(60))
def test_names_can_be_replaced(seed: int) -> None:
    rng = random.Random(seed)
    expression, other = drawn(rng, 3), drawn(rng, 2)
    values = {name: rng.randint(1, 99) for name in NAMES}
    replaced = expression.with_names({"a": other})
    assert replaced.value(values) == expression.value(values | {"a": other.value(values)})


def test_what_is_printed_reads_as_written_by_hand() -> None:
    rows, tile = Name("rows", nonnegative=True), Constant(128, "kBr")
    assert divided_up(rows, tile).c() == "(rows + kBr - 1) / kBr"
    assert divided_up(rows, tile).python() == "(rows + 128 - 1) // 128"
    assert divided_up(rows, 1) == rows
    assert (rows + 1 - 1).c() == "rows" and (rows - 2 + 1).c() == "rows - 1"
    assert (rows * (rows // Name("b", positive=True))).c() == "rows * (rows / b)"
    assert (Name("first") - 1 + Name("diagonal") + 1).c(
        {"first": "q_tile * kBr"}
    ) == "q_tile * kBr + diagonal"
    assert (Name("x") * 2).c({"x": "a ? b : c"}) == "(a ? b : c) * 2"


# -- kinds, functions, elements of buffers -------------------------------------------------------------------

SCORE, SLOPE = Name("score", Kind.FLOAT), Name("slope", Kind.FLOAT)
B, Q, K = (Name(each, nonnegative=True) for each in ("b", "q", "k"))
DOC = Load("doc", (B, Q), Kind.INT)

#: Formulas are compiled with wide types, so that they round as numpy does: what is tested is their text.
PREAMBLE = """
#include <cmath>
using std::abs;
long min(long a, long b) { return a < b ? a : b; }
long max(long a, long b) { return a > b ? a : b; }
long floor_div(long a, long b) { return b == 0 ? 0 : a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }
long floor_mod(long a, long b) { return b == 0 ? 0 : a - floor_div(a, b) * b; }
double rsqrtf(double x) { return 1 / std::sqrt(x); }
#define fminf fmin
#define fmaxf fmax
#define fabsf fabs
#define expf exp
#define exp2f exp2
#define logf log
#define log2f log2
#define sqrtf sqrt
#define tanhf tanh
#define sinf sin
#define cosf cos
#define powf pow
#define floorf floor
#define int long
#define float double
template <typename T> T at(const T* data, long rows, long columns, long i, long j) {
  i = min(max(i < 0 ? i + rows : i, 0), rows - 1);
  j = min(max(j < 0 ? j + columns : j, 0), columns - 1);
  return data[i * columns + j];
}
"""
ARRAYS = {"doc": "int", "tree": "int", "bias": "float"}
SCALARS = {**dict.fromkeys([*formulas.INDICES, "n"], "int"), "score": "float", "slope": "float"}
C_TYPES = {"int": ctypes.c_long, "float": ctypes.c_double}
DTYPES = {"int": np.int64, "float": np.float64}


def compiled(tmp_path: Path, expressions: list[Expression], values: dict) -> Callable[[int], np.ndarray]:
    """Returns the function that computes an expression by its text, compiled, for all of the values."""
    texts = [PREAMBLE]
    for name, kind in ARRAYS.items():
        rows, columns = values[name].shape
        texts.append(
            f"static const {kind}* {name};\n"
            f'extern "C" void set_{name}(const {kind}* data) {{ {name} = data; }}\n'
            f"static {kind} {name}_at(int, int i, int j) "
            f"{{ return at({name}, {rows}, {columns}, i, j); }}\n"
        )
    parameters = ", ".join(f"{kind} {name}" for name, kind in SCALARS.items())
    for number, each in enumerate(expressions):
        lines, result = statements(each, {"args": "0"}, "  ", width=60)
        body = "\n".join([*lines, f"  return {result};"])
        texts.append(f'extern "C" double f{number}({parameters}) {{\n{body}\n}}\n')
        texts.append(f'extern "C" double whole{number}({parameters}) {{ return {each.c({"args": "0"})}; }}\n')
    source, library = tmp_path / "formulas.cpp", tmp_path / "formulas.so"
    source.write_text(re.sub(r"(\d)f\b", r"\1", "".join(texts)))  # literals, too, are wide
    subprocess.run(["g++", "-O0", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))
    kept = {name: np.ascontiguousarray(values[name], DTYPES[kind]) for name, kind in ARRAYS.items()}
    for name, kind in ARRAYS.items():
        getattr(functions, f"set_{name}")(kept[name].ctypes.data_as(ctypes.POINTER(C_TYPES[kind])))

    def computed(number: int) -> np.ndarray:
        rows = []
        for prefix in ("f", "whole"):
            function = getattr(functions, f"{prefix}{number}")
            function.restype, function.argtypes = (
                ctypes.c_double,
                [C_TYPES[each] for each in SCALARS.values()],
            )
            arguments = [np.asarray(values[name], DTYPES[kind]).tolist() for name, kind in SCALARS.items()]
            rows.append([function(*each) for each in zip(*arguments, strict=True)])
        assert np.array_equal(rows[0], rows[1], equal_nan=True) and kept
        return np.array(rows[0])

    return computed


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 60), pytest.param(1, 2000, marks=pytest.mark.thorough)], ids=["some", "many"]
)
def test_cpp_computes_what_numpy_does(tmp_path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    values = formulas.values(np.random.default_rng(seed), 12)
    trees = [formulas.drawn(rng, rng.choice(list(Kind)), rng.randint(1, 5)) for _ in range(count)]
    computed = compiled(tmp_path, trees, values)
    for number, tree in enumerate(trees):
        expected = np.broadcast_to(np.asarray(tree.value(values), np.float64), 12)
        message = tree.python()[:2000]
        np.testing.assert_allclose(computed(number), expected, rtol=1e-9, atol=1e-9, err_msg=message)


@pytest.mark.parametrize("seed", range(40))
def test_names_within_functions_can_be_replaced(seed: int) -> None:
    rng = random.Random(seed)
    values = formulas.values(np.random.default_rng(seed), 8)
    tree = formulas.drawn(rng, Kind.FLOAT, 4)
    other = replaced(tree.with_names({"q": K + 1, "score": SCORE * 2.0}), {DOC: Constant(3)})
    values_then = values | {"q": values["k"] + 1, "score": values["score"] * 2.0}
    if DOC not in loads_of(tree):
        np.testing.assert_allclose(other.value(values), tree.value(values_then))
    assert {each.name for each in names_of(tree)} == tree.names()
    assert pickle.loads(pickle.dumps(tree)) == tree and hash(tree.with_names({})) == hash(tree)


@pytest.mark.parametrize(
    ("made", "c", "python"),
    [
        (SCORE * 2 + 0.5, "score * 2.0f + 0.5f", "score * 2.0 + 0.5"),
        (SCORE - SLOPE * (K - Q), "score - slope * float(k - q)", "score - slope * float(k - q)"),
        (Q / K, "float(q) / float(k)", "float(q) / float(k)"),
        (Q // 4, "q / 4", "q // 4"),
        ((Q - K) // 4, "floor_div(q - k, 4)", "(q - k) // 4"),
        ((Q + 3 - 1) % (K + 1), "(q + 2) % (k + 1)", "(q + 2) % (k + 1)"),
        (Q // K, "floor_div(q, k)", "q // k"),
        (Q % Name("n"), "floor_mod(q, n)", "q % n"),
        (apply("tanh", SCORE), "tanhf(score)", "tanh(score)"),
        (apply("min", SCORE, Q), "fminf(score, float(q))", "min(score, float(q))"),
        (abs(Q - K), "abs(q - k)", "abs(q - k)"),
        (abs(SCORE), "fabsf(score)", "abs(score)"),
        (apply("bit_and", Q, K + 1) + 1, "(q & (k + 1)) + 1", "(q & (k + 1)) + 1"),
        (
            apply("eq", apply("lt", Q, K), apply("bit_and", apply("eq", DOC, 1), apply("lt", K, 9))),
            "(q < k) == (doc_at(args, b, q) == 1 && k < 9)",
            "(q < k) == (doc[b, q] == 1 and k < 9)",
        ),
        (
            apply("or", apply("and", apply("lt", Q, K), apply("lt", Q, 4)), apply("not", apply("lt", Q, 9))),
            "(q < k && q < 4) || !(q < 9)",
            "(q < k and q < 4) or not q < 9",
        ),
        (
            apply("where", apply("ge", Q, K), SCORE, float("-inf")),
            "(q >= k ? score : -INFINITY)",
            "where(q >= k, score, -inf)",
        ),
        (-(SCORE + 1), "-(score + 1.0f)", "-(score + 1.0)"),
        (SCORE + (SLOPE + 1.0), "score + (slope + 1.0f)", "score + (slope + 1.0)"),
        (SCORE + -SLOPE, "score - slope", "score - slope"),
        (SCORE * 1e-9, "score * 1e-09f", "score * 1e-09"),
        (SCORE * apply("gt", Q, 1), "score * float(q > 1)", "score * float(q > 1)"),
        (apply("not", apply("not", apply("lt", Q, K))), "q < k", "q < k"),
    ],
)
def test_what_functions_print(made: Expression, c: str, python: str) -> None:
    assert (made.c(), made.python()) == (c, python)


def test_functions_and_accessors_go_by_other_names() -> None:
    made = apply("tanh", SCORE * Load("bias", (Q - K,)))
    names = {"tanh": "tanh_approximate", "args": "*this", "bias_at": "load_bias", "q": "row"}
    assert made.c(names) == "tanh_approximate(score * load_bias(*this, row - k))"


@pytest.mark.parametrize(
    ("made", "result"),
    [
        (apply("ge", K, 0), True),
        (apply("lt", Q % 4, 4), True),
        (apply("lt", Q + 1, 0), False),
        (apply("eq", Q, Q), True),
        (apply("and", apply("lt", Q, K), True), apply("lt", Q, K)),
        (apply("or", apply("lt", Q, K), False), apply("lt", Q, K)),
        (apply("where", True, Q, K), Q),
        (apply("float", Constant(3)), 3.0),
        (apply("sqrt", Constant(4.0)), 2.0),
        (apply("power", SCORE, 1), SCORE),
        (maximum(K, 0), K),
        (SCORE * 1 + 0, SCORE),
    ],
)
def test_what_is_known_is_computed_at_once(made: Expression, result: Expression | float) -> None:
    assert made == (result if isinstance(result, Expression) else Constant(result))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SCORE / 0, "division by zero: score / 0"),
        (lambda: Q // Constant(0), "division by zero: q // 0"),
        (lambda: apply("and", Q, apply("lt", Q, K)), "and takes truths.*not an int: write q != 0"),
        (lambda: apply("where", Q, 1, 2), "the condition of where takes truths"),
        (lambda: apply("bit_and", SCORE, Q), "& takes integers, not a float"),
        (lambda: apply("tan", SCORE), "no function tan; there are add"),
        (lambda: apply("exp", SCORE, SCORE), "exp takes 1 operand, not 2"),
        (lambda: apply("shift_left", Q, 32), "32 is not in 0 to 31"),
        (lambda: Load("bias", (SCORE,)), "an index of bias is a float, not an integer: score"),
        (lambda: Load("bias", ()), "bias has no index"),
        (lambda: Q + "1", "no str"),  # pyright: ignore
        (lambda: SCORE * float("nan"), "no NaN"),
        (lambda: DOC.value({"b": 0, "q": 0, "doc": np.zeros(3)}), "doc has 1 axes, but 2 indices"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_elements_outside_of_a_buffer_are_the_nearest() -> None:
    element = Load("bias", (K - 4,))
    found = element.value({"k": np.arange(8), "bias": np.array([10, 20, 30], np.float16)})
    assert found.dtype == np.float64 and found.tolist() == [10, 10, 20, 30, 10, 20, 30, 30]


def test_what_shares_parts_is_printed_and_compared_in_time() -> None:
    def made() -> Expression:
        power = SCORE
        for _ in range(200):
            power = power * power + 1.0
        return power

    lines, result = statements(made(), indent="  ")
    assert len(lines) == 199 and result == "t198 * t198 + 1.0f"
    assert lines[0] == "  const float t0 = score * score + 1.0f;"
    assert made() == made() and made() != made() + 1.0
    assert made().value({"score": -1e9}) == np.inf
    with pytest.raises(ValueError, match="too long to write"):
        made().c()


def test_buffers_can_be_renamed_within_each_other() -> None:
    tree = Load("table", (Load("doc", (Load("table", (Q,), Kind.INT),), Kind.INT), K))
    renamed = with_buffers(tree * SCORE, {"doc": "other", "table": "first"})
    assert renamed.python() == "first[other[first[q]], k] * score"


def test_temporaries_have_names_of_their_own() -> None:
    both = apply("exp", Name("t0", Kind.FLOAT))
    lines, result = statements(both * both, {"score": "t1 + 1"})
    assert lines == ["const float t2 = expf(t0);"] and result == "t2 * t2"


def test_what_is_deep_is_walked_without_recursion() -> None:
    deep = SCORE
    for number in range(5000):
        deep = apply("tanh", deep + float(number % 3))
    assert deep.c().startswith("tanhf(tanhf(")
    assert -1 < deep.value({"score": 0.5}) < 1 and deep.names() == {"score"}
    assert deep == deep.with_names({"q": K}) and deep != deep.with_names({"score": SLOPE})


def test_conditions_that_all_hold_are_told_one_by_one() -> None:
    first, second, third = (apply("lt", each, Name("n")) for each in (B, Q, K))
    assert list(conjuncts(apply("and", first, apply("and", second, third)))) == [first, second, third]


def test_every_function_says_what_it_costs() -> None:
    for row in FUNCTIONS.values():
        assert row.costs and all(isinstance(unit, Unit) and number > 0 for unit, number in row.costs.items())
