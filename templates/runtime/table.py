"""Which kernel of a table serves, and why."""

import math
from typing import Any, NamedTuple

from .arrays import _UNNAMED_TYPES, _check_shapes, _dense_like, _stepped, _View
from .driver import _arch_of
from .facts import _ITEM_BYTES, Tuned

#: What doublings weigh: of a length, and of the number of tiles of rows over all heads.
_LENGTH_WEIGHT, _TILES_WEIGHT = 1.0, 0.5
_SIZES = ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")
#: Query rows up to which kernels for few serve.
_FEW_QUERIES = 16
#: Where tensors may be. Those of meta have no data: results have none either.
_TORCH_DEVICES = ("cuda", "meta")


class _Output(NamedTuple):
    """What is made where none is passed, and the log-sum-exp; strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, int, int]
    """The strides by batch, head and row."""
    rows_shape: tuple[int, ...]
    rows_strides: tuple[int, ...]


class Choice(NamedTuple):
    """The kernel that serves, whether it was tuned for just that, and in words why. `print` shows the
    words."""

    tuned: Tuned
    exact: bool
    how: str

    def __str__(self) -> str:
        return self.how


def _type_name(torch: Any, dtype: Any, names: tuple[str, ...]) -> str:
    """The one of the names that a type of torch has, failing that its own."""
    return next((name for name in names if dtype is getattr(torch, name)), str(dtype))


def _ordinal(device: Any) -> int | None:
    """The number of a torch device; meta has none."""
    index: int | None = device.index
    return index


class _Table:
    """A module's kernels, of which the nearest serves."""

    def __init__(self, kernels: tuple[Tuned, ...]) -> None:
        self.kernels = kernels
        self.only: Tuned | None = None
        """The kernel that `use` named, which alone serves; None: the nearest does."""
        self.dtypes: tuple[str, ...] = tuple(dict.fromkeys(tuned.dtype for tuned in kernels))
        """The types of q, and of k and v but where these have their own, that there are kernels for."""
        self.key_dtypes: tuple[str, ...] = tuple(dict.fromkeys(tuned.key_dtype for tuned in kernels))
        self.output_dtypes: tuple[str, ...] = tuple(dict.fromkeys(tuned.output_dtype for tuned in kernels))
        self.has_scales = self.output_dtypes != self.dtypes
        self.told_apart = tuple(((each.dtype, each.head_dim, each.head_dim_v), each) for each in kernels)
        """Types and head dims of the kernels, looked up before."""
        for tuned in kernels:
            _ = tuned.has_maps, tuned.main  # torch.compile reads what is there, and makes none of it

    # ---- what there are kernels for

    def inspect(self, name: str, described: tuple[Any, ...], layout: Any, torch: Any) -> _View:
        """Returns an array in the kernels' terms; raises what tells the caller how to mend it."""
        dtype, shape, strides, device = described
        bshd = layout == "bshd"
        type_name = dtype
        if torch is not None:
            type_name = _type_name(torch, dtype, self.dtypes_of(name))
        self.check_type(name, type_name, torch is not None)
        if torch is not None:
            if device.type not in _TORCH_DEVICES:
                raise ValueError(f"{name} is on the device {str(device)!r}; move it with {name}.cuda()")
            device = _ordinal(device)
        elif strides is not None:
            item_bytes = _ITEM_BYTES[type_name]
            if any(stride % item_bytes for stride in strides):
                raise ValueError(
                    f"{name} has the strides {strides} in bytes; they must be multiples of {item_bytes}"
                )
            strides = tuple(stride // item_bytes for stride in strides)
        if len(shape) != 4:
            order = "batch, seqlen, heads" if bshd else "batch, heads, seqlen"
            hint = f"; add a dimension with {name}[None]" if len(shape) == 3 else ""
            raise ValueError(
                f"{name} has {len(shape)} dimensions, {tuple(shape)}; 4 are needed, ({order}, head_dim){hint}"
            )
        n0, n1, n2, head_dim = shape
        s0, s1, s2, s3 = (n1 * n2 * head_dim, n2 * head_dim, head_dim, 1) if strides is None else strides
        self.check_head_dim(name, type_name, head_dim)
        if bshd:
            n1, n2, s1, s2 = n2, n1, s2, s1
        if n0 == 0 or n1 == 0 or n2 == 0:
            return _View((n0, n1, n2), (0, 0, 0), device, type_name, head_dim)
        if s3 != 1 and head_dim > 1:
            raise ValueError(
                f"the last dimension of {name} has the stride {s3}, but must be contiguous (stride 1): pass "
                f"{name}.contiguous() (torch) or ascontiguousarray({name}) (CuPy, numpy)"
            )
        steps = _stepped((n0, n1, n2), (s0, s1, s2))
        return _View((n0, n1, n2), steps, device, type_name, head_dim)

    def dtypes_of(self, name: str) -> tuple[str, ...]:
        """Returns the types that the array of that name may have."""
        return {"out": self.output_dtypes, "k": self.key_dtypes, "v": self.key_dtypes}.get(name, self.dtypes)

    @property
    def has_key_scales(self) -> bool:
        """Whether k and v are of a type of their own, each of their heads with a scale."""
        return self.key_dtypes != self.dtypes

    def check_type(self, name: str, dtype: str, is_tensor: bool) -> None:
        """Raises TypeError unless there are kernels for arrays of that type."""
        wanted = self.dtypes_of(name)
        if dtype in wanted:
            return
        if len(wanted) != 1:
            raise TypeError(f"{name} is {dtype}; this module has kernels for {', '.join(wanted)}")
        only = wanted[0]
        if is_tensor:
            raise TypeError(f"{name} is {dtype}, not torch.{only}: pass {name}.to(torch.{only})")
        way_out = f"{name}.astype(np.{only})"
        if only in _UNNAMED_TYPES:
            way_out = f"{name}.astype(ml_dtypes.{only}) or torch tensors"
        raise TypeError(f"{name} is {dtype}, not {only}: pass {way_out}")

    def check_head_dim(self, name: str, dtype: str, head_dim: int) -> None:
        """Raises ValueError unless there are kernels for arrays of that type with that head dim."""
        is_value = name in ("v", "out", "o", "dout")
        # Of the same type: the first's head dim, should it be the values' that none has.
        same = [
            tuned
            for tuned in self.kernels
            if dtype in (tuned.dtype, tuned.key_dtype, tuned.output_dtype if is_value else "")
        ]
        if any((tuned.head_dim_v if is_value else tuned.head_dim) == head_dim for tuned in same):
            return
        of_values = f" --dv {same[0].head_dim_v}" if same[0].head_dim_v != same[0].head_dim else ""
        dims = f"--d {same[0].head_dim} --dv {head_dim}" if is_value else f"--d {head_dim}{of_values}"
        command = same[0].command.partition(" --d ")[0]
        raise ValueError(
            f"{name} has {dtype} of head dim {head_dim}; there are kernels for {self.classes()}. Make "
            f"another with {command} {dims}"
        )

    def classes(self) -> str:
        """Says in words which types and head dims there are kernels for."""
        classes: dict[str, dict[str, None]] = {}
        for tuned in self.kernels:
            of_values = f"/{tuned.head_dim_v}" if tuned.head_dim_v != tuned.head_dim else ""
            classes.setdefault(tuned.dtype, {})[f"{tuned.head_dim}{of_values}"] = None
        return "; ".join(f"{dtype} of head dim {', '.join(dims)}" for dtype, dims in classes.items())

    def check_shapes(self, query: _View, key: _View, value: _View) -> tuple[int, int]:
        """Returns the number of key/value heads and keys; raises ValueError unless the arrays go together."""
        return _check_shapes(query, key, value, self.key_dtypes[0] if self.has_key_scales else query.dtype)

    def output_like(self, query: _View, head_dim: int, layout: Any) -> _Output:
        """Returns what is made of such queries: laid out as they are, with v's head dim."""
        bshd = layout == "bshd"
        batch, heads, rows = query.shape
        shape, strides = _dense_like(query, head_dim, bshd)
        s0, s1, s2, _ = strides
        steps = _stepped(query.shape, (s0, s2, s1) if bshd else (s0, s1, s2))
        return _Output(shape, strides, steps, (batch, heads, rows), (heads * rows, rows, 1))

    def sizes(self, query: _View, key: _View, layout: Any) -> dict[str, int]:
        """Returns the lengths that kernels are told of such arrays."""
        batch, heads, seqlen_q = query.shape
        _, kv_heads, seqlen_k = key.shape
        return dict(zip(_SIZES, (batch, heads, kv_heads, seqlen_q, seqlen_k), strict=True))

    def sizes_of_grid(self, sizes: dict[str, int]) -> tuple[int, int, int, int]:
        """Returns those of them by which blocks are counted, as `Launch.count` takes them."""
        return sizes["batch"], sizes["num_q_heads"], sizes["num_kv_heads"], sizes["seqlen_q"]

    # ---- which of them serves

    def computing(self, dtype: str, head_dim: int, head_dim_v: int) -> list[Tuned]:
        """Returns the kernels for that type and those head dims."""
        wanted, only = (dtype, head_dim, head_dim_v), self.only
        found = [tuned for told, tuned in self.told_apart if told == wanted]
        return found if only is None else [tuned for tuned in found if tuned is only]

    def choose(
        self, query: _View, key: _View, value: _View, strides: tuple[int, ...], causal: bool
    ) -> Choice:
        """Chooses the nearest kernel of the table, of several the first; `attention` says by what. Raises
        ValueError where none serves."""
        computing, running = self.running(query, value)
        arch = None if query.device is None else _arch_of(query.device)
        asked = {
            "batch": query.shape[0],
            "num_q_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "seqlen_q": query.shape[2],
            "seqlen_k": key.shape[2],
        }
        ranks = [self.rank(tuned, asked, strides, causal) for tuned in running]
        rank = min(ranks)
        tuned = running[ranks.index(rank)]
        what = tuned.told
        if not rank.inexact:
            but = ", but it cannot step by these strides" if rank.cannot_step else ""
            return Choice(tuned, True, f"{what}: tuned for just this{but}")
        told = [f"tuned for {_words(tuned.problem)}, asked for {_words(asked)}"]
        if rank.distance:
            told[0] += f", {rank.distance:.2g} doublings apart"
        if rank.other_mask:
            told.append(f"tuned {'without' if causal else 'with'} the causal mask")
        if rank.cannot_step:
            told.append("no kernel can step by these strides")
        elif any(other.cannot_step for other in ranks):
            told.append("others cannot step by these strides")
        if len(running) < len(computing):
            told.append(f"{len(computing) - len(running)} others do not run on sm_{arch}")
        return Choice(tuned, False, f"{what}: the nearest of {len(running)} ({'; '.join(told)})")

    def running(self, query: _View, value: _View) -> tuple[list[Tuned], list[Tuned]]:
        """Returns the kernels that compute what is asked for, and those of them that run where it is. Raises
        ValueError and RuntimeError where there are none."""
        computing = self.computing(query.dtype, query.head_dim, value.head_dim)
        if not computing:
            of_type = next(tuned for tuned in self.kernels if tuned.dtype == query.dtype)
            raise ValueError(
                f"no kernel here computes {query.dtype} of head dim {query.head_dim} with values of "
                f"{value.head_dim}; there are {self.classes()}. Make one with "
                f"{of_type.command.partition(' --d ')[0]} --d {query.head_dim} --dv {value.head_dim}"
            )
        arch = None if query.device is None else _arch_of(query.device)
        running = [tuned for tuned in computing if arch is None or not tuned.lacking(arch)]
        if not running:
            assert arch is not None
            needs = " or ".join(dict.fromkeys(tuned.lacking(arch) for tuned in computing))
            cards = ", ".join(sorted({str(tuned.device["name"]) for tuned in computing}))
            raise RuntimeError(
                f"the kernels for {query.dtype}, head dim {query.head_dim}, need {needs}, device "
                f"{query.device} is sm_{arch}; they were made for {cards}: run {computing[0].command} "
                f"--device {query.device}"
            )
        return computing, running

    def rank(self, tuned: Tuned, asked: dict[str, int], strides: tuple[int, ...], causal: bool) -> "_Rank":
        """Says how far a kernel is from what is asked for."""
        return _rank(tuned, asked, strides, causal)


class _Rank(NamedTuple):
    """How far a kernel is from what is asked for; the least serves."""

    cannot_step: bool
    inexact: bool
    other_rows: bool
    """Whether the kernel was made for few query rows where many are asked for, or the other way round."""
    other_mask: bool
    distance: float
    """Doublings between the kernel's shape and the one asked for, weighted; 0 for the same."""


def _rank(tuned: Tuned, asked: dict[str, int], strides: tuple[int, ...], causal: bool) -> _Rank:
    problem, rows = tuned.problem, asked["seqlen_q"]
    # One row sees all keys, whatever the mask.
    other_mask = rows > 1 and problem["causal"] != causal
    exact = not other_mask and all(problem[name] == wanted for name, wanted in asked.items())
    other_rows = (problem["seqlen_q"] <= _FEW_QUERIES) != (rows <= _FEW_QUERIES)
    lengths = sum(_doublings(problem[name], asked[name]) for name in ("seqlen_q", "seqlen_k"))
    tiles, wanted = (tuned.tiles(*(shape[name] for name in tuned.counted)) for shape in (problem, asked))
    distance = _LENGTH_WEIGHT * lengths + _TILES_WEIGHT * _doublings(tiles, wanted)
    return _Rank(not tuned.can_step(strides), not exact, other_rows, other_mask, distance)


def _doublings(a: float, b: float) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))


def _words(shape: dict[str, Any]) -> str:
    heads, lengths = str(shape["num_q_heads"]), str(shape["seqlen_q"])
    if shape["num_kv_heads"] != shape["num_q_heads"]:
        heads += f"/{shape['num_kv_heads']}"
    if shape["seqlen_k"] != shape["seqlen_q"]:
        lengths += f"x{shape['seqlen_k']}"
    return f"batch {shape['batch']}, heads {heads}, seqlen {lengths}"
