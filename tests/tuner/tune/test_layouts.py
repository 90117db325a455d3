"""Runs on an emulated card end with a kernel whatever the layout: packed, in pages, appended, latent."""

from __future__ import annotations

import pytest
from flashgen.tuner.cli import app
from flashgen.tuner.shelf import library
from typer.testing import CliRunner

from tests.support.depth import sampled

SHAPE = "--dtype f16 --d 16 --batch 2 --heads 2 --kv-heads 1"
SMALL = f"{SHAPE} --family mma"
ASKED = {
    "pages": f"{SMALL} --seqlen-q 1 --seqlen-k 80 --page-size 16",
    "packed": f"{SMALL} --varlen uniform:1-40",
    "pages, packed": f"{SMALL} --varlen uniform:1-8/uniform:8-80 --page-size 16",
    "appended": f"{SMALL} --seqlen-q 2 --seqlen-k 80 --page-size 16 --append --rotary halves:16",
    "e4m3 keys": f"{SMALL} --seqlen-q 1 --seqlen-k 80 --page-size 16 --kv-dtype e4m3",
    "latent pages": "--latent --d 32 --dv 16 --batch 1 --heads 2 --seqlen-q 1 --seqlen-k 80 --page-size 16 "
    "--family simt",
    "gradients": f"{SHAPE} --seqlen 40 --backward --family mma-backward",
}


@pytest.mark.parametrize("name", sampled(ASKED, 1))
def test_a_run_ends_with_a_kernel(tmp_path, name):
    words = f"tune --device sim:h200 --trials 1 --jobs 1 --seed 1 {ASKED[name]}".split()
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path), "--storage", str(tmp_path / "x.journal")])
    assert done.exit_code == 0, done.output
    (found,) = library.entries([tmp_path])
    assert found.kernel.measurement.error > 0 and found.kernel.problem.name in done.output
