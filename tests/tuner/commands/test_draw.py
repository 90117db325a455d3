"""`flashgen draw`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import command_runner


@pytest.fixture
def flashgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return command_runner()


def test_a_picture_is_printed_and_written(flashgen, tmp_path):
    words = ["draw", "--causal", "--window", "2,0", "--seqlen", "6"]
    told = flashgen(*words, "--svg", "window.svg").stdout
    body = [line for line in told.splitlines() if line.startswith("│")]
    expected = [
        "".join("██" if row - 2 <= key <= row else "  " for key in range(6)).join("││") for row in range(6)
    ]
    assert body == expected
    assert "visible are 41.7% of the pairs; skipped are 0.0% of the tiles of 64 x 64" in told
    assert "window of 2 keys before and 0 after" in (tmp_path / "window.svg").read_text()
    told = json.loads(flashgen(*words, "--json").stdout)
    assert told["seen"][5] == [0, 0, 0, 1, 1, 1] and told["visible"] == 15 / 36
    assert told["problem"]["scoring"] == {"window": [2, 0]}


def test_a_long_window_skips_tiles(flashgen):
    told = json.loads(flashgen("draw", "--causal", "--window", "127,0", "--json").stdout)
    assert told["tiles_skipped"] == pytest.approx(1 - (1 + 2 + 3 * 62) / 64**2)
    assert told["cell"] == [128, 128]


def test_a_batch_and_a_head_are_drawn_with_arrays_of_a_file(flashgen):
    np.savez("ids.npz", doc=[[0, 0, 0, 1], [0, 1, 1, 1]])
    words = ["draw", "--mask", "doc[b, q] == doc[b, k]", "--seqlen", "4", "--batch", "2"]
    told = json.loads(flashgen(*words, "--values", "ids.npz", "--of", "1,3", "--json").stdout)
    assert told["seen"][0] == [1, 0, 0, 0] and told["seen"][2] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--of 0", 2, "--of '0' is no batch and head"),
        ("--of 9,0", 2, "--of names batch 9, but they are 0 to 3"),
        ("--of 0,-1", 2, "query head -1, but they are 0 to 15"),
        ("--d 64,128", 2, "the options mean 2 problems"),
        ("--svg text.npz/a.svg", 1, "text.npz/a.svg cannot be written"),
        ("--values none.npz", 1, "none.npz cannot be read"),
        ("--values text.npz", 1, "text.npz holds no arrays by name"),
        ("--values one.npy", 1, "one.npy holds no arrays by name"),
        ("--values unknown.npz", 2, "holds 'cat', which the mask does not read; it reads doc"),
        ("--values axes.npz", 2, "doc has 1 axes; it is read with 2 indices"),
        ("--values short.npz", 2, "axis 1 of doc is 3 long; indices go up to 7"),
        ("--values words.npz", 2, "numbers or truths are read"),
        ("--values objects.npz", 1, "objects.npz holds no arrays by name"),
    ],
)
def test_what_cannot_be_drawn_is_told(flashgen, tmp_path, words, code, told):
    (tmp_path / "text.npz").write_text("doc")
    np.save("one.npy", np.zeros(3))
    np.savez("unknown.npz", cat=np.zeros((4, 8)))
    np.savez("axes.npz", doc=np.zeros(8))
    np.savez("short.npz", doc=np.zeros((4, 3)))
    np.savez("words.npz", doc=np.full((4, 8), "a"))
    np.savez("objects.npz", doc=np.full((4, 8), None))
    asked = ["--mask", "doc[b, q] == doc[b, k]", "--seqlen", "8"]
    assert told in flashgen("draw", *asked, *words.split(), code=code).stderr
