"""What the header comment and the constants of an emitted .cu file say of its kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...gen.families import family_named
from ...gen.kernel import Kernel
from ...gen.limits import PRESETS
from ...gen.problem import PRECISIONS, Problem


def read_cuda(text: str) -> tuple[Kernel, str]:
    """Reads kernel and card from the header comment and the constants of a .cu file's text.

    The sizes tuned for are not in the file. Raises ValueError, or KeyError, for a text that is none.
    """

    def find(pattern: str, what: str) -> str:
        found = re.search(pattern, text, re.MULTILINE)
        if found is None:
            raise ValueError(f"it has no {what}")
        return found[1]

    # The command in the header that regenerates the file names every parameter that is not implied.
    family = family_named(find(r"^// .*--family (\w+)", "family in its header"))
    header = text.partition("\n#")[0]
    variant = family(**family.parse(dict(re.findall(r"--set (\w+)=(\w+)", header))))
    entry = find(r'^extern "C" int (\w+)\(const AttentionArgs\*', "host launcher")
    problem = Problem(
        **_problem_of(entry),
        causal=find(r"^#define FLASHGEN_CAUSAL ([01])", "FLASHGEN_CAUSAL") == "1",
    )
    smem_bytes = int(find(r"sizeof\(SharedStorage\) == (\d+)", "size of shared memory"))
    max_blocks = re.search(r"^constexpr int kMaxBlocks = (\d+);", text, re.MULTILINE)
    arch = int(find(r"^// Build: .*=sm_(\d+)", "architecture in its header"))
    # Of the card only these two matter, which the file has itself.
    card = next((card for card in PRESETS.values() if card.arch == arch), None)
    if card is None:
        raise ValueError(f"no preset of sm_{arch}")
    launch = replace(
        variant.launch(problem, card),
        smem_bytes=smem_bytes,
        max_blocks=int(max_blocks[1]) if max_blocks else None,
    )
    device = re.search(
        r"^// (?:Measured on|Predicted .*? for|Not measured: emitted for) ([^,]+),", text, re.MULTILINE
    )
    kernel = Kernel(problem, variant, arch, text, entry, (launch,))
    return kernel, device[1] if device else f"sm_{arch}"


def _problem_of(entry: str) -> dict[str, Any]:
    """Dtype, precision and head dims by a launcher's name, attention_<`Problem.stem`>. Raises ValueError."""
    dtypes = "|".join(PRECISIONS)
    precisions = "|".join({name for names in PRECISIONS.values() for name in names} - {"auto"})
    name = re.fullmatch(rf"attention_({dtypes})(?:_({precisions}))?_d(\d+)(?:v(\d+))?", entry)
    if name is None:
        raise ValueError(f"its launcher is called {entry!r}")
    return {
        "dtype": name[1],
        "precision": name[2] or "auto",
        "head_dim": int(name[3]),
        "head_dim_v": int(name[4] or name[3]),
    }
