"""The package ``flashgen`` itself: its version, and as a program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import flashgen
import pytest
from flashgen.tuner.extras import PACKAGES, getting
from flashgen.tuner.version import flashgen_version

ROOT = Path(__file__).resolve().parents[2]
OLD = "an old `pip install -e .` made no package of it: install again"


def test_it_has_a_version():
    assert flashgen.__file__ is not None, OLD
    assert flashgen.__version__ == flashgen_version()
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        _ = flashgen.version  # pyright: ignore[reportAttributeAccessIssue]


def test_it_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "flashgen", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"flashgen {flashgen_version()}\n"), done.stderr + OLD


def test_importing_it_imports_nothing_else():
    program = "import sys, flashgen; print([name for name in sys.modules if 'flashgen.' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_folder_of_python_is_installed():
    """A wheel holds only what pyproject.toml names."""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for top in ("gen", "tuner", "templates") for path in (ROOT / top).rglob("*.py")}
    names = {f"flashgen.{'.'.join(path.relative_to(ROOT).parts)}" for path in folders}
    assert names - {"flashgen.tuner.package"} <= set(installed["packages"])
    assert installed["package-dir"]["flashgen"] == "tuner/package"


def test_what_is_advised_to_install_is_what_an_extra_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        wanted = {re.split(r"[<>=]", each)[0] for each in extras[extra]}
        assert set(shlex.split(packages)) == wanted
        assert getting(extra).startswith(f"`pip install {packages}`, or `pip install -e '.[{extra}]'`")
    assert set(PACKAGES) == set(extras) - {"test"}


def test_nobody_is_sent_to_an_index_that_has_no_flashgen():
    for top in ("gen", "tuner", "templates"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".jinja"):
                assert not re.search(r"install '?flashgen", path.read_text()), path
