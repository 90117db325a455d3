"""docs/migrating.md says of every argument what becomes of it, and refusals in the words that they have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flashgen import compat
from flashgen.tuner.compat import flash_attn, flash_attn_interface, flex_attention

from tests.support import ROOT
from tests.support.markdown import Page

PAGE = Page(ROOT / "docs" / "migrating.md")
TABLE = re.compile(r"<!-- arguments:(\w+) -->\n(.*?)<!-- /arguments -->", re.DOTALL)
Q = np.zeros((1, 2, 2, 8), np.float32)
BESIDE = {"scaled_dot_product_attention": (compat.scaled_dot_product_attention,)}
BESIDE |= {
    module.__name__.rpartition(".")[2]: tuple(
        getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))
    )
    for module in (flash_attn, flash_attn_interface, flex_attention)
}
#: Of rooms whose tables say the rest of what another's says.
MORE_THAN = {"flash_attn_interface": "flash_attn"}


def rows(room: str) -> dict[str, str]:
    """What becomes of each argument, by its name."""
    (table,) = (body for name, body in TABLE.findall(PAGE.text) if name == room)
    found = {}
    for line in table.splitlines()[2:]:
        first, second = line.strip("|").split(" | ", 1)
        found |= dict.fromkeys(re.findall(r"`(\w+)`", first), second.strip())
    return found


@pytest.mark.parametrize("room", BESIDE)
def test_every_argument_is_told_of(room: str) -> None:
    told = rows(room)
    taken = {name for function in BESIDE[room] for name in inspect.signature(function).parameters}
    assert set(told) <= taken
    assert taken <= set(told) | set(rows(MORE_THAN[room]) if room in MORE_THAN else ())
    for name, what in told.items():
        assert re.match(r"served\b|ignored: |refused: ", what), f"{name}: {what}"


def refused(room: str, name: str, call: Callable[..., Any], *given: Any, **told: Any) -> Any:
    return pytest.param(room, name, call, given, told, id=f"{room}-{name}")


@pytest.mark.parametrize(
    ("room", "name", "call", "given", "told"),
    [
        refused("flash_attn", "dropout_p", flash_attn.flash_attn_func, Q, Q, Q, 0.1),
        refused("flash_attn", "cache_leftpad", flash_attn.flash_attn_with_kvcache, Q, Q, Q, cache_leftpad=1),
        refused("flash_attn_interface", "qv", flash_attn_interface.flash_attn_func, Q, Q, Q, qv=Q),
        refused(
            "flash_attn_interface", "q_descale", flash_attn_interface.flash_attn_func, Q, Q, Q, q_descale=1
        ),
        refused(
            *(
                "flash_attn_interface",
                "rotary_seqlens",
                flash_attn_interface.flash_attn_with_kvcache,
                Q,
                Q,
                Q,
            ),
            rotary_seqlens=1,
        ),
        refused(
            *("flex_attention", "return_aux", flex_attention.flex_attention, Q, Q, Q),
            return_aux=flex_attention.AuxRequest(max_scores=True),
        ),
        refused(
            *("scaled_dot_product_attention", "dropout_p", compat.scaled_dot_product_attention, Q, Q, Q),
            dropout_p=0.1,
        ),
        refused(
            *("scaled_dot_product_attention", "is_causal", compat.scaled_dot_product_attention, Q, Q, Q),
            attn_mask=Q[0, 0, :, :2] > 0,
            is_causal=True,
        ),
    ],
)
def test_refusals_have_the_words_that_the_page_has(
    room: str, name: str, call: Callable[..., Any], given: tuple[Any, ...], told: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as error:
        call(*given, **told)
    assert f'"{error.value}"' in rows(room)[name]


def test_gradients_of_the_same_bits_are_refused_in_the_words_that_the_page_has() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    q = torch.zeros(1, 2, 2, 8, requires_grad=True)
    with pytest.raises(ValueError) as error:
        flash_attn.flash_attn_func(q, q, q, deterministic=True)
    assert f'"{error.value}"' in rows("flash_attn")["deterministic"]
