"""Masks as FlexAttention's callers make them, as functions that kernels are made of."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...gen.formula.trace import trace_mask, trace_score
from ...templates.runtime.arrays import _kind, _torch_of

#: The side of PyTorch's blocks where a caller does not say, and of the one block of a mask of none.
DEFAULT_BLOCK, _WHOLE = 128, 1 << 30
_MASK_ARGUMENTS, _SCORE_ARGUMENTS = 4, 5
Mask = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask of so many rows and keys. What blocks of it are empty kernels find out by themselves: it holds
    its function alone, and any change of arrays that this reads is seen."""

    mask_mod: Mask
    shape: tuple[int, int, int, int]
    BLOCK_SIZE: tuple[int, int] = (DEFAULT_BLOCK, DEFAULT_BLOCK)

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """The numbers of rows and of keys."""
        return self.shape[2:]

    def to(self, device: Any) -> BlockMask:
        """Returns itself: it has no arrays of its own."""
        return self

    def to_dense(self) -> NDArray[np.int32]:
        """Returns 1 for each block of which a row sees a key, (batch, heads, blocks of rows, blocks of
        keys)."""
        seen, (rows, keys) = evaluated_mask(self.mask_mod, self.shape), self.BLOCK_SIZE
        for axis, block in ((2, rows), (3, keys)):
            seen = np.logical_or.reduceat(seen, np.arange(0, seen.shape[axis], block), axis)
        return seen.astype(np.int32)

    def sparsity(self) -> float:
        """Returns the share of blocks of which no row sees a key, in percent."""
        return float(100 * (1 - self.to_dense().mean()))

    def __getitem__(self, index: Any) -> BlockMask:
        raise NotImplementedError(
            "slices of a BlockMask have no function: make one of a function with the offset in it, "
            "create_block_mask(lambda b, h, q, k: mask_mod(b, h, q + offset, k), ...)"
        )


