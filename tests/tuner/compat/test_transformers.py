"""Models of transformers with flashgen's attention compute what they do with their own eager one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from flashgen.compat.transformers import register
from flashgen.tuner.compat import transformers as room
from flashgen.tuner.compat.transformers import _attend, _functions_of, _wrap

from tests.support.front_stand_in import StandIn

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Configurations, and what their layers ask of kernels.
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": ("LlamaConfig", {}, set()),
    "mistral": ("MistralConfig", {"sliding_window": 5}, {"window"}),
    "gemma 2": (
        "Gemma2Config",
        {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
        {"window", "softcap"},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
        {"window", "sinks"},
    ),
}


def tiny(transformers: Any, name: str, implementation: str) -> Any:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    kind, more, _ = MODELS[name]
    config = getattr(transformers, kind)(**TINY, **more)
    torch.manual_seed(0)
    config._attn_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def transformers(front: StandIn) -> Any:
    pytest.importorskip("torch._C", reason="needs PyTorch")
    found = pytest.importorskip("transformers", reason="needs transformers")
    register()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_they_do_eagerly(transformers: Any, front: StandIn, name: str) -> None:
    import torch

    ours, eager = (tiny(transformers, name, each) for each in ("flashgen", "eager"))
    eager.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with torch.no_grad():
        for mask in (None, padding):
            found, wanted = (model(ids, attention_mask=mask).logits for model in (ours, eager))
            counted = slice(None) if mask is None else mask.bool()
            torch.testing.assert_close(found[counted], wanted[counted], atol=2e-5, rtol=2e-4)
    named = {key for asked in front.asked for key in asked}
    assert MODELS[name][2] <= named
    if "window" in MODELS[name][2]:
        assert {asked["window"] for asked in front.asked if "window" in asked} == {(4, 0)}


def test_models_write_text_from_their_caches(transformers: Any, front: StandIn) -> None:
    import torch

    ours, eager = (tiny(transformers, "mistral", each) for each in ("flashgen", "eager"))
    eager.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert (ours.generate(ids, **told) == eager.generate(ids, **told)).all()


def test_packed_batches_are_packed_sequences(transformers: Any, front: StandIn) -> None:
    import torch

    ours, eager = (tiny(transformers, "llama", each) for each in ("flashgen", "eager"))
    eager.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        found = ours(ids, position_ids=places).logits
        assert front.last["max_seqlen_q"] == 7
        parts = [eager(part).logits for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(found, torch.cat(parts, 1), atol=2e-5, rtol=2e-4)


def test_masks_that_flash_attn_does_not_know_are_served_as_masks(transformers: Any, front: StandIn) -> None:
    import torch

    ours, eager = (tiny(transformers, "llama", each) for each in ("flashgen", "eager"))
    eager.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen[:4, :4] = True  # an image that sees all of itself
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        found = ours(ids, attention_mask=seen.expand(2, 1, 9, 9)).logits
        wanted = eager(ids, attention_mask=added.expand(2, 1, 9, 9)).logits
    assert "attn_mask" in front.last
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)


def test_overlays_are_made_as_masks_of_all_pairs(transformers: Any, front: StandIn) -> None:
    import torch
    from transformers import masking_utils

    config = transformers.LlamaConfig(**TINY)
    config._attn_implementation = "flashgen"
    embedded = torch.zeros(2, 6, 32)
    taken = inspect.signature(masking_utils.create_causal_mask).parameters
    # Versions have other names for them.
    told = {"inputs_embeds": embedded, "input_embeds": embedded, "cache": None, "past_key_values": None}
    told = {name: value for name, value in told.items() if name in taken}
    told |= {"config": config, "attention_mask": None}
    assert masking_utils.create_causal_mask(**told) is None
    made = masking_utils.create_causal_mask(**told, or_mask_function=lambda b, h, q, k: k < 3)
    assert made.shape == (2, 1, 6, 6) and made.dtype is torch.bool
    assert (made[0, 0] == (torch.ones(6, 6, dtype=torch.bool).tril() | (torch.arange(6) < 3))).all()


def test_what_is_refused_is_named(front: StandIn) -> None:
    with pytest.raises(ValueError, match="position_bias is given, which is not served here: use attn_impl"):
        _attend(lambda *given, **told: None, None, 1, 1, 1, None, position_bias=1)


def test_other_implementations_are_found_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Glue:
        @staticmethod
        def _lazy_imports(implementation: str | None, *others: Any, **told: Any) -> Any:
            return "theirs", implementation, others, told

        _pad_input, _unpad_input, _flash_with_kvcache_fn = "pad", "unpad", None

    glue = Glue()
    monkeypatch.setattr(room, "_NAMES", {"flashgen", "another"})
    _wrap(glue, "_lazy_imports", _functions_of(glue))
    first = glue._lazy_imports
    _wrap(glue, "_lazy_imports", _functions_of(glue))
    assert glue._lazy_imports is first
    assert glue._lazy_imports("flash_attention_2", 1, a=2) == ("theirs", "flash_attention_2", (1,), {"a": 2})
    functions = glue._lazy_imports("another", allow_all_kernels=False)
    assert [each.__name__ for each in functions[:3]] == [
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ]
    assert functions[3:] == ("pad", "unpad")
