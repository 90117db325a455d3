"""The runtime as one text, for modules that stand alone."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ..layout import DENSE, Layout
from ..render import TEMPLATES

FOLDER = TEMPLATES / "runtime"
#: The runtime's files, each of which builds on those before; the last is what a module does when it is run.
PARTS = (
    "facts",
    "driver",
    "nvrtc",
    "kept",
    "compilers",
    "build",
    "arrays",
    "table",
    "tensor_maps",
    "plans",
    "tensors",
    "huggingface",
    "attention",
    "program",
)
#: What stands behind them where kernels have masks or changes of scores.
SCORED_PARTS = (
    "scored_values",
    "scored_huggingface",
    "scored_kinds",
    "scored_attention",
    "scored_program",
)
#: What stands behind those where kernels take packed sequences.
PACKED_PARTS = ("packed_values", "packed_huggingface", "packed_attention", "packed_program")
#: What stands behind those where keys lie in pages, and where dense caches are appended to.
PAGED_PARTS = ("appended_values", "paged_values", "slots", "paged_attention", "paged_program")
CACHE_PARTS = ("appended_values", "cache_attention", "cache_program")
#: What stands behind all these where values are columns of keys, and where such lie in pages.
LATENT_PARTS, LATENT_PAGED_PARTS = ("latent_keys",), ("latent_attention",)
#: What stands behind those where kernels take gradients, where such have masks or changes of scores, and
#: where sequences are packed.
GRADIENT_PARTS = ("gradient_plans", "gradient_tensors", "gradients", "gradient_program")
PACKED_GRADIENT_PARTS = ("packed_gradients", "packed_gradient_program")
SCORED_GRADIENT_PARTS = ("scored_gradients", "scored_gradient_program")
#: What it imports beside the standard library, and modules that stand alone therefore too.
THIRD_PARTY = ("numpy",)
_WIDTH = 110


@dataclass(frozen=True)
class Inlined:
    """What the runtime imports, as `import_lines` takes it, and its code without that."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    code: str


@cache
def inline_runtime(
    *,
    scored: bool = False,
    layout: Layout = DENSE,
    latent: bool = False,
    appends: bool = False,
    gradients: bool = False,
) -> Inlined:
    """Returns the runtime's files, one after the other, as the text of one module; with ``scored`` those for
    masks and changes of scores, too, of another ``layout`` those and the ones for packed sequences and for
    pages, of kernels that append to dense caches theirs; those for ``latent`` attention, and those for
    ``gradients``."""
    imports: list[ast.Import | ast.ImportFrom] = []
    sections: list[str] = []
    more = (*SCORED_PARTS, *PACKED_PARTS) if appends or layout is not DENSE else SCORED_PARTS * scored
    more += PAGED_PARTS if layout.is_paged else CACHE_PARTS * appends
    more += LATENT_PARTS if latent else ()
    more += LATENT_PAGED_PARTS if latent and layout.is_paged else ()
    more += GRADIENT_PARTS if gradients else ()
    more += SCORED_GRADIENT_PARTS if gradients and (scored or layout is not DENSE) else ()
    more += PACKED_GRADIENT_PARTS if gradients and layout is not DENSE else ()
    for part in (*PARTS, *more):
        text = (FOLDER / f"{part}.py").read_text(encoding="utf-8")
        body = ast.parse(text).body
        doc = ast.get_docstring(ast.parse(text)) or ""
        head = [node for node in body[1:] if isinstance(node, ast.Import | ast.ImportFrom)]
        imports += [node for node in head if not (isinstance(node, ast.ImportFrom) and node.level)]
        code = "\n".join(text.splitlines()[(head or body)[-1 if head else 0].end_lineno :]).strip("\n")
        sections.append(f"{heading(part)}\n\n# {doc}\n\n\n{code}\n")
    return Inlined(tuple(imports), "\n\n".join(sections))


def heading(title: str) -> str:
    """Returns a line that begins a section of a module."""
    return f"# ---- {title} ".ljust(_WIDTH - 2, "-")


def import_lines(imports: Sequence[ast.Import | ast.ImportFrom]) -> str:
    """Returns imports as formatters order them, each once: the standard library's, then others."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in imports:
        if isinstance(node, ast.Import):
            plain.add(ast.unparse(node))
        else:
            names.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    groups: list[str] = []
    for third_party in (False, True):
        lines = sorted(line for line in plain if _is_third_party(line.split()[1]) == third_party)
        for module in sorted(module for module in names if _is_third_party(module) == third_party):
            lines.append(_import_from(module, sorted(names[module], key=_as_sorted)))
        groups += ["\n".join(lines)] if lines else []
    return "\n\n".join(groups)


def _import_from(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _as_sorted(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _is_third_party(module: str) -> bool:
    return module.partition(".")[0] in THIRD_PARTY