def create_block_mask(
    mask_mod: Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Makes a mask of ``mask_mod(b, h, q_idx, kv_idx)``, true where row q_idx sees key kv_idx.

    Nothing is computed, and of the lengths only Q_LEN and KV_LEN are held to: batch and heads that are None
    are any. How PyTorch stores its blocks is accepted and not read. Raises TypeError for what is no function
    of four arguments.
    """
    if not callable(mask_mod) or _positionals(mask_mod) not in (_MASK_ARGUMENTS, None):
        raise TypeError(f"mask_mod is {mask_mod!r}; it must be a function mask_mod(b, h, q_idx, kv_idx)")
    sides = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    return BlockMask(mask_mod, (B or 1, H or 1, int(Q_LEN), int(KV_LEN)), (sides[0], sides[1]))


def create_mask(
    mod_fn: Mask, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Any:
    """Returns what a function of masks or scores makes of every pair, (batch, heads, seqlen_q, seqlen_k).

    That is a mask's truths, or what becomes of scores of zero: a torch tensor where torch is imported, else
    a numpy array.
    """
    shape = (B or 1, H or 1, int(Q_LEN), int(KV_LEN))
    if _positionals(mod_fn) == _SCORE_ARGUMENTS:
        found: NDArray[Any] = _evaluated(trace_score(mod_fn), shape, score=0.0).astype(np.float32)
    else:
        found = evaluated_mask(mod_fn, shape)
    torch = sys.modules.get("torch")
    return found if torch is None else torch.from_numpy(np.array(found)).to(device)


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """Lets every row see every key: true, or a tensor of it where PyTorch asks with tensors."""
    torch = _torch_of(batch)
    return True if torch is None else batch.new_ones((), dtype=torch.bool)


def evaluated_mask(mask_mod: Mask, shape: tuple[int, int, int, int]) -> NDArray[np.bool_]:
    """Returns a mask's truth for every pair of that many batches, heads, rows and keys."""
    if mask_mod is noop_mask:
        return np.ones(shape, bool)
    return _evaluated(trace_mask(mask_mod), shape).astype(bool)


def _evaluated(traced: Any, shape: tuple[int, int, int, int], **more: Any) -> NDArray[Any]:
    indices = dict(zip("bhqk", np.ogrid[tuple(slice(0, each) for each in shape)], strict=True))
    arrays = {name: np.asarray(_on_host(array)) for name, array in traced.buffers.items()}
    return np.broadcast_to(traced.expression.value({**indices, **arrays, **traced.scalars, **more}), shape)


def _on_host(array: Any) -> Any:
    return array.detach().cpu() if hasattr(array, "detach") else array


def _positionals(function: Mask) -> int | None:
    """How many arguments a function needs in their order, beside those that it has values for; None where it
    does not say."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    given = len(getattr(function, "__defaults__", None) or ()) + hasattr(function, "__self__")
    return code.co_argcount - given


# ---- masks that PyTorch made

#: What PyTorch's masks came to, for as long as these live.
_KNOWN: weakref.WeakKeyDictionary[Any, Mask | None] = weakref.WeakKeyDictionary()


def mask_function(block_mask: Any, rows: int, keys: int) -> Mask | None:
    """Returns the function of a mask, flashgen's or PyTorch's, for so many rows and keys; None where it hides
    nothing.

    Raises TypeError for what is no mask, ValueError for one of other lengths, and RuntimeError as PyTorch
    does for a part of one, which has lost its function.
    """
    if not hasattr(block_mask, "mask_mod") or not hasattr(block_mask, "seq_lengths"):
        raise TypeError(f"block_mask is a {_kind(block_mask)}; pass what create_block_mask returns")
    is_any = tuple(block_mask.BLOCK_SIZE) == (_WHOLE, _WHOLE)
    if not is_any and tuple(block_mask.seq_lengths) != (rows, keys):
        raise ValueError(
            f"block_mask is of {' x '.join(map(str, block_mask.seq_lengths))} rows and keys, query and key "
            f"have {rows} x {keys}: make it anew with create_block_mask"
        )
    if isinstance(block_mask, BlockMask):
        return None if block_mask.mask_mod is noop_mask else block_mask.mask_mod
    if is_any:
        return None
    if block_mask not in _KNOWN:
        _KNOWN[block_mask] = _of_torch(block_mask)
    return _KNOWN[block_mask]


def _of_torch(block_mask: Any) -> Mask | None:
    """A PyTorch mask's function; with its blocks, where these say something else than the function alone."""
    import torch.nn.attention.flex_attention as flex

    function = block_mask.mask_mod
    function = getattr(function, "fn", function) if type(function).__name__ == "_MaskModWrapper" else function
    if getattr(function, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError("block_mask is a slice of another and has lost its function: set its mask_mod")
    is_noop = function in (flex.noop_mask, noop_mask)
    kinds = _kinds_of(block_mask)
    if is_noop and bool((kinds > 0).all()):
        return None
    if not is_noop:
        batch, heads = block_mask.kv_num_blocks.shape[:2]
        device = block_mask.kv_num_blocks.device
        of_rows, of_keys = block_mask.seq_lengths
        again = flex.create_block_mask(
            function, batch, heads, of_rows, of_keys, device, BLOCK_SIZE=block_mask.BLOCK_SIZE
        )
        whole = block_mask.full_kv_num_blocks is not None
        if bool((_kinds_of(again).clamp(max=2 if whole else 1) == kinds).all()):
            return function
    rows, keys = block_mask.BLOCK_SIZE

    def of_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = kinds[b, h, q_idx // rows, kv_idx // keys]
        return kind > 0 if is_noop else (kind == 2) | ((kind == 1) & function(b, h, q_idx, kv_idx))

    return of_blocks


def _kinds_of(block_mask: Any) -> Any:
    """Of each block, uint8 (batch, heads, blocks of rows, blocks of keys): 0 where it is hidden, 1 where the
    function says what is seen, 2 where all is."""
    import torch

    def listed(counts: Any, indices: Any) -> Any:
        blocks = indices.shape[-1]
        named = torch.arange(blocks, device=indices.device) < counts[..., None]
        # What stands behind a row's count may be anything: it is put into a column that is dropped.
        columns = torch.where(named, indices, blocks).long()
        found = torch.zeros((*columns.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
        return found.scatter_(-1, columns, True)[..., :blocks]

    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices).to(torch.uint8)
    if block_mask.full_kv_num_blocks is None:
        return partial
    return torch.where(listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices), 2, partial)
