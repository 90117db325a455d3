"""The survey of kernels on adversarial inputs: what it looks at, its table, and the page that shows it."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.accuracy.subjects import Subject, Wanted, subjects, subjects_of
from flashgen.tuner.accuracy.survey import Surveyed, survey_accuracy
from flashgen.tuner.accuracy.table import error_table
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError, NotServed, UsageError
from flashgen.tuner.evaluate.adversarial import Finding
from flashgen.tuner.evaluate.adversarial_inputs import case_named
from flashgen.tuner.view.accuracy import accuracy_tables, fill_file, finding_line, surveyed_line
from rich.console import Console

from tests.support.emulated import needs_compiler

CARD = SimDevice("gtx-1080", preset("gtx-1080"))
KEPT = Finding("v x 1e7", "magnitudes", True, 1.5e-7, 2e-6, 3e-7, "‖o - ref‖ / ‖ref‖ of head 0")
BROKEN = replace(KEPT, kept=False, error=3e-2, head_error=2e-2)
NOT_FINITE = Finding(
    "an element of q NaN", "NaN", False, float("inf"), 0.0, 1e-7, "1 rows, the first row 3 of head 1: o is 0"
)


def surveyed(precision: str, *findings: Finding, causal: bool = False) -> Surveyed:
    problem = Problem(head_dim=8, causal=causal)
    kernel = replace(render(Simt(), problem, CARD.limits), problem=replace(problem, precision=precision))
    return Surveyed(Subject(kernel, CARD), findings)


def test_one_kernel_of_each_family_and_class_is_looked_at():
    found = list(subjects(Wanted()))
    names = list(dict.fromkeys(subject.name for subject in found))
    assert names == [
        *(
            "ieee ladder",
            "f16 latent",
            "bf16 latent",
            "auto mma",
            "3xtf32 mma",
            "3xf16 mma",
            "tf32 mma",
            "f16 mma",
            "bf16 mma",
            "e4m3 mma",
            "eight mma",
        ),
        *("ieee simt", "auto wgmma", "3xf16 wgmma", "f16 wgmma", "bf16 wgmma", "e4m3 wgmma", "eight wgmma"),
    ]
    assert [subject.mask for subject in found[:2]] == ["full", "causal"] and len(found) == 2 * len(names)


def test_a_precision_leaves_other_types_out_and_what_is_held_holds():
    wanted = Wanted(precisions=("ieee",), families=(Simt,), masks=(True,), held={"bc": 32})
    (found,) = subjects(wanted)
    assert found.kernel.variant.to_dict()["bc"] == 32 and found.kernel.problem.causal
    with pytest.raises(UsageError, match="--set"):
        list(subjects(replace(wanted, held={"br": 256, "bc": 256, "stages": 2})))
    with pytest.raises(NotServed, match="choose another --family"):
        list(subjects(replace(wanted, held={}, dtypes=("f16",))))


def test_a_tuned_variant_is_looked_at_on_the_card_that_is_named():
    (found,) = subjects_of(Simt(), Problem(head_dim=8), "sim:v100", [False])
    assert found.device.limits.name == "Tesla V100" and found.name == "auto simt"
    with pytest.raises(FlashgenError, match="does not run on"):
        list(subjects_of(Simt(), Problem(dtype="f16"), "sim:v100", [False]))


def test_a_cell_is_the_worst_of_its_group_over_both_masks():
    table = error_table([surveyed("auto", KEPT, NOT_FINITE), surveyed("auto", BROKEN, causal=True)])
    assert table.groups == ("magnitudes", "NaN")
    cell = table.cells["magnitudes", ("auto", "simt")]
    assert (cell.head_error, cell.broken, cell.cases) == (2e-2, 1, 2)


def test_tables_fit_a_terminal():
    classes = ["auto", "ieee", "3xf16", "3xtf32", "tf32"]
    each = [surveyed(name, KEPT, NOT_FINITE) for name in classes]
    out = io.StringIO()
    console = Console(file=out, width=80)
    table = error_table(each)
    wide = replace(table, columns=table.columns * 3)
    for part in accuracy_tables(wide):
        part.print(console)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and sum("magnitudes" in line for line in lines) == 3
    assert "3.0e-07" in out.getvalue() and "1.0e-07!" in out.getvalue()


def test_lines_name_the_error_and_what_is_allowed():
    assert finding_line(BROKEN) == (
        "BROKEN: magnitudes: v x 1e7: ‖o - ref‖ / ‖ref‖ of head 0 is 3.0e-02, 2.0e-06 allowed"
    )
    assert finding_line(NOT_FINITE).endswith("q NaN: 1 rows, the first row 3 of head 1: o is 0")
    assert surveyed_line(surveyed("auto", KEPT)).endswith("GTX 1080: all 1 cases kept")
    assert "1 of 2 cases beyond" in surveyed_line(surveyed("auto", KEPT, BROKEN))


@needs_compiler
def test_a_kernel_that_does_not_build_leaves_the_others_to_be_tried(monkeypatch):
    good, bad = surveyed("auto").subject, surveyed("ieee").subject
    bad = replace(bad, kernel=replace(bad.kernel, source="#error made to fail\n"))
    monkeypatch.setattr(
        "flashgen.tuner.evaluate.worker.Worker.try_adversarial", lambda worker, build, cases: [KEPT]
    )
    found = survey_accuracy([bad, good], lambda problem: [case_named("v x 1e7", problem.dtype)])
    assert "made to fail" in found[0].failure and not found[0].kept
    assert found[1].findings == (KEPT,) and found[1].kept
    assert "made to fail" in surveyed_line(found[0])
    assert error_table(found).columns == (("auto", "simt"),)


def test_figures_are_json(tmp_path):
    told = surveyed("auto", KEPT, NOT_FINITE).to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert [finding["error"] for finding in told["findings"]] == [1.5e-7, None]
    assert told["promise"].startswith("2e-06 per head")


def test_a_page_is_filled_between_its_markers(tmp_path):
    page = tmp_path / "accuracy.md"
    page.write_text("before\n<!-- accuracy -->\nold\n<!-- /accuracy -->\nafter\n")
    fill_file(page, [surveyed("auto", KEPT), surveyed("3xf16", BROKEN)])
    text = page.read_text()
    assert text.startswith("before\n<!-- accuracy -->\n| class") and text.endswith(
        "<!-- /accuracy -->\nafter\n"
    )
    assert "| magnitudes | 3.0e-07 | 2.0e-02! |" in text and "old" not in text
    assert re.search(r"\| 3xf16 \| 2e-06 per head .* elements of o to 2e-06", text)
    again = text
    fill_file(page, [surveyed("auto", KEPT), surveyed("3xf16", BROKEN)])
    assert page.read_text() == again
    page.write_text("nothing to fill\n")
    with pytest.raises(FlashgenError, match="has no `<!-- accuracy -->`"):
        fill_file(page, [surveyed("auto", KEPT)])


@needs_compiler
def test_the_command_repeats_one_case(flashgen):
    options = ("--family", "ladder", "--d", "8", "--no-causal", "--case", "a row of q x 1e7", "--json")
    result = flashgen("accuracy", *options)
    (told,) = json.loads(result.stdout)
    (finding,) = told["findings"]
    assert told["class"] == "ieee" and finding["kept"] and 0 < finding["error"] < finding["bound"]
    assert "kept: rows: a row of q x 1e7" in result.stderr


def test_the_command_names_what_is_near(flashgen, tmp_path):
    told = flashgen("accuracy", "--family", "ladder", "--case", "a row of q", code=2).stderr
    assert "no adversarial case of f32 is called 'a row of q'; did you mean 'a row of q" in told
    page = tmp_path / "page.md"
    page.write_text("no marker")
    assert "has no" in flashgen("accuracy", "--write", str(page), code=1).stderr
    for option, name in (("--family", "mna"), ("--dtype", "f61"), ("--precision", "3xf61")):
        assert f"{name}'; did you mean" in flashgen("accuracy", option, name, code=2).stderr
