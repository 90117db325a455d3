"""A card whose kernels are called through an emitted module's functions."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.emit.offers import offer_of
from ...gen.kernel import Kernel
from ...gen.layout import DENSE
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ..cards.cuda import CudaDevice, CudaRunner
from ..cards.device import Build, Toolchain
from ..cards.dtypes import numpy_dtype, require_inputs
from ..cards.guarded_memory import FLOAT32, GuardedImage, contiguous_strides, output_strides
from ..cards.key_scales import key_scales
from ..cards.score_values import by_keyword, score_values
from ..cards.sequences import index_arrays, rows_of_sequences, sizes_of_call
from ..errors import FlashgenError, LaunchError
from .gpu_arrays import array_kind
from .gradient_call import GradientCall


@dataclass(frozen=True)
class ModuleDevice:
    """A card whose kernels are run by an emitted module's ``attention()``, ``gradients()`` and their like."""

    card: CudaDevice
    module: Path
    kernel: str = ""
    """The name of the kernel to call in a module of several, else empty."""

    @property
    def spec(self) -> str:
        return self.card.spec

    @property
    def limits(self) -> DeviceLimits:
        return self.card.limits

    @property
    def driver(self) -> str:
        return self.card.driver

    @property
    def predicted(self) -> bool:
        return False

    @property
    def lock_key(self) -> str:
        return self.card.lock_key

    def toolchain(self) -> Toolchain:
        """Returns the card's own toolchain; the module compiles by itself."""
        return self.card.toolchain()

    def open(self) -> ModuleRunner:
        return ModuleRunner(self.card, self.module, self.kernel)


