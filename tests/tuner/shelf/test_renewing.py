"""Files of tuned kernels written anew from their records."""

import pytest
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.errors import FlashgenError, UsageError
from flashgen.tuner.shelf import library
from flashgen.tuner.shelf.emitted_kernels import read_emitted
from flashgen.tuner.shelf.renewing import renew

H200 = preset("h200")
SHIPPED = library.shipped_folder() / "nvidia_h200"


def test_shipped_files_are_what_their_records_make(tmp_path):
    """To the byte: nobody edits them by hand, or forgets them when templates change."""
    for path in SHIPPED.glob("*"):
        if path.suffix == ".json":
            (tmp_path / path.name).write_text(path.read_text())
            (tmp_path / path.name).with_suffix(".cu").write_text("of older days\n")
    found = list(renew(tmp_path))
    assert len(found) == len(list(SHIPPED.glob("*.json"))) > 70
    for path in SHIPPED.glob("*.[cp][uy]"):
        assert (tmp_path / path.name).read_text() == path.read_text(), f"flashgen renew {SHIPPED}"


def test_a_renewed_module_is_thin_and_reads_back(tmp_path):
    source = SHIPPED / "f32_d64.json"
    for suffix in (".json", ".cu"):
        (tmp_path / source.name).with_suffix(suffix).write_text(source.with_suffix(suffix).read_text())
    (entry,) = renew(tmp_path)
    module = tmp_path / "f32_d64.py"
    text, kernel = module.read_text(), read_emitted(module).kernel
    assert "from flashgen.templates.runtime import" in text and len(text) < 10_000
    assert (kernel.problem, kernel.variant) == (Problem(head_dim=64), entry.kernel.variant)
    assert kernel.launches == render(kernel.variant, kernel.problem, H200).launches


def test_what_cannot_be_renewed(tmp_path):
    with pytest.raises(UsageError, match="has no record of a tuned kernel"):
        list(renew(tmp_path))
    (tmp_path / "best.json").write_text("{}")
    (tmp_path / "best.cu").write_text("")
    with pytest.raises(FlashgenError, match="is not the record of a tuned kernel"):
        list(renew(tmp_path))
