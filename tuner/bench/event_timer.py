"""Times of calls on torch's current stream by CUDA events, the L2 flushed before each, taken in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

#: Bytes written to flush L2, in L2s.
FLUSH_FACTOR = 4
#: The card idles this long after the flush, so that the host has enqueued the call before it starts: times
#: are the card's alone, however long the caller takes. Libraries called from Python take up to a third of it;
#: where a host is slower, the card idles so many times as long as a caller took when it warmed up, at most
#: this long.
IDLE_MS, IDLE_CALLS, MOST_IDLE_MS = 0.5, 2.0, 10.0
#: What a card runs at whose clock torch does not tell, in kHz.
USUAL_CLOCK_KHZ = 2_000_000
WARM_UP_CALLS = 2
MIN_ROUNDS, MAX_ROUNDS = 5, 40
#: Rounds of calls that take this long together may be fewer.
LONG_ROUND_MS, LEAST_ROUNDS = 400.0, 3


class EventTimer:
    """Times calls on torch's current device; ``torch`` is the module."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        l2_bytes = getattr(properties, "L2_cache_size", 0) or 64 * 2**20
        self._flush = torch.empty(FLUSH_FACTOR * l2_bytes, dtype=torch.int8, device="cuda")
        # Not promised for ever; without it short calls carry some of the host's time.
        self._idle: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)
        self._clock_khz = getattr(properties, "clock_rate", 0) or USUAL_CLOCK_KHZ

    def once(
        self,
        call: Callable[[], Any],
        meanwhile: Callable[[], None] | None = None,
        idle_ms: float = IDLE_MS,
    ) -> float:
        """Times one call, in milliseconds, with L2 flushed before it and the card idle for ``idle_ms``.
        ``meanwhile`` is called once the card is at work on it."""
        return self._both(call, meanwhile, idle_ms)[0]

    def _both(
        self, call: Callable[[], Any], meanwhile: Callable[[], None] | None, idle_ms: float
    ) -> tuple[float, float]:
        """Returns the card's milliseconds, and those that the caller took to enqueue the call."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        if self._idle is not None:
            self._idle(int(idle_ms * self._clock_khz))
        start.record()
        began = time.perf_counter()
        call()
        caller_ms = 1e3 * (time.perf_counter() - began)
        end.record()
        if meanwhile is not None:
            # Not while it idles, when its clock is another.
            start.synchronize()
            meanwhile()
        end.synchronize()
        return start.elapsed_time(end), caller_ms

    def in_turns(
        self,
        calls: Mapping[str, Callable[[], Any]],
        budget_ms: float,
        watch: Callable[[str], None] | None = None,
    ) -> dict[str, tuple[float, ...]]:
        """Times every call, in milliseconds, in each of as many rounds as fit the budget. ``watch`` is told
        whose call it is while the card is at work on it, warming up apart.

        Who follows whom changes from round to round: a call that leaves the card hot or its clock low is
        followed by each of the others.
        """
        first_ms, idle_ms = 0.0, dict.fromkeys(calls, MOST_IDLE_MS)
        for _ in range(WARM_UP_CALLS):
            first_ms = 0.0
            for name, call in calls.items():
                card_ms, caller_ms = self._both(call, None, IDLE_MS)
                first_ms += card_ms
                idle_ms[name] = min(idle_ms[name], max(IDLE_MS, IDLE_CALLS * caller_ms))
        least = LEAST_ROUNDS if first_ms > LONG_ROUND_MS else MIN_ROUNDS
        rounds = min(MAX_ROUNDS, max(least, int(budget_ms / max(first_ms, 1e-3))))
        names = list(calls)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            first = number % len(names)
            order = names[first:] + names[:first]
            for name in order if number // len(names) % 2 == 0 else reversed(order):
                meanwhile = None if watch is None else partial(watch, name)
                times[name].append(self.once(calls[name], meanwhile, idle_ms[name]))
        return {name: tuple(values) for name, values in times.items()}