class ModuleRunner(CudaRunner):
    """Calls an emitted module on arrays that lie in guarded memory."""

    def __init__(self, card: CudaDevice, path: Path, kernel: str = "") -> None:
        self._array_kind = array_kind()
        super().__init__(card)
        self._kernel = kernel
        spec = importlib.util.spec_from_file_location(f"flashgen_proved_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise FlashgenError(f"{path} cannot be imported")
        self._module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(self._module)
            if kernel:
                self._module.use(kernel)
        except Exception as error:
            raise FlashgenError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error

    def attend(
        self,
        build: Build,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        want_lse: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Calls the module's ``attention()``, ``attention_varlen()``, ``attention_paged()`` or
        ``attention_latent()`` as `Runner.attend` says.

        The log-sum-exp is allocated by the module, from guarded memory too.
        """
        problem = build.kernel.problem
        if problem.append is not None:
            raise LaunchError(
                f"modules that append, as of {problem.name}, check themselves when they are run; prove the "
                ".cu here"
            )
        require_inputs(problem, q, k, v)
        sizes = sizes_of_call(problem, q, k, values)
        read, indices = score_values(problem.scores, values, sizes), index_arrays(problem, values)
        image, layout = GuardedImage(q.dtype), problem.layout
        placed = [(*image.add_input(x, x.dtype), x.shape) for x in (q, k, v)]
        scales = key_scales(problem, values, sizes["batch"], sizes["num_kv_heads"])
        o_shape, rows_shape = (*q.shape[:3], v.shape[3]), q.shape[:3]
        output = numpy_dtype(problem.output_dtype)
        written = rows_of_sequences(problem, values, q.shape[2])
        o_strides = output_strides(q, v.shape[3])
        placed.append((*image.add_output("o", o_shape, o_strides, output, written), o_shape))
        lse_at = None
        if want_lse:
            strides = contiguous_strides(rows_shape)
            lse_at, _ = image.add_output("the log-sum-exp", rows_shape, strides, FLOAT32, written)
        told_by_array = {**read.arrays, **indices, **scales}
        buffers_at = {name: image.add_buffer(array) for name, array in told_by_array.items()}
        before = image.before()
        after = np.empty_like(before)
        with self._launch_errors(build):
            base = self._arena_of(image.floats)
            self._cuda.memcpy_htod(base, before)
            # What the module may ask for, in this order.
            given = [] if lse_at is None else [(4 * math.prod(rows_shape), base + q.itemsize * lse_at)]
            kept = [  # until all has run
                (num_bytes, self._allocate(num_bytes, f"{what} of {problem.name}"))
                for what, num_bytes in _asked_for(build.kernel, sizes, read.arguments({}))
            ]
            given += [(num_bytes, int(allocated)) for num_bytes, allocated in kept]
            function = offer_of(problem).functions[0]
            call = f"{function}()"
            memory = _Memory(call, given)

            def array_of(
                name: str, at: int, strides: tuple[int, ...], shape: tuple[int, ...], dtype: Any
            ) -> Any:
                if layout.is_packed and not (name in "kv" and layout.is_paged):
                    # (1, heads, all rows, columns) as (all rows, heads, columns).
                    shape, strides = (shape[2], shape[1], shape[3]), (strides[2], strides[1], strides[3])
                elif problem.latent:
                    # Heads behind rows.
                    shape, strides = (tuple(x[axis] for axis in (0, 2, 1, 3)) for x in (shape, strides))
                steps = tuple(dtype.itemsize * step for step in strides)
                at = base + q.itemsize * at
                return self._array_kind(shape, dtype, allocator=memory.allocate, gpudata=at, strides=steps)

            dtypes = [q.dtype, k.dtype, v.dtype, output]
            q_, k_, v_, out = (
                array_of(name, *each, dtype) for name, each, dtype in zip("qkvo", placed, dtypes, strict=True)
            )
            beside = {
                name: self._array_kind(
                    array.shape,
                    array.dtype,
                    gpudata=base + q.itemsize * buffers_at[name],
                    strides=array.strides,
                )
                for name, array in told_by_array.items()
            }
            told = {name: beside.pop(name) for name in (*indices, *scales)}
            told |= _lengths_of_call(problem, sizes) | self._keywords({**beside, **read.numbers})
            taken = (q_, k_) if problem.latent else (q_, k_, v_)
            told |= {"causal": problem.causal, "scale": scale, "out": out, "return_lse": want_lse}
            try:
                getattr(self._module, function)(*taken, **told)
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                raise LaunchError(f"{call} refused: {error}") from error
            self._cuda.Context.synchronize()
            self._cuda.memcpy_dtoh(after, base)
        outputs = image.outputs(before, after)
        return outputs[0], outputs[1] if want_lse else None

    def differentiate(
        self,
        build: Build,
        inputs: Mapping[str, np.ndarray],
        *,
        scale: float,
        values: Mapping[str, Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Calls the module's ``gradients()`` or ``gradients_varlen()`` as `Runner.differentiate` says.

        Gradients are allocated by the module, from guarded memory.
        """
        problem, function = build.kernel.problem, offer_of(build.kernel.problem).functions[0]
        call, name = GradientCall(problem, inputs, values), f"{function}()"
        before = call.image.before()
        after = np.empty_like(before)
        with self._launch_errors(build):
            base = self._arena_of(call.image.floats)
            self._cuda.memcpy_htod(base, before)
            kept = [  # until all has run
                (num_bytes, self._allocate(num_bytes, f"{what} of {problem.name}"))
                for what, num_bytes in _asked_for_by_gradients(build.kernel, call.sizes)
            ]
            *plan, workspace = ((num_bytes, int(allocated)) for num_bytes, allocated in kept)
            memory = _Memory(name, call.allocations(base, plan, workspace))
            told = call.arrays(base, self._array_kind, memory.allocate)
            told |= _lengths_of_call(problem, call.sizes)
            told |= self._keywords(call.read(base, self._array_kind))
            if call.of_read:
                keyword_of = {names[0]: keyword for keyword, names in self._tuned.keywords.items()}
                told["wanted"] = [keyword_of[each] for each in call.of_read.values()]
            try:
                found = getattr(self._module, function)(**told, causal=problem.causal, scale=scale)
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                raise LaunchError(f"{name} refused: {error}") from error
            self._cuda.Context.synchronize()
            self._cuda.memcpy_dtoh(after, base)
        if strayed := call.strayed(base, found):
            raise LaunchError(f"{name} returned another array for {strayed} than it allocated")
        return call.gradients(before, after, found)

    @property
    def _tuned(self) -> Any:
        """The entry of the kernel that is called."""
        tables = (getattr(self._module, name, ()) for name in ("KERNELS", "GRADIENTS"))
        return next(each for each in itertools.chain(*tables) if self._kernel in ("", each.name))

    def _keywords(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What `attention()` is told of what masks and changes of scores read."""
        if not values:
            return {}
        return by_keyword(self._tuned.keywords, values)


class _Memory:
    """What a module may ask for memory for, in this order: bytes, and where they are."""

    def __init__(self, call: str, given: list[tuple[int, int]]) -> None:
        self.call = call
        self.given = [each for each in given if each[0]]

    def allocate(self, size: int) -> int:
        """Returns where the bytes lie that are asked for. Raises LaunchError for others than come next."""
        if not size:  # for which PyCUDA asks not at all
            return 0
        if not self.given or size != self.given[0][0]:
            raise LaunchError(f"{self.call} allocated {size} bytes that nothing asked for")
        return self.given.pop(0)[1]


def _asked_for_by_gradients(kernel: Kernel, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What a module asks for memory for beside gradients, in its order, and how many bytes: the workspace
    last, behind them, of which there is always some."""
    if kernel.problem.layout.is_packed:
        yield "the plan", 4 * kernel.num_plan_ints(sizes)
    yield "the workspace", max(4, kernel.workspace_bytes(sizes))


def _asked_for(
    kernel: Kernel, sizes: Mapping[str, int], values: Mapping[str, float]
) -> Iterator[tuple[str, int]]:
    """What a module asks for memory for behind the log-sum-exp, in its order, and how many bytes. ``values``
    has the strides of what masks read."""
    if kernel.has_tile_lists:
        yield "the tile lists", 4 * max(1, kernel.num_list_ints(sizes, values))
    if kernel.problem.layout.is_packed:
        yield "the plan", 4 * kernel.num_plan_ints(sizes)
    if num_bytes := kernel.workspace_bytes(sizes):
        yield "the workspace", num_bytes


def _lengths_of_call(problem: Problem, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a call is told by number of sequences of lengths of their own, and of where their keys lie."""
    layout = problem.layout
    told: dict[str, Any] = {"max_seqlen_q": sizes["seqlen_q"]} if layout.is_packed else {}
    if layout is not DENSE:
        told["max_seqlen_k"] = sizes["seqlen_k"]
    return told | ({"kv_layout": "HND"} if layout.is_paged and not problem.latent else {})
