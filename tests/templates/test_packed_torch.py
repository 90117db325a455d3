"""Operators of packed kernels in PyTorch, without a GPU: graphs hold them, and fakes tell shapes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.emit.module import emit_module
from flashgen.gen.kernel import Kernel
from flashgen.gen.scoring.asked import Scoring

from tests.support.host_tensors import fresh_driver, real_torch, take_host_tensors
from tests.support.modules import import_path
from tests.support.stand_in_driver import D, Driver
from tests.templates.test_packed import (
    HEADS,
    KV_HEADS,
    SAID,
    arrays,
    close,
    computing,
    kernel_of,
    lengths,
    offsets,
    wanted,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def for_tensors(kernel: Kernel, library: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """PyTorch, and the kernel's module for tensors in the host's memory; skips where there is none."""
    torch = real_torch()
    path = path / f"emitted_{kernel.problem.stem}.py"
    path.write_text(emit_module(kernel, device="H200"))
    module = take_host_tensors(import_path(path, for_good=True), library)
    fresh_driver(torch, library, monkeypatch)
    return torch, module


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(softcap=2.0)])
def test_graphs_hold_the_operator(
    scoring: Scoring, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(scoring=scoring)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    given = arrays()
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (*given, *lengths())]
    expected = wanted(kernel.problem, given, True)
    attend = module.attention_varlen

    def call(*tensors: Any) -> Any:
        return attend(*tensors, **SAID, causal=True, return_lse=True)

    with computing(Driver(library), kernel.problem):
        for function in (call, torch.compile(call, backend="eager", fullgraph=True)):
            o, lse = function(*tensors)
            close(o.numpy(), expected[0])
            close(lse.numpy(), expected[1])
        operator = getattr(torch.ops.flashgen, module.register_torch())
        numbers = [] if scoring.is_plain else [2.0]
        settings = (True, None, [21, 37], *tensors[3:], None, None, [], numbers)
        torch.library.opcheck(operator, (*tensors[:3], *settings))
        torch.library.opcheck(
            getattr(torch.ops.flashgen, module.register_torch() + "_lse"), (*tensors[:3], *settings)
        )


# ---- Hugging Face ------------------------------------------------------------------------------------------


def llama(transformers: Any, kind: str = "Llama", **others: Any) -> Any:
    sizes = {"hidden_size": HEADS * D, "intermediate_size": 64, "vocab_size": 99, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, use_cache=False, **others)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("scoring", "kind", "window", "served"),
    [
        (Scoring(), "Llama", None, True),
        (Scoring(window=(5, 0)), "Mistral", 6, True),
        (Scoring(), "Mistral", 6, False),
        (Scoring(softcap=2.0), "Llama", None, False),
    ],
)
def test_packed_batches_of_models(
    scoring: Scoring,
    kind: str,
    window: int | None,
    served: bool,
    library: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told by lengths, or by positions that begin anew; PyTorch computes what the kernel does not."""
    kernel = kernel_of(scoring=scoring)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    module.register_transformers("packed")
    torch.manual_seed(0)
    model = llama(transformers, kind, **({"sliding_window": window} if kind == "Mistral" else {}))
    lengths = (9, 1, 14)
    words = torch.randint(1, 99, (1, sum(lengths)))
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = torch.from_numpy(offsets(lengths))
    told = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 14, "max_length_k": 14}
    driver = Driver(library)
    with torch.no_grad(), computing(driver, kernel.problem) as card:
        model.set_attn_implementation("eager")
        alone = [model(part).logits for part in words.split(lengths, 1)]
        expected = torch.cat(alone, 1).numpy()
        model.set_attn_implementation("packed")
        for more in (told, {}):
            card.told.clear()
            close(model(words, position_ids=places, **more).logits.numpy(), expected)
            assert len(card.told) == (4 if served else 0)  # two layers of two launches each
        card.told.clear()
        close(model(words[:, :9]).logits.numpy(), alone[0].numpy())
        assert not card.told
    found = model(words, position_ids=places, **told).logits
    close(found.detach().numpy(), expected)
    found.sum().backward()
