"""Promises on adversarial inputs, kept by a real card, which flushes and rounds as no emulated one does."""

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.tuner.cli import app
from typer.testing import CliRunner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_each_class_of_a_family_keeps_its_promise(family):
    result = CliRunner().invoke(app, ["accuracy", "--device", "0", "--family", family, "--every"])
    assert result.exit_code == 0, result.output
    assert "cases kept" in result.output and "BROKEN" not in result.output
