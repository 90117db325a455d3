"""What a module does when it is run: it checks and times its kernels."""

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import _Buffer
from .attention import Attention
from .driver import _check, _driver, _pop_context, _push_context
from .facts import Tuned


def run_module(attention: Attention, doc: str | None) -> int:
    """Says what the module is, checks and times its kernels on device 0; the exit code."""
    print((doc or "").partition("\n    from")[0])
    name = ctypes.create_string_buffer(256)
    try:
        _check(_driver().cuDeviceGetName(name, len(name), 0), "asking for device 0")
    except RuntimeError as reason:
        print(f"Not run here: {reason}")
        return 0
    failed = False
    print(f"Here, on {name.value.decode()}, with a warm cache:")
    for tuned in attention._table.kernels:
        try:
            attention.use(tuned.name)
            error, median_us = _self_check(attention, tuned), _time_us(attention, tuned)
        except (ImportError, RuntimeError) as reason:
            print(f"{tuned.name}: failed: {reason}")
            failed = True
            continue
        finally:
            attention.use(None)
        failed = failed or not error <= tuned.tolerance
        extents = ("batch", "num_q_heads", "seqlen_q", "seqlen_k")
        pairs = math.prod(tuned.problem[extent] for extent in extents)
        flops = 2 * (tuned.head_dim + tuned.head_dim_v) * pairs / (2 if tuned.problem["causal"] else 1)
        verdict = "correct" if error <= tuned.tolerance else "WRONG"
        print(
            f"{tuned.name}: {median_us:.1f} us, {flops / median_us / 1e6:.1f} TFLOP/s, error against float64 "
            f"{error:.2e}, {tuned.tolerance:.0e} allowed: {verdict}"
        )
    return 1 if failed else 0


def _reference(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], causal: bool) -> NDArray[Any]:
    """float64 attention of (batch, heads, seqlen, head_dim) arrays."""
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    if causal:
        visible = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    result: NDArray[Any] = weights / weights.sum(axis=3, keepdims=True) @ v
    return result


def _to_host(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float32 as that type; as its bits where numpy has none such."""
    if dtype == "float8_e4m3fn":  # the nearest below
        values = _values_of_eight_bits()
        order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")[:254]
        below = np.searchsorted(values[order], x, side="right") - 1
        return np.asarray(order[below], np.uint8)
    return _to_bits(x) if dtype == "bfloat16" else x.astype(dtype)


def _from_host(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "float8_e4m3fn":
        return np.asarray(_values_of_eight_bits()[x])
    return _from_bits(x) if dtype == "bfloat16" else x


def _values_of_eight_bits() -> NDArray[Any]:
    """What the 256 patterns of float8_e4m3fn stand for: four bits of exponent, biased by 7, and three of
    fraction."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size))


def _to_bits(x: NDArray[Any]) -> NDArray[Any]:
    """float32 rounded to bfloat16, whose bits are the upper half of float32's; numpy has no such type."""
    bits = x.view(np.uint32)
    rounded: NDArray[Any] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype(np.uint16)


def _from_bits(bits: NDArray[Any]) -> NDArray[Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _self_check(attention: Attention, tuned: Tuned) -> float:
    """The largest per-head error over both masks, with lengths that no tile divides."""
    random = np.random.default_rng(0)
    shapes = [(2, 4, 197, tuned.head_dim), (2, 2, 333, tuned.head_dim), (2, 2, 333, tuned.head_dim_v)]
    hosts = [_to_host(random.uniform(-3, 3, shape).astype(np.float32), tuned.dtype) for shape in shapes]
    q, k, v = (_from_host(host, tuned.dtype) for host in hosts)
    made = _to_host(np.zeros((2, 4, 197, tuned.head_dim_v), np.float32), tuned.output_dtype)
    worst = 0.0
    for causal in (False, True):
        reference = _reference(q, k, v, causal)
        attention._through_buffers(
            hosts[0],
            hosts[1],
            hosts[2],
            causal,
            None,
            made,
            0,
            False,
            "bhsd",
            tuned.dtype,
            attention._usual_beside,
        )
        difference = np.linalg.norm(_from_host(made, tuned.output_dtype) - reference, axis=(2, 3))
        # NaN is an error too, which max() would pass over.
        worst = float(np.maximum(worst, (difference / np.linalg.norm(reference, axis=(2, 3))).max()))
    return worst


def _time_us(attention: Attention, tuned: Tuned, repeats: int = 20) -> float:
    """The median time of a call on the tuned problem's shape, by CUDA events, with a warm cache."""
    driver, problem = _driver(), tuned.problem
    q_shape = (problem["batch"], problem["num_q_heads"], problem["seqlen_q"], tuned.head_dim)
    k_shape = (problem["batch"], problem["num_kv_heads"], problem["seqlen_k"], tuned.head_dim)
    shapes = (q_shape, k_shape, (*k_shape[:3], tuned.head_dim_v), (*q_shape[:3], tuned.head_dim_v))
    random = np.random.default_rng(0)
    pushed = _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []
    events = [ctypes.c_void_p(), ctypes.c_void_p()]
    try:
        for shape, dtype in zip(shapes, [tuned.dtype] * 3 + [tuned.output_dtype], strict=True):
            host = _to_host(random.standard_normal(shape, dtype=np.float32), dtype)
            buffers.append(_Buffer(shape, host.dtype, dtype))
            buffers[-1].write(host, 0)
            _check(driver.cuStreamSynchronize(None), "copying to the GPU")
        query, key, value, output = buffers
        for event in events:
            _check(driver.cuEventCreate(ctypes.byref(event), 0), "creating an event")
        times = []
        for _ in range(repeats + 3):
            driver.cuEventRecord(events[0], None)
            attention.attention(query, key, value, problem["causal"], out=output)
            driver.cuEventRecord(events[1], None)
            _check(driver.cuEventSynchronize(events[1]), "running the kernel")
            milliseconds = ctypes.c_float()
            driver.cuEventElapsedTime(ctypes.byref(milliseconds), *events)
            times.append(1000 * milliseconds.value)
        return sorted(times[3:])[repeats // 2]
    finally:
        for event in events:
            if event.value is not None:
                driver.cuEventDestroy_v2(event)
        for buffer in buffers:
            buffer.free()
        if pushed:
            _pop_context()
