"""Kernels of packed sequences as an attention of Hugging Face's transformers."""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .arrays import _torch_of
from .facts import Tuned
from .huggingface import _is_exporting, _make_mask
from .scored_values import Scored

#: What masks of packed batches are put together of that kernels compute by themselves.
_OWN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "packed_sequence_mask_function",
}
_JOINING = ("and_masks", "remap_positions_for_packed_sequence")
#: Those masks and changes of scores which models ask for by name.
_SERVED = {"window", "softcap", "sinks"}
#: Kinds of layers, each with masks of its own, whose lengths are kept.
_KNOWN = 4


class _Lengths(NamedTuple):
    """Where a batch's sequences begin, int32 on the card, and how long the longest is."""

    q: Any
    k: Any
    max_q: int
    max_k: int


class _PackedBatches:
    """Serves the packed batches of a model, and leaves others to what serves otherwise."""

    def __init__(self, tuned: Tuned, attend: Callable[..., Any], differentiable: bool = False) -> None:
        self.tuned, self.attend_varlen, self.differentiable = tuned, attend, differentiable
        self.known: collections.deque[tuple[Any, _Lengths]] = collections.deque(maxlen=_KNOWN)
        """What was found out of the numbers of a batch's sequences, which all layers of a kind share."""

    def attend(
        self,
        otherwise: Any,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> Any:
        """As transformers calls an attention, told of packed batches by `cu_seq_lens_q` and its companions,
        or by what `_make_packed_mask` made in place of a mask."""
        torch, numbers = _torch_of(query), None
        if _are_numbers(torch, attention_mask):
            numbers, attention_mask = attention_mask, None
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        lengths = None if attention_mask is not None else self.lengths(torch, others, numbers)
        if lengths is not None and query.shape[0] == 1:
            asked = self.asked(others, causal, lengths.max_k)
            plain = dropout == 0 and others.get("position_bias") is None
            if plain and asked is not None and self.computes(torch, query, key, value):
                views = (x[0].transpose(0, 1) for x in (query, key, value))
                told = {"max_seqlen_q": lengths.max_q, "max_seqlen_k": lengths.max_k, **asked}
                o = self.attend_varlen(*views, *lengths[:2], causal=causal, scale=scaling, **told)
                return o[None], None
            window = others.get("sliding_window")
            attention_mask = _mask_of(torch, lengths, query.shape[2], key.shape[2], window, causal)
            is_causal = False
        if others.get("s_aux") is not None:
            raise ValueError(
                "no kernel here serves the attention sinks of these tensors, nor does PyTorch's attention: "
                "use 'eager'"
            )
        arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
        return otherwise(module, query, key, value, attention_mask, **arguments)

    def lengths(self, torch: Any, told: dict[str, Any], numbers: Any) -> _Lengths | None:
        """What a call says of packed sequences; None where it says nothing."""
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        given: list[Any] = [told.get(name) for name in names]
        if all(each is not None for each in given):
            starts_q, starts_k = (each.reshape(-1).to(torch.int32) for each in given[:2])
            return _Lengths(starts_q, starts_k, int(given[2]), int(given[3]))
        if numbers is None:
            return None
        for known, lengths in self.known:
            if known is numbers:
                return lengths
        inner = (numbers[0, 1:] != numbers[0, :-1]).nonzero()[:, 0] + 1
        ends = inner.new_tensor([0, numbers.shape[1]])
        starts = torch.cat((ends[:1], inner, ends[1:])).to(torch.int32)
        longest = int(starts.diff().max())
        self.known.append((numbers, _Lengths(starts, starts, longest, longest)))
        return self.known[-1][1]

    def asked(self, told: dict[str, Any], causal: bool, keys: int) -> dict[str, Any] | None:
        """What the kernel is told of a model's masks and changes of scores; None where it has others."""
        tuned, window = self.tuned, told.get("sliding_window")
        named = set(tuned.keywords) if isinstance(tuned, Scored) else set()
        wanted = {"window"} if window is not None and window < keys else set()
        wanted |= {"softcap"} if told.get("softcap") else set()
        wanted |= {"sinks"} if told.get("s_aux") is not None else set()
        # A window of all keys is none; other changes cannot be left out.
        if not wanted <= named <= _SERVED or not named - {"window"} <= wanted:
            return None
        asked: dict[str, Any] = {"window": (-1, -1)} if "window" in named else {}
        if "window" in wanted:
            assert window is not None
            # Of causal models a window counts the row's own key.
            asked["window"] = (window - 1, 0) if causal else (window, window)
        if "softcap" in wanted:
            asked["softcap"] = told["softcap"]
        if "sinks" in wanted:
            sinks = told["s_aux"] if self.differentiable else told["s_aux"].detach()
            asked["sinks"] = sinks.float()
        return asked

    def computes(self, torch: Any, query: Any, key: Any, value: Any) -> bool:
        """Whether the kernel is for such tensors, of which no gradient is wanted that none takes."""
        tuned, tensors = self.tuned, (query, key, value)
        derived = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if derived and not self.differentiable:
            return False
        dims = (query.shape[3], key.shape[3], value.shape[3])
        alike = all(x.dtype is getattr(torch, tuned.dtype) and x.stride()[3] == 1 for x in tensors)
        return alike and dims == (tuned.head_dim, tuned.head_dim, tuned.head_dim_v)


def _are_numbers(torch: Any, mask: Any) -> bool:
    """Whether that is the number of each place's sequence instead of a mask, (1, places)."""
    return mask is not None and mask.dim() == 2 and mask.dtype in (torch.int32, torch.int64)


def _mask_of(torch: Any, lengths: _Lengths, rows: int, keys: int, window: int | None, causal: bool) -> Any:
    """What rows of packed sequences see of the keys, (1, 1, rows, keys), for who has no kernel for them."""
    of, before = [], []
    for count, starts in ((rows, lengths.q.long()), (keys, lengths.k.long())):
        places, ends = torch.arange(count, device=starts.device), starts[1:].contiguous()
        of.append(torch.searchsorted(ends, places, right=True))
        # As counted from its sequence's last.
        before.append(ends.index_select(0, of[-1].clamp(max=len(ends) - 1)) - places)
    distance = before[1][None, :] - before[0][:, None]
    seen = of[0][:, None] == of[1][None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= (distance if causal else distance.abs() - 1) < window
    return seen[None, None]


def _make_packed_mask(otherwise: Any, **asked: Any) -> Any:
    """As transformers asks for a mask. Of packed batches the number of each place's sequence instead, where
    a mask says no more than what kernels compute by themselves."""
    if asked.get("attention_mask") is None and not sys.modules["torch"].compiler.is_compiling():
        parts = list(_parts_of(asked.get("mask_function")))
        names = {getattr(part, "__qualname__", "").partition(".")[0] for part in parts}
        if "packed_sequence_mask_function" in names and names <= _OWN_MASKS and not _is_exporting():
            packed = next(part for part in parts if part.__qualname__.startswith("packed_"))
            numbers = packed.__closure__[0].cell_contents
            if numbers.shape[0] == 1:
                return numbers
    return _make_mask(otherwise, **asked)


def _parts_of(function: Any) -> Iterator[Any]:
    """The functions that a mask is put together of, as transformers does it."""
    if getattr(function, "__qualname__", "").partition(".")[0] not in _JOINING:
        yield function
        return
    for cell in getattr(function, "__closure__", None) or ():
        found = cell.cell_contents
        for part in found if isinstance(found, tuple) else (found,):
            if callable(part):
                yield from _parts_of(part)
