"""The teaching family: its nine steps, what each changes, and that each is right."""

import difflib
import shutil
import subprocess

import pytest
from flashgen.gen.families.ladder import STEPS, Ladder, step_of, steps
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal

GTX_1080 = preset("gtx-1080")
NAMES = list(STEPS)


def source(step, head_dim=64):
    return render(steps(head_dim)[step], Problem(head_dim=head_dim), GTX_1080).source


def code(text):
    """Lines of code without comments."""
    lines = (line.split("//")[0].rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def changes(before, after):
    """Lines of code that went and that came, in order."""
    diff = difflib.unified_diff(code(source(before)), code(source(after)), n=0, lineterm="")
    return [line for line in diff if line[0] in "+-" and line[:3] not in ("+++", "---")]


@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (32, {"4.2.2": (32, 32), "4.2.3": (128, 32), "4.2.9": (128, 32), "4.2.10": (128, 64)}),
        (64, {"4.2.2": (32, 32), "4.2.3": (128, 16), "4.2.9": (128, 16), "4.2.10": (128, 32)}),
    ],
)
def test_tiles_are_the_reports(head_dim, tiles):
    assert {name: (steps(head_dim)[name].br, steps(head_dim)[name].bc) for name in tiles} == tiles


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_steps_run_on_a_gtx_1080(name, head_dim):
    steps(head_dim)[name].check(Problem(head_dim=head_dim), GTX_1080)


def test_any_head_dim_has_steps():
    for head_dim in range(1, 257):
        illegal = []
        for name, variant in steps(head_dim).items():
            try:
                variant.check(Problem(head_dim=head_dim), GTX_1080)
            except Illegal as error:
                illegal.append((name, error.rule))
        # A long row of Q does not fit in a thread's registers; everything else has a tile.
        assert illegal in ([], [("4.2.10", "registers")])
        assert not illegal or head_dim > 160


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("4.2.2", "4.2.3", {"br", "bc"}),
        ("4.2.3", "4.2.4", {"split_queries"}),
        ("4.2.4", "4.2.5", {"vec"}),
        ("4.2.5", "4.2.6", {"hoisted"}),
        ("4.2.6", "4.2.7", {"coalesced"}),
        ("4.2.7", "4.2.8", {"stats_in_registers"}),
        ("4.2.8", "4.2.9", {"transposed"}),
        ("4.2.9", "4.2.10", {"q_in_registers", "bc"}),
    ],
)
def test_a_step_changes_only_its_own_parameters(before, after, changed):
    old, new = (steps(64)[name].to_dict() for name in (before, after))
    assert {name for name in old if old[name] != new[name]} == changed


def test_a_taller_tile_changes_two_numbers():
    assert changes("4.2.2", "4.2.3") == [
        "-constexpr int kBr = 32;",
        "-constexpr int kBc = 32;",
        "+constexpr int kBr = 128;",
        "+constexpr int kBc = 16;",
        '-static_assert(sizeof(SharedStorage) == 20736, "the size that pruning counted on");',
        '+static_assert(sizeof(SharedStorage) == 46080, "the size that pruning counted on");',
    ]


def test_splitting_the_queries_leaves_the_algorithm_alone():
    def algorithm(name):
        text = source(name)
        return text[text.index("struct SharedStorage") : text.index('extern "C" __global__')]

    assert algorithm("4.2.3") == algorithm("4.2.4")
    assert any("for (int first_row = 0;" in line for line in changes("4.2.3", "4.2.4") if line[0] == "-")


def test_coalescing_changes_which_thread_copies_what():
    assert changes("4.2.6", "4.2.7") == [
        "+#pragma unroll 4",
        "-    const int chunk = int(threadIdx.x) * kSteps + step;",
        "+    const int chunk = step * kThreads + int(threadIdx.x);",
    ]


def test_hoisting_takes_the_division_and_the_q_load_out_of_the_loops():
    before, after = source("4.2.5"), source("4.2.6")
    loop = "for (int first_key = 0;"
    load = "load_tile(smem.q, q"
    assert before.index(load) > before.index(loop)
    assert after.index(load) < after.index(loop)
    assert "/ smem.row_sum[thread]" in before[before.index(loop) :]
    assert after.count(" / smem.row_sum[thread]") == 1


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("row_max[kBr]", None),
        ("float row_max = -kInfinity", "4.2.8"),
        ("s[kBc][kBr]", "4.2.9"),
        ("q[kD][kBr]", "4.2.9"),
        ("float q_row[kD]", "4.2.10"),
    ],
)
def test_features_arrive_with_their_step(text, first):
    having = [name for name in NAMES if text in source(name)]
    if first is None:
        assert having == NAMES[: NAMES.index("4.2.8")]
    else:
        expected = NAMES[NAMES.index(first) :]
        # Once in registers, Q needs no shared tile.
        assert having == (expected[:1] if text == "q[kD][kBr]" else expected)


@pytest.mark.parametrize("name", NAMES)
def test_sources_read_well(name):
    text = source(name)
    assert f"Step {name} of a ladder" in text
    assert "{{" not in text and "{%" not in text and "\n\n\n" not in text
    assert text == source(name)


def test_the_running_maximum_starts_at_minus_infinity():
    for name in NAMES:
        assert "row_max = -kInfinity;" in source(name) or "row_max[thread] = -kInfinity;" in source(name)


def test_step_of_knows_the_steps_and_nothing_else():
    for name, variant in steps(64).items():
        step = step_of(variant, 64)
        assert step is not None and step.name == name
    assert step_of(Ladder(br=64), 64) is None


@pytest.mark.parametrize(
    ("variant", "head_dim", "message"),
    [
        (Ladder(), 66, "divisibility: vec=4 does not divide head dim 66"),
        (Ladder(hoisted=False), 64, "combination: q_in_registers=true needs hoisted=true"),
        (Ladder(br=64, bc=32), 192, "registers: about 284 per thread, 255 allowed with blocks of 64 threads"),
        (Ladder(q_in_registers=False), 128, "shared memory: needs 98304 bytes, sm_61 allows 49152"),
    ],
)
def test_illegal_variants_say_why(variant, head_dim, message):
    try:
        variant.check(Problem(head_dim=head_dim), GTX_1080)
    except Illegal as error:
        assert message in str(error)
    else:
        pytest.fail("was legal")


def test_the_space_can_be_enumerated():
    space = enumerate_space(Ladder, Problem(head_dim=64), GTX_1080)
    assert set(steps(64).values()) <= set(space.legal)
    assert space.total == len(space.legal) + sum(space.removed.values())


@pytest.mark.nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize(("name", "head_dim"), [("4.2.2", 80), ("4.2.5", 6), ("4.2.9", 40), ("4.2.10", 64)])
def test_shared_memory_is_exact(name, head_dim, tmp_path):
    """The static_assert on sizeof(SharedStorage) compares pruning's bytes with the compiler's."""
    path = tmp_path / "kernel.cu"
    path.write_text(source(name, head_dim))
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_75",
        "-cubin",
        "-o",
        str(path.with_suffix(".cubin")),
        str(path),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
