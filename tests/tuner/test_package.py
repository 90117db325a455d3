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
from flashgen.tuner.extras import PACKAGES, TUNING_MODULES, getting
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


def test_importing_it_takes_no_time():
    program = "import time; began = time.perf_counter(); import flashgen; print(time.perf_counter() - began)"
    taken_s = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(taken_s) < 0.3


#: Hides what the extra for tuning brings, then runs the program.
WITHOUT_TUNING = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(TUNING_MODULES)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
PROGRAM = "from flashgen.tuner.start import main; main()"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("emit best.py --preset h200 --dtype bf16 --d 128 --causal", "bf16_d128_causal for NVIDIA H200"),
        ("list", "bf16_d128_causal"),
        ("devices", "H200"),
    ],
)
def test_what_is_not_tuning_works_without_its_packages(tmp_path, command, words):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TUNING + PROGRAM, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and words in done.stdout, done.stderr


def test_tuning_without_its_packages_says_how_to_get_them(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TUNING + PROGRAM, "tune", "--device", "sim:gtx-1080"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: this command needs optuna, which is not")
    assert getting("tune") in done.stderr


def test_a_call_that_searches_says_how_to_get_its_packages():
    program = f"{WITHOUT_TUNING}\nimport flashgen; flashgen.attention; flashgen.tune"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        f"FlashgenError: flashgen.tune needs optuna, which is not installed: {getting('tune')}" in done.stderr
    )


def test_every_folder_of_python_is_installed():
    """A wheel holds only what pyproject.toml names."""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for top in ("gen", "tuner", "templates") for path in (ROOT / top).rglob("*.py")}
    names = {f"flashgen.{'.'.join(path.relative_to(ROOT).parts)}" for path in folders}
    aliased = {"flashgen.tuner.package", "flashgen.tuner.package.compat"}
    assert names - aliased <= set(installed["packages"])
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
