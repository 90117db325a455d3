"""The pieces of Python that the pages show, and what they are run with.

Each is run *bound*: what it calls of flashgen and of emitted modules checks its arguments, against the
signatures that these have, and gives arrays back. And it is run *for real*, on an emulated card, as far as
that goes: calls that only a card of one's own serves end it, as `NeedsMore`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import flashgen
import numpy as np
import pytest
from flashgen import compat
from flashgen.templates.runtime import Attention
from flashgen.templates.runtime.gradients import Gradients
from flashgen.templates.runtime.packed_attention import PackedAttention
from flashgen.templates.runtime.packed_gradients import PackedGradients
from flashgen.templates.runtime.packed_values import SequencePlan
from flashgen.templates.runtime.paged_attention import PagedAttention
from flashgen.templates.runtime.scored_attention import ScoredAttention
from flashgen.templates.runtime.scored_gradients import ScoredGradients
from flashgen.tuner.compat import calls, transformers

from . import ROOT
from .markdown import Page
from .masks_page import example, pictures

CARD = "sim:gtx-1080"
#: What emitted modules offer, the more general last where several offer the same.
RUNTIME = (
    Gradients,
    ScoredGradients,
    PackedGradients,
    PackedAttention,
    PagedAttention,
    Attention,
    ScoredAttention,
)
#: What a piece may import that no emitted module is.
LIBRARIES = {"flashgen", "numpy", "torch", "transformers", "jax", "cupy"} | sys.stdlib_module_names
_RNG = np.random.default_rng(0)


class NeedsMore(Exception):
    """What a piece calls that an emulated card has not: a card, models, or hours."""


@dataclass(frozen=True)
class Snippet:
    """A piece of Python of a page."""

    page: Path
    number: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"

    @property
    def imported(self) -> set[str]:
        """The packages that it imports."""
        names: list[str] = []
        for node in ast.walk(ast.parse(self.code)):
            match node:
                case ast.Import(names=found):
                    names += [each.name for each in found]
                case ast.ImportFrom(module=str() as module):
                    names.append(module)
        return {name.partition(".")[0] for name in names}

    @property
    def functions(self) -> list[str]:
        """The names of the functions that it defines."""
        return [node.name for node in ast.parse(self.code).body if isinstance(node, ast.FunctionDef)]

    def run(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs it where every emitted module is ``module``, also for lines that import none."""
        for name in self.imported - LIBRARIES:
            monkeypatch.setitem(sys.modules, name, module)
        scope = {**example(), **_values(), **vars(module), "best": module}
        exec(compile(self.code, str(self), "exec"), scope)


def snippets() -> list[Snippet]:
    """Returns those of the README and of all pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    return [Snippet(page, i, code) for page in pages for i, code in enumerate(Page(page).fenced("python"))]


def _values() -> dict[str, Any]:
    """What pages speak of without making it. Lengths and heads are alike, so that arrays are of either
    layout, and as many as the pictures of masks have."""

    def array(*shape: int) -> Any:
        return _RNG.standard_normal(shape).astype(np.float32)

    n, lengths = 20, np.array([15], np.int32)
    q, k, v, o = (array(1, n, n, 16) for _ in range(4))
    documents = np.repeat(np.arange(4, dtype=np.int32), n // 4)[None]
    starts = np.array([0, n], np.int32)
    outside = ("AutoModelForCausalLM", "DataCollatorWithFlattening", "model", "pipe", "prompt")
    arrays = {"q": q, "k": k, "v": v, "o": o, "query": q, "key": k, "value": v, "dout": o, "out": None}
    arrays |= {"qkv": np.stack([q, k, v], 2), "lse": array(1, n, n), "s": array(n)}
    read = {"doc": documents, "doc_ids": documents, "prefix": lengths, "lengths": lengths, "slopes": array(n)}
    read |= {"mask": _RNG.random((n, n)) < 0.7, "words": np.full((1, n), -1), "sinks": array(n)}
    read |= {"bias": array(n, n), "cu_seqlens_q": starts, "cu_seqlens_k": starts, "plan": None}
    packed = {"starts_q": starts, "starts_k": starts, "most": n, "layers": [None, None], "stream": None}
    pages = {"k_cache": array(2, 16, n, 16), "v_cache": array(2, 16, n, 16), "seqused_k": lengths}
    pages |= {
        "page_table": np.zeros((1, 2), np.int32),
        "name": "a model",
        "texts": ["a text"],
        "x": "a batch",
    }
    return {**arrays, **read, **packed, **pages, **{each: MagicMock(name=each) for each in outside}}


# ---- bound


def run_bound(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a piece whose calls check their arguments and compute nothing."""
    for name, function in _offered().items():
        monkeypatch.setattr(flashgen, name, _bound(function), raising=False)
    monkeypatch.setattr(calls, "_front", lambda name: getattr(flashgen, name))
    monkeypatch.setattr(transformers, "register", _bound(transformers.register))
    monkeypatch.setattr(compat.transformers, "register", _bound(transformers.register))
    # Which needs PyTorch, and takes nothing.
    monkeypatch.setattr(compat, "replacing_sdpa", lambda: contextlib.nullcontext())
    functions = {name: _bound(each) for name, each in _of_modules().items()}
    snippet.run(types.SimpleNamespace(**functions, SequencePlan=SequencePlan), monkeypatch)


