"""A card whose kernels are called through an emitted module's ``attention()``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...gen.limits import DeviceLimits
from ..cards.cuda import CudaDevice, CudaRunner
from ..cards.device import Build, Toolchain
from ..cards.dtypes import numpy_dtype, require_inputs
from ..cards.guarded_memory import FLOAT32, GuardedImage, contiguous_strides, output_strides
from ..cards.score_values import by_keyword, score_values, sizes_of
from ..errors import FlashgenError, LaunchError


@dataclass(frozen=True)
class ModuleDevice:
    """A card whose kernels are run by an emitted module's ``attention()``."""

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
    """Calls an emitted module on PyCUDA arrays that lie in guarded memory."""

    def __init__(self, card: CudaDevice, path: Path, kernel: str = "") -> None:
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
        """Calls the module's ``attention()`` as `Runner.attend` says.

        The log-sum-exp is allocated by the module, from guarded memory too.
        """
        from pycuda.gpuarray import GPUArray  # pyright: ignore[reportMissingImports]

        if build.kernel.problem.layout.is_packed:
            raise LaunchError(
                f"modules of packed sequences, as of {build.kernel.problem.name}, check themselves when they "
                "are run; prove the .cu here"
            )
        require_inputs(build.kernel.problem, q, k, v)
        problem = replace(
            build.kernel.problem,
            **dict(zip(("batch", "num_q_heads", "seqlen_q"), q.shape, strict=False)),
            **dict(zip(("num_kv_heads", "seqlen_k"), k.shape[1:3], strict=True)),
        )
        read = score_values(problem.scores, values, sizes_of(problem))
        image = GuardedImage(q.dtype)
        placed = [(*image.add_input(x), x.shape) for x in (q, k, v)]
        o_shape = (*q.shape[:3], v.shape[3])
        output = numpy_dtype(build.kernel.problem.output_dtype)
        placed.append((*image.add_output("o", o_shape, output_strides(q, v.shape[3]), output), o_shape))
        rows = q.shape[:3]
        lse_at = None
        if want_lse:
            lse_at, _ = image.add_output("the log-sum-exp", rows, contiguous_strides(rows), FLOAT32)
        buffers_at = {name: image.add_buffer(array) for name, array in read.arrays.items()}
        before = image.before()
        after = np.empty_like(before)
        with self._launch_errors(build):
            base = self._arena_of(image.floats)
            self._cuda.memcpy_htod(base, before)
            # What the module may ask for, in this order.
            memory = [] if lse_at is None else [(4 * rows[0] * rows[1] * rows[2], base + q.itemsize * lse_at)]
            if build.kernel.has_tile_lists:
                num_bytes = 4 * max(1, build.kernel.num_list_ints(sizes_of(problem)))
                lists = self._allocate(num_bytes, f"the lists of tiles of {problem.name}")
                memory.append((num_bytes, int(lists)))

            def allocate(size: int) -> int:
                if not memory or size != memory[0][0]:
                    raise LaunchError(f"attention() allocated {size} bytes that nothing asked for")
                return memory.pop(0)[1]

            arrays = [
                GPUArray(
                    shape,
                    dtype,
                    allocator=allocate,
                    gpudata=base + q.itemsize * at,
                    strides=tuple(dtype.itemsize * s for s in strides),
                )
                for (at, strides, shape), dtype in zip(placed, [q.dtype] * 3 + [output], strict=True)
            ]
            buffers = {
                name: GPUArray(
                    array.shape,
                    array.dtype,
                    gpudata=base + q.itemsize * buffers_at[name],
                    strides=array.strides,
                )
                for name, array in read.arrays.items()
            }
            beside = self._keywords({**buffers, **read.numbers})
            causal = build.kernel.problem.causal
            try:
                self._module.attention(
                    *arrays[:3], causal=causal, scale=scale, out=arrays[3], return_lse=want_lse, **beside
                )
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                raise LaunchError(f"attention() refused: {error}") from error
            self._cuda.Context.synchronize()
            self._cuda.memcpy_dtoh(after, base)
        outputs = image.outputs(before, after)
        return outputs[0], outputs[1] if want_lse else None

    def _keywords(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What `attention()` is told of what masks and changes of scores read."""
        if not values:
            return {}
        tuned = next(each for each in self._module.KERNELS if self._kernel in ("", each.name))
        return by_keyword(tuned.keywords, values)
