"""An environment that has neither PyCUDA nor a CUDA toolkit, made of the one there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT

_NO_PYCUDA = 'raise ModuleNotFoundError("No module named \'pycuda\'", name="pycuda")\n'
#: A toolkit is looked for in folders that no variable hides as well.
_NO_NVCC = """
from flashgen.tuner.build import compile
from flashgen.tuner.errors import FlashgenError

def find_nvcc(arch=None):
    raise FlashgenError("nvcc was hidden")

compile.find_nvcc = find_nvcc
"""


def told_by_digests(folder: Path, *arguments: str, bare: bool) -> dict[str, Any]:
    """Runs `tests/support/digests.py` in a process with a cache of its own, and returns what it prints.

    ``bare``: where neither PyCUDA nor nvcc can be found.
    """
    folder.mkdir()
    program = "import runpy, sys\n"
    environment = {**os.environ, "FLASHGEN_CACHE": str(folder / "cache"), "FLASHGEN_HOME": str(folder)}
    if bare:
        (folder / "pycuda").mkdir()
        (folder / "pycuda" / "__init__.py").write_text(_NO_PYCUDA)
        places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        program += _NO_NVCC
    file = str(ROOT / "tests" / "support" / "digests.py")
    program += f"sys.argv = {[file, *arguments]!r}\nrunpy.run_path({file!r}, run_name='__main__')\n"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