def _offered() -> dict[str, Callable[..., Any]]:
    """What the package itself offers."""
    return {name: getattr(flashgen, name) for name in flashgen._OFFERED}


def _of_modules() -> dict[str, Callable[..., Any]]:
    """What emitted modules offer."""
    return {
        name: function
        for kind in RUNTIME
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the arguments of a function, and gives back what has the shapes of its results."""
    signature = inspect.signature(function)
    taken = [each for each in signature.parameters.values() if each.name != "self"]
    signature = signature.replace(parameters=taken)

    def call(*given: Any, **told: Any) -> Any:
        asked = signature.bind(*given, **told).arguments
        arrays = [each for each in asked.values() if isinstance(each, np.ndarray)]
        if not arrays:
            return MagicMock(name=function.__name__)
        if function.__name__.startswith("gradients"):
            wanted = [np.zeros(1, np.float32)] * len(asked.get("wanted", ()))
            return *(np.zeros_like(each) for each in arrays[:3]), *wanted
        o = np.zeros_like(arrays[0])
        return (o, np.zeros(o.shape[:-1], np.float32)) if asked.get("return_lse") else o

    return call


# ---- for real


def run_for_real(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a piece on an emulated card. Raises NeedsMore where it calls what that has not."""
    served = {"sdpa": compat.scaled_dot_product_attention}
    served["attention"] = _emulated(snippet, flashgen.attention)
    for name in ("attention_with_cache", "explain"):
        served[name] = functools.partial(_on_card, getattr(flashgen, name))
    varlen = functools.partial(_on_card, flashgen.attention_varlen)
    # Of packed sequences pages say q, too: here as many rows as heads.
    served["attention_varlen"] = lambda q, k, v, *starts, **told: varlen(q[0], k[0], v[0], *starts, **told)
    for name in _offered():
        monkeypatch.setattr(flashgen, name, served.get(name, _missing(name)))
    monkeypatch.setattr(compat.transformers, "register", _missing("register"))
    monkeypatch.setattr(compat, "replacing_sdpa", _missing("replacing_sdpa"))
    of_modules = {name: served.get(name, _missing(name)) for name in _of_modules()}
    module = types.SimpleNamespace(**{**of_modules, "explain": _missing("explain of a module")})
    module.SequencePlan = SequencePlan
    with compat.using(device=CARD):
        snippet.run(module, monkeypatch)


def _on_card(function: Callable[..., Any], *given: Any, **told: Any) -> Any:
    return function(*given, **{"device": CARD, **told})


def _missing(name: str) -> Callable[..., Any]:
    def call(*given: Any, **told: Any) -> Any:
        raise NeedsMore(f"{name} needs a card")

    return call


def _emulated(snippet: Snippet, attention: Callable[..., Any]) -> Callable[..., Any]:
    """`flashgen.attention` on an emulated card, also as a module's. A function that a piece defines is what
    its module computes, which then knows what that reads."""
    known = inspect.signature(attention).parameters
    kinds = {4: "mask", 5: "score"}
    of_module = "flashgen" not in snippet.imported

    def call(q: Any, k: Any, v: Any, causal: bool | None = None, **told: Any) -> Any:
        if isinstance(told.get("device"), int):
            raise NeedsMore("device= needs a card")
        scope = inspect.currentframe().f_back.f_globals  # type: ignore[union-attr]
        functions = [scope[name] for name in snippet.functions] if of_module else []
        for function in functions:
            told = {name: value for name, value in told.items() if name in known}
            told[kinds[function.__code__.co_argcount]] = function
            picture = pictures().get(f"function_{function.__name__}")
            q = q if picture is None else q[:, :, : picture.problem.seqlen_q]
        if unknown := told.keys() - known.keys():
            raise NeedsMore(f"{', '.join(unknown)} needs a module of an expression that reads it")
        return attention(q, k, v, **{"device": CARD, "causal": bool(causal), **told})

    return call
