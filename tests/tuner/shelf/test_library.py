"""The tuned kernels on disk and the choice among them."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.cards.slug import same_card
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.shelf import choice, emitting, library
from flashgen.tuner.shelf.emitting import card_meant
from flashgen.tuner.shelf.expected import Errors
from flashgen.tuner.shelf.library import Entry

from tests.support.tuned_kernels import H100, H200, LADDER, entry, tuned


def test_what_is_written_is_read_back(tmp_path):
    kernel = tuned(Problem(head_dim=40, causal=True))
    paths = library.write(tmp_path, "nvidia_h200", kernel, cuda=kernel.source, module="X = 1\n")
    assert paths.cu == tmp_path / "nvidia_h200" / "f32_d40_causal.cu"
    assert paths.py.read_text() == "X = 1\n"
    assert library.read(paths.json) == Entry(kernel, "nvidia_h200", paths.json)
    (found,) = library.entries([tmp_path])
    assert found.kernel == kernel
    assert json.loads(paths.json.read_text())["predicted"] is False
    assert not [p for p in paths.cu.parent.iterdir() if p not in (paths.cu, paths.py, paths.json)]


def test_files_are_readable_by_others(tmp_path):
    paths = library.write(tmp_path, "x", tuned(), cuda="", module="")
    assert stat.S_IMODE(paths.cu.stat().st_mode) & 0o444 == 0o444


def test_damaged_records_are_passed_over(tmp_path):
    kernel = tuned()
    paths = library.write(tmp_path, "nvidia_h200", kernel, cuda=kernel.source, module="")
    for name, text in (("cut", paths.json.read_text()[:90]), ("other", "{}"), ("list", "[1]")):
        (paths.json.parent / f"{name}.json").write_text(text)
        with pytest.raises(FlashgenError, match=name):
            library.read(paths.json.parent / f"{name}.json")
    assert [e.kernel for e in library.entries([tmp_path])] == [kernel]


def test_an_out_folder_that_cannot_be_written_says_so(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FlashgenError, match="--out"):
        library.check_writable(blocked / "out")
    with pytest.raises(FlashgenError, match="flashgen emit"):
        library.write(blocked, "x", tuned(), cuda="", module="")


def test_the_shipped_folder_is_searched_last(tmp_path):
    assert library.folders(tmp_path) == [tmp_path, library.shipped_folder()]
    assert library.folders(library.shipped_folder()) == [library.shipped_folder()]


@pytest.mark.parametrize(
    ("slug", "other", "same"),
    [
        ("nvidia_h200", "h200", True),
        ("sim_h200", "nvidia_h200", True),
        ("nvidia_geforce_gtx_1080", "sim_gtx_1080", True),
        ("nvidia_geforce_gtx_1080", "sim_gtx_1080_ti", False),
        ("nvidia_a100_sxm4_80gb", "a100_sxm4_80gb", True),
        ("h100", "h200", False),
    ],
)
def test_same_card(slug, other, same):
    assert same_card(slug, other) is same


def test_an_exact_match_is_exact():
    wanted = Problem(head_dim=128)
    match = choice.find([entry(), entry(wanted), entry(Problem(head_dim=32))], wanted, H200)
    assert match is not None and match.exact
    assert match.entry.kernel.problem == wanted
    assert "measured" in match.how


def test_head_dim_must_agree():
    assert choice.find([entry(Problem(head_dim=128))], Problem(head_dim=64), H200) is None


def of(**problem) -> Entry:
    """A kernel of any dtype; which family made it matters to none of this."""
    plain = entry()
    return replace(plain, kernel=replace(plain.kernel, problem=Problem(**problem)))


def test_dtype_precision_and_head_dims_must_agree():
    known = [
        of(),
        of(dtype="f16"),
        of(dtype="bf16"),
        of(precision="ieee"),
        of(precision="tf32"),
        of(head_dim_v=32),
        of(dtype="bf16", head_dim=192, head_dim_v=128),
    ]
    for each in known:
        match = choice.find(known, each.kernel.problem, H200)
        assert match is not None and match.exact and match.entry == each
    # What is asked for by name is what was tuned by that name.
    assert choice.find(known, Problem(precision="3xtf32"), H200) is None
    assert choice.find([of(precision="3xtf32")], Problem(), H200) is None
    assert choice.find(known, Problem(dtype="bf16", head_dim=192), H200) is None


def test_records_of_older_versions_are_read(tmp_path):
    kernel = tuned(Problem(head_dim=40))
    paths = library.write(tmp_path, "nvidia_h200", kernel, cuda=kernel.source, module="")
    data = json.loads(paths.json.read_text())
    for name in ("precision", "head_dim_v"):
        del data["problem"][name]
    paths.json.write_text(json.dumps(data))
    assert library.read(paths.json).kernel == kernel


def test_what_is_tuned_in_a_checkout_is_not_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "shipped_folder", lambda: tmp_path)
    for slug in ("nvidia_h200", "sim_gtx_1080"):
        (tmp_path / slug).mkdir()
    (tmp_path / "nvidia_h200" / library.PAGE).touch()
    theirs, ours = (
        replace(entry(), json_path=tmp_path / slug / "f32_d64.json")
        for slug in ("nvidia_h200", "sim_gtx_1080")
    )
    assert library.is_shipped(theirs) and not library.is_shipped(ours)


def test_what_is_shipped_is_read():
    shipped = library.entries([library.shipped_folder()])
    assert len(shipped) == len(list(library.shipped_folder().glob("*/*.json"))) > 0


def test_of_several_tuned_for_the_same_the_fastest():
    fast = entry(tuned_at="2026-01-01T00:00:00+00:00")
    slower = replace(fast.kernel.measurement, median_us=500.0)
    late = replace(fast.kernel, measurement=slower, tuned_at="2026-02-01T00:00:00+00:00")
    match = choice.find([Entry(late, fast.slug), fast], Problem(), H200)
    assert match is not None and match.entry == fast


def test_other_compute_capabilities_are_not_used():
    assert choice.find([entry(limits=preset("a100"))], Problem(), H200) is None


def test_same_card_before_same_capability():
    match = choice.find([entry(limits=H100), entry(limits=H200)], Problem(), H200)
    assert match is not None and match.exact and match.entry.kernel.device == "NVIDIA H200"
    match = choice.find([entry(limits=H100)], Problem(), H200)
    assert match is not None and not match.exact
    assert "another card of sm_90, NVIDIA H100" in match.how


def test_measured_before_predicted():
    shape = Problem(seqlen_q=128, seqlen_k=128)
    measured, predicted = entry(limits=H100), entry(shape, H200, predicted=True)
    match = choice.find([predicted, measured], shape, H200)
    assert match is not None and match.entry == measured
    match = choice.find([predicted], shape, H200)
    assert match is not None and "predicted" in match.how and "nothing was measured" in match.how


def test_same_mask_before_nearer_shape():
    causal = entry(Problem(causal=True, seqlen_q=512, seqlen_k=512))
    plain = entry(Problem())
    match = choice.find([plain, causal], Problem(causal=True), H200)
    assert match is not None and match.entry == causal
    assert "tuned for batch 4, heads 16, seqlen 512, asked for batch 4, heads 16, seqlen 4096" in match.how
    match = choice.find([plain], Problem(causal=True), H200)
    assert match is not None and "tuned without the causal mask" in match.how


def test_nearest_in_lengths_and_heads():
    short, long = entry(Problem(seqlen_q=256, seqlen_k=256)), entry(Problem(seqlen_q=8192, seqlen_k=8192))
    many = entry(Problem(batch=64, seqlen_q=256, seqlen_k=256))
    for shape, best in (
        (Problem(seqlen_q=300, seqlen_k=300), short),
        (Problem(seqlen_q=5000, seqlen_k=5000), long),
        (Problem(batch=50, seqlen_q=300, seqlen_k=300), many),
    ):
        match = choice.find([short, long, many], shape, H200)
        assert match is not None and match.entry == best


def test_one_row_sees_all_keys_under_either_mask_and_several_do_not():
    def rows(count: int, **others) -> Entry:
        return entry(Problem(seqlen_q=count, seqlen_k=8192, **others))

    match = choice.find([rows(1)], Problem(seqlen_q=1, seqlen_k=8192, causal=True), H200)
    assert match is not None and match.exact and "mask" not in match.how
    masked, plain = rows(4, causal=True), rows(8)
    match = choice.find([masked, plain], Problem(seqlen_q=4, seqlen_k=8192), H200)
    assert match is not None and match.entry == plain
    match = choice.find([masked, plain], Problem(seqlen_q=1, seqlen_k=8192), H200)
    assert match is not None and match.entry == masked and "mask" not in match.how


def test_what_was_tuned_for_other_sizes_serves_where_it_should_be_fastest():
    """Not where it is nearest: sixteen rows are slow by what suits four, and fast where heads are packed."""
    shipped = [each for each in library.entries([library.shipped_folder()]) if not each.predicted]
    four, two = (
        next(
            each for each in shipped if each.kernel.problem.name == f"bf16_d128_causal_b32_h32_kv8_n{n}_m8192"
        )
        for n in (4, 2)
    )
    assert (four.kernel.variant.family, two.kernel.variant.family) == ("mma", "wgmma")
    sixteen = replace(four.kernel.problem, seqlen_q=16)
    match = choice.find([four, two], sixteen, H200)
    assert match is not None and match.entry == two and not match.exact
    assert "the best match is bf16_d128_causal_b32_h32_kv8_n2_m8192" in match.how
    assert "seqlen 2x8192, asked for batch 32, heads 32/8, seqlen 16x8192" in match.how
    times = Errors([four, two], H200)
    by_four, by_two = (times.expect(each, sixteen) for each in (four, two))
    assert by_four is not None and by_two is not None and by_two.us < by_four.us
    # What was tuned for just this is what was measured of it.
    of_four = times.expect(four, four.kernel.problem)
    assert of_four is not None and of_four.us == pytest.approx(four.kernel.measurement.median_us)


def test_of_any_shape_the_last_tuned():
    old = entry(Problem(), tuned_at="2026-01-01T00:00:00+00:00")
    new = entry(Problem(batch=1), tuned_at="2026-01-02T00:00:00+00:00")
    match = choice.find([new, old], Problem(), H200, any_shape=True)
    assert match is not None and match.entry == new and match.exact


def test_of_any_shape_shipped_kernels_come_last_and_by_size():
    """However late they were tuned: a short sequence's kernel is nobody's default."""

    def shipped(problem: Problem, day: int) -> library.Entry:
        path = library.shipped_folder() / "nvidia_h200" / f"{problem.name}.json"
        return replace(entry(problem, tuned_at=f"2026-01-0{day}T00:00:00+00:00"), json_path=path)

    default, short = shipped(Problem(), 2), shipped(Problem(seqlen_q=197, seqlen_k=197), 3)
    match = choice.find([short, default], Problem(), H200, any_shape=True)
    assert match is not None and match.entry == default and match.exact
    match = choice.find([short], Problem(), H200, any_shape=True)
    assert match is not None and match.entry == short and match.exact
    mine = entry(Problem(seqlen_q=49, seqlen_k=49), tuned_at="2026-01-01T00:00:00+00:00")
    match = choice.find([short, default, mine], Problem(), H200, any_shape=True)
    assert match is not None and match.entry == mine and match.exact


def test_the_family_asked_for():
    simt = FAMILIES["simt"]
    assert choice.find([entry()], Problem(), H200, family=simt) is None
    assert choice.find([entry()], Problem(), H200, family=LADDER) is not None


def test_last_tuned():
    assert choice.last_tuned([]) is None
    first = entry(tuned_at="2026-01-01T00:00:00+00:00")
    last = entry(Problem(head_dim=32), tuned_at="2026-01-03T00:00:00+00:00")
    match = choice.last_tuned([last, first])
    assert match is not None and match.entry == last


def test_a_prediction_never_shadows_a_measurement():
    measured = entry(tuned_at="2026-01-01T00:00:00+00:00")
    predicted = entry(limits=preset("h200"), predicted=True, tuned_at="2026-01-05T00:00:00+00:00")
    match = choice.last_tuned([predicted, measured])
    assert match is not None and match.entry == measured
    elsewhere = entry(limits=preset("gtx-1080"), predicted=True, tuned_at="2026-01-05T00:00:00+00:00")
    match = choice.last_tuned([elsewhere, measured])
    assert match is not None and match.entry == elsewhere and "predicted" in match.how


def test_the_card_is_that_of_the_last_kernel_of_the_type_and_head_dim():
    here = entry(Problem(head_dim=40))
    tried = entry(limits=preset("gtx-1080"), predicted=True, tuned_at="2026-01-05T00:00:00+00:00")
    assert card_meant([here, tried], [Problem(head_dim=40, causal=True)])[0].arch == H200.arch
    assert card_meant([here, tried], [Problem(), Problem(head_dim=40)])[0].name == "GTX 1080"
    assert card_meant([here, tried], [Problem(head_dim=72)]) == (preset("gtx-1080"), "")


def test_the_card_where_nothing_was_tuned_is_the_one_here_or_else_that_of_the_shipped_kernels(monkeypatch):
    shipped = library.entries([library.shipped_folder()])  # of two cards, few of them of an H100
    assert library.is_shipped(shipped[0]) and not library.is_shipped(entry())
    mine = SimpleNamespace(limits=preset("t4"))
    monkeypatch.setattr(emitting, "cards", lambda: ([mine], ""))
    assert card_meant(shipped, [Problem()]) == (preset("t4"), "")
    monkeypatch.setattr(emitting, "cards", lambda: ([], "no driver"))
    limits, remark = card_meant(shipped, [Problem()])
    assert limits.name == "NVIDIA H200" and "no card was named and none is here" in remark
    with pytest.raises(FlashgenError, match="nothing was tuned yet"):
        card_meant([], [Problem()])


def test_seeds_are_the_nearest_winners_of_the_family():
    near = entry(Problem(head_dim=64), variant=LADDER(br=64))
    far = entry(Problem(head_dim=16), limits=preset("t4"), variant=LADDER(br=32))
    farther = entry(Problem(head_dim=4), limits=preset("t4"), variant=LADDER(br=32, bc=16))
    seeds = choice.nearest_variants([farther, far, near], Problem(head_dim=40), H200, LADDER)
    assert seeds == [LADDER(br=64), LADDER(br=32)]
    one = entry(Problem(seqlen_q=1), variant=LADDER(br=32))
    seeds = choice.nearest_variants([near, one], Problem(seqlen_q=9, seqlen_k=9, causal=True), H200, LADDER)
    assert seeds == [LADDER(br=32), LADDER(br=64)]
    assert choice.nearest_variants([near], Problem(), H200, FAMILIES["simt"]) == []


def test_seeds_are_of_the_dtype_and_nearest_in_precision_and_values():
    variants = [LADDER(br=br) for br in (32, 64, 128, 256)]
    problems = [
        {"dtype": "f16"},
        {"precision": "tf32", "head_dim_v": 32},
        {"precision": "3xtf32"},
        {"precision": "tf32"},
    ]
    known = []
    for variant, problem in zip(variants, problems, strict=True):
        each = of(**problem)
        known.append(replace(each, kernel=replace(each.kernel, variant=variant)))
    seeds = choice.nearest_variants(known, Problem(precision="tf32"), H200, LADDER, count=4)
    assert seeds == [variants[3], variants[2], variants[1]]
