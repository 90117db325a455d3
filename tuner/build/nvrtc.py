"""Compiles one CUDA source to a cubin by NVRTC: run as a script, with nothing of flashgen imported.

    python nvrtc.py LIBRARY SOURCE CUBIN OPTION...

Prints the compiler's log; exits 1 when it refuses.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

#: What emitted modules compile by, by its path: its package would import much more.
NVRTC = Path(__file__).parents[2] / "templates" / "runtime" / "nvrtc.py"


def main() -> int:
    library, source, target, *options = sys.argv[1:]
    compile_source = runpy.run_path(str(NVRTC))["_nvrtc_compile"]
    try:
        cubin, log = compile_source(library, Path(source).read_text(encoding="utf-8"), options)
    except RuntimeError as error:
        raise SystemExit(f"error: {error}") from None
    print(log)
    if cubin is None:
        return 1
    Path(target).write_bytes(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
