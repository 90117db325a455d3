"""Times `flashgen.attention`, its gradients and `flashgen.attention_varlen` as users call them, over suites
and random problems, beside PyTorch's attention.

    python tests/support/measure_front.py OUT_DIR SECONDS    # on a card, with PyTorch installed
    python tests/support/measure_front.py --dry 40           # with neither: kernels of the first 40 calls

Problems are 200 drawn with a seed, and suites: `call_problems`.
Processes beside build what the calls ask for, so that a call finds it in the cache. OUT_DIR/front.json has a
row for each problem: seconds of the first call, microseconds of the later ones and of each rival, errors
against float64, which kernel it was and why. OUT_DIR/front.txt is what they come to: of each suite the
geometric mean of the fastest rival's time over flashgen's, the least of them, what failed and what is wrong,
and what a call costs the host. A problem that loses the card, by a fault of whoever was at work then, is told
with who that was; a process that takes this one's place goes on with what is left.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashgen.gen.limits import DeviceLimits, preset
from flashgen.gen.problem import Problem
from flashgen.tuner.bench.contenders import CONTENDERS
from flashgen.tuner.bench.differentiated import differentiated
from flashgen.tuner.bench.event_timer import EventTimer
from flashgen.tuner.bench.formulas import formula, visible
from flashgen.tuner.bench.inputs import Inputs
from flashgen.tuner.bench.sample import GradientSample, Sample
from flashgen.tuner.bench.unserved import check_memory, tried
from flashgen.tuner.build.compile import cuda_toolchain, usable_cores
from flashgen.tuner.cards.score_values import by_keyword
from flashgen.tuner.errors import BuildError
from flashgen.tuner.evaluate.measure import median
from flashgen.tuner.front.asked import in_steps
from flashgen.tuner.front.bound import bound_of, outline
from flashgen.tuner.front.card import cuda_card
from flashgen.tuner.front.packed import packed_about
from flashgen.tuner.front.workshop import Chosen, Workshop

# Of a script, Python looks for modules in its own folder.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.call_problems import RANDOM, SUITES, cases
from tests.support.ended_pool import pool_of

#: PyTorch's backends, as `flashgen bench` calls them, and what it has for packed sequences.
BACKENDS, OF_PACKED = ("cudnn", "flash", "mem-eff", "math"), ("torch-varlen", "nested")
#: Rivals that take so many times as long as the fastest once are not timed in turns.
SLOW = 2.5
BUDGET_MS = 60.0
UNFUSED_BYTES_PER_PAIR = 16
#: What rounding alone may add to twice the least of the rivals' errors.
ROUNDING = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 1e-6}
LEAST_BOUND = 2e-6
#: An error beyond which a rival computes something else.
UNSOUND = 0.05
#: Seconds before the end by which nothing new is begun: calls are still to be timed on the host.
RESERVE_S = 15.0
SAVED_EVERY_S = 10.0
KEPT_BYTES = 50e9
#: The word by which a process goes on where one before it lost the card.
GO_ON = "--go-on"
#: In a failed row: whose call it was, `flashgen` or a rival.
AT_WORK = "at_work"


# -- built, in processes of their own --------------------------------------------------------------------


def asked_for(problem: Problem) -> list[Problem]:
    """Returns the problems that a call looks for kernels of: of gradients, attention is computed first."""
    p = replace(problem, scoring=in_steps(problem.scoring))
    if p.layout.is_packed:
        rows, keys = max(p.lengths.q), max(p.lengths.k)
        return [packed_about(replace(p, varlen="", seqlen_q=rows, seqlen_k=keys), p.total_q, p.total_k)]
    return [replace(p, backward=False), p] if p.backward else [p]


def fitting(workshop: Workshop, p: Problem) -> Iterator[Chosen]:
    """Yields the kernels that a problem is served by where arrays are contiguous, the best first."""
    strides: list[int] = []
    for heads, rows, d in (
        (p.num_q_heads, p.seqlen_q, p.head_dim),
        (p.num_kv_heads, p.seqlen_k, p.head_dim),
        (p.num_kv_heads, p.seqlen_k, p.head_dim_v),
        (p.num_q_heads, p.seqlen_q, p.head_dim_v),
    ):
        strides += [heads * rows * d, rows * d, d]
    return workshop.fitting(p, lambda chosen: chosen.entry.can_step(strides))


def workshop_of(limits: DeviceLimits) -> Workshop:
    """Returns what chooses kernels for a card of those limits, and needs no card."""
    return Workshop(SimpleNamespace(predicted=False, limits=limits))  # type: ignore[arg-type]


_WORKSHOP: Workshop


def begin(limits: DeviceLimits) -> None:
    """The first thing that a process does."""
    global _WORKSHOP

    # The process that calls comes first.
    os.nice(10)
    _WORKSHOP = workshop_of(limits)


def build(problem: Problem) -> list[dict[str, Any]]:
    """Builds what a call would, and says what that was."""
    return [made for each in asked_for(problem) for made in built(each)]


def built(problem: Problem) -> list[dict[str, Any]]:
    """Builds the kernels for a problem up to the first that does not spill."""
    made: list[dict[str, Any]] = []
    for chosen in fitting(_WORKSHOP, problem):
        told = {"variant": chosen.candidate.variant.name}
        try:
            found = cuda_toolchain(_WORKSHOP.card.limits.arch).build(chosen.kernel)
        except BuildError as error:
            made.append({**told, "error": str(error)[:200]})
            continue
        made.append(
            {**told, "spill": found.spill_bytes, "s": round(found.seconds, 1), "cached": found.cached}
        )
        if not found.spill_bytes:
            break
    return made


# -- called ----------------------------------------------------------------------------------------------


def options_of(inputs: Inputs) -> dict[str, Any]:
    """What a call of `flashgen.attention` is told beside q, k and v."""
    scoring = inputs.problem.scoring
    told: dict[str, Any] = {"causal": inputs.problem.causal}
    if scoring.is_plain:
        return told
    kind = outline(bound_of(None).attending(in_steps(scoring)))
    told |= by_keyword(kind.keywords, {**inputs.values, **inputs.arrays})
    told |= {name: getattr(scoring, name) for name in ("mask", "score") if getattr(scoring, name)}
    if scoring.bias == "u8":
        told["bias"] = told["bias"].view(inputs.torch.bool)
    return told


def our_call(inputs: Inputs, told: dict[str, Any]) -> Callable[[], Any]:
    """Returns the call that a user would make of the inputs: of gradients, of the backward pass alone."""
    import flashgen

    p = inputs.problem
    if p.layout.is_packed:
        starts = [inputs.indices[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        longest = {"max_seqlen_q": max(p.lengths.q), "max_seqlen_k": max(p.lengths.k)}
        return lambda: flashgen.attention_varlen(inputs.q, inputs.k, inputs.v, *starts, **longest, **told)

    def attention(inputs: Inputs) -> Callable[[], Any]:
        return lambda: flashgen.attention(inputs.q, inputs.k, inputs.v, **told)

    def trained(inputs: Inputs) -> Callable[[], Any]:
        call = attention(inputs)
        call()  # later ones of its kind, as training makes, reach autograd by a shorter way
        return call

    return differentiated(trained, inputs, rows_first=False) if p.backward else attention(inputs)


def explained(inputs: Inputs, told: dict[str, Any]) -> dict[str, Any]:
    """Says what serves a call, where there is one word for it; else the rows of what was built do."""
    import flashgen

    if inputs.problem.layout.is_packed or inputs.problem.backward:
        return {}
    served = flashgen.explain(inputs.q, inputs.k, inputs.v, **told)
    return {name: getattr(served, name) for name in ("kernel", "family", "predicted_us", "tuned_for", "why")}


def rivals(inputs: Inputs) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Returns what makes the rivals' calls, by name: PyTorch's backends, as they are and with keys repeated
    for each query head, the causal mask that ends at the last key, and attention by hand where scores are
    changed otherwise than by a sum. Of packed sequences, what PyTorch has for them."""
    p = inputs.problem
    if p.layout.is_packed:
        known = [name for name in OF_PACKED if CONTENDERS[name].may_serve(p)]
        return {name: lambda name=name: CONTENDERS[name].call(inputs) for name in known}
    if p.seqlen_q == 1:
        # The last row sees all keys, whatever PyTorch's mask would be.
        inputs = replace(inputs, problem=replace(p, causal=False))
    alone = replace(p, num_kv_heads=p.num_q_heads, causal=inputs.problem.causal)
    found: dict[str, Callable[[], Callable[[], Any]]] = {}
    for name in BACKENDS:
        if CONTENDERS[name].may_serve(p):
            found[name] = lambda name=name: CONTENDERS[name].call(inputs)
    k, v = (x.repeat_interleave(p.group, 1) if inputs.grouped else x for x in (inputs.k, inputs.v))
    wide = replace(inputs, problem=alone, k=k, v=v)
    if inputs.grouped:
        found["mem-eff, expanded"] = lambda: CONTENDERS["mem-eff"].call(wide)
    if p.backward:
        return found
    if alone.causal and alone.scoring.is_plain and p.seqlen_q < p.seqlen_k:
        found["lower-right"] = lambda: _lower_right(wide)
    if p.scoring.softcap or p.scores.sinks:
        found["by hand"] = lambda: _by_hand(wide)
    return found


def _lower_right(inputs: Inputs) -> Callable[[], Any]:
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(inputs.problem.seqlen_q, inputs.problem.seqlen_k)
    attend = inputs.torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(inputs.q, inputs.k, inputs.v, attn_mask=mask)


def _by_hand(inputs: Inputs) -> Callable[[], Any]:
    """Unfused, of soft caps and sinks."""
    torch, p = inputs.torch, inputs.problem
    check_memory(torch, UNFUSED_BYTES_PER_PAIR * p.batch * p.num_q_heads * p.seqlen_q * p.seqlen_k)
    sees, hidden = visible(p), None
    if sees is not None:
        b, h, q, k = (
            torch.arange(n, device="cuda").reshape([-1 if axis == i else 1 for axis in range(4)])
            for i, n in enumerate((p.batch, p.num_q_heads, p.seqlen_q, p.seqlen_k))
        )
        hidden = ~formula(torch, sees, inputs.arrays)({"b": b, "h": h, "q": q, "k": k})

    def call() -> Any:
        scores = inputs.q @ inputs.k.transpose(2, 3) * p.head_dim**-0.5
        if p.scoring.softcap:
            scores = p.scoring.softcap * (scores / p.scoring.softcap).tanh()
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if p.scores.sinks:
            sinks = inputs.arrays["sinks"][None, :, None, None].to(scores.dtype)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], 3)
        weights = scores.softmax(3, dtype=torch.float32).to(inputs.v.dtype)
        return weights[..., : p.seqlen_k] @ inputs.v

    return call


def measured(torch: Any, timer: EventTimer, problem: Problem, at_work: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a problem. Raises whatever the call does; ``at_work`` then says whose it was."""
    at_work[AT_WORK] = "inputs"
    torch.manual_seed(0)
    inputs = Inputs.draw(torch, problem)
    told = options_of(inputs)
    # It draws the gradients that are given as well, behind a forward pass of its own: no part of a call.
    sample = GradientSample(inputs) if problem.backward else Sample(inputs, problem)
    torch.cuda.synchronize()
    at_work[AT_WORK] = "flashgen"
    began = time.perf_counter()
    ours = our_call(inputs, told)
    made = ours()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"first_s": round(time.perf_counter() - began, 3), **explained(inputs, told)}
    error = sample.error(made)
    calls, errors, once_ms, refused = {"ours": ours}, {}, {}, {}
    for name, make in rivals(inputs).items():
        at_work[AT_WORK] = name
        call, found, reason = tried(make)
        if call is None:
            refused[name] = reason
        else:
            calls[name], errors[name], once_ms[name] = call, sample.error(found), timer.once(call)
    fastest = min(once_ms.values(), default=math.inf)
    slow = {name: ms for name, ms in once_ms.items() if ms > SLOW * fastest}
    at_work[AT_WORK] = "all in turns"
    times = timer.in_turns({name: call for name, call in calls.items() if name not in slow}, BUDGET_MS)
    us = {name: round(1e3 * median(each), 2) for name, each in times.items()}
    row |= {"us": us.pop("ours"), "rivals": us, "slow_rivals_ms": slow, "refused": refused}
    return row | judged(problem, error, errors) | compared(row["us"], us)


def card_is_lost(torch: Any) -> bool:
    """Tells whether a fault has taken the card from this process: then every call of the driver fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def judged(problem: Problem, error: float, errors: dict[str, float]) -> dict[str, Any]:
    """The error beside the rivals', and whether it is wrong: over twice the least of theirs, and some."""
    sound = [each for each in errors.values() if each < UNSOUND]
    bound = 2 * min(sound) + ROUNDING[problem.dtype] if sound else problem.tolerance
    bound = max(bound, LEAST_BOUND)
    row = {"error": error, "rival_errors": errors, "bound": bound}
    return row if error <= bound else row | {"wrong": f"error {error:.2e}, {bound:.2e} allowed"}


def compared(us: float, rivals_us: dict[str, float]) -> dict[str, Any]:
    """The fastest rival, and its time over ours; nothing where there is none."""
    if not rivals_us:
        return {}
    best = min(rivals_us, key=lambda name: rivals_us[name])
    return {"best": best, "ratio": rivals_us[best] / us}


def host_costs(torch: Any, count: int = 1000, rounds: int = 5) -> dict[str, float]:
    """Microseconds of the host for a warm call of a tiny problem, by kind of call."""
    import flashgen

    q, k, v = (torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, sinks, derived = torch.empty_like(q), torch.zeros(4, device="cuda"), q.clone().requires_grad_()
    calls = {
        "plain": lambda: flashgen.attention(q, k, v),
        "causal": lambda: flashgen.attention(q, k, v, causal=True),
        "out=": lambda: flashgen.attention(q, k, v, out=out),
        "return_lse": lambda: flashgen.attention(q, k, v, return_lse=True),
        "window": lambda: flashgen.attention(q, k, v, window=(31, 0)),
        "softcap": lambda: flashgen.attention(q, k, v, softcap=20.0),
        "sinks": lambda: flashgen.attention(q, k, v, sinks=sinks),
        "gradients": lambda: flashgen.attention(derived, k, v),
        "PyTorch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    found = {}
    for name, call in calls.items():
        seconds = []
        for _ in range(1 + rounds):  # the first warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                call()
            seconds.append(time.perf_counter() - began)
        found[name] = round(1e6 * min(seconds[1:]) / count, 2)
    return found


# -- told ------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]], host: dict[str, float]) -> str:
    """Returns what the rows come to, in lines."""
    lines = []
    for suite in (RANDOM, *SUITES):
        of = [row for row in rows if row["suite"] == suite]
        if not of:
            continue
        means = []
        for kind in ("16-bit", "f32"):
            ratios = [r["ratio"] for r in of if "ratio" in r and (r["dtype"] == "f32") == (kind == "f32")]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                means.append(f"{kind} {mean:.2f} ({len(ratios)})")
        counts = [f"{name} {sum(name in row for row in of)}" for name in ("failed", "wrong")]
        alone = sum("ratio" not in row and "failed" not in row for row in of)
        lines.append(", ".join([f"{suite}: {len(of)}", *means, *counts, f"without a rival {alone}"]))
        least = sorted((row for row in of if "ratio" in row), key=lambda row: row["ratio"])[:3]
        lines.append("    least: " + "; ".join(f"{r['ratio']:.2f} {r['name']} ({r['best']})" for r in least))
    lines += [
        f"{key}: {row['name']}: {f'({row[AT_WORK]}) ' if AT_WORK in row else ''}{row[key]}"
        for row in rows
        for key in ("failed", "wrong")
        if key in row
    ]
    if first := sorted(row["first_s"] for row in rows if "first_s" in row):
        lines.append(f"first calls: median {first[len(first) // 2]:.2f} s, most {first[-1]:.2f} s")
    return "\n".join([*lines, "host, us per warm call: " + json.dumps(host)])


def run(torch: Any, out: Path, seconds: float, rows: list[dict[str, Any]]) -> bool:
    """Measures what is not among the rows, as far as there is time; returns whether the card was lost."""
    limits, began = cuda_card(0).limits, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    told = {row["name"] for row in rows}
    left = [case for case in cases() if case.name not in told]
    is_lost = False
    host: dict[str, float] = {}
    about = {"limits": limits.to_dict(), "torch": torch.__version__, "cuda": torch.version.cuda}

    def save() -> None:
        text = json.dumps({**about, "seconds": time.monotonic() - began, "host_us": host, "rows": rows})
        (out / "front.json").write_text(text, encoding="utf-8")

    saved, timer = began, EventTimer(torch)
    with pool_of(max(1, usable_cores() - 1), begin, limits) as pool:
        asked = {pool.submit(build, case.problem): case for case in left}
        try:
            for future in as_completed(asked, timeout=max(0.0, seconds - RESERVE_S)):
                case = asked[future]
                row = {"suite": case.suite, "name": case.name, "dtype": case.problem.dtype}
                row |= {"problem": case.problem.to_dict()}
                unbuilt = future.exception()  # the call says what is wrong
                row["built"] = [{"error": repr(unbuilt)[:200]}] if unbuilt else future.result()
                at_work: dict[str, Any] = {}
                try:
                    row |= measured(torch, timer, case.problem, at_work)
                except Exception as error:
                    row |= at_work | {"failed": f"{type(error).__name__}: {error}"[:600]}
                rows.append(row)
                if is_lost := "failed" in row and card_is_lost(torch):
                    print(f"{case.name}: {at_work} lost the card", flush=True)
                    break
                if torch.cuda.memory_reserved() > KEPT_BYTES:
                    torch.cuda.empty_cache()
                if time.monotonic() - saved > SAVED_EVERY_S:
                    save()
                    saved = time.monotonic()
                    print(f"{saved - began:.0f} s: {len(rows)} of {len(asked)}", flush=True)
        except TimeoutError:
            print(f"out of time after {len(rows)} of {len(asked)}", flush=True)
        finally:
            save()
    if is_lost:
        return True
    host |= host_costs(torch)
    save()
    text = summary(rows, host)
    (out / "front.txt").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return False


def dry(count: int) -> None:
    """Says which kernels the first calls would take on an H200."""
    # As the driver tells of the card, as far as choices ask.
    workshop = workshop_of(replace(preset("h200"), name="NVIDIA H200", dram_gbps=4917))
    kernels: set[str] = set()
    for case in cases()[:count]:
        for problem in asked_for(case.problem):
            chosen = next(fitting(workshop, problem))
            kernels.add(chosen.kernel.digest)
            record = chosen.candidate.record
            tuned = f"tuned as {record.kernel.problem.name}" if record else "untuned"
            print(f"{case.name}: {chosen.candidate.variant.name}, {tuned}", flush=True)
    print(f"{len(kernels)} different kernels for {count} problems")


def main(words: Sequence[str]) -> None:
    began, goes_on = time.monotonic(), words[2:] == [GO_ON]
    if len(words) != 2 + goes_on:
        sys.exit(__doc__)
    if words[0] == "--dry":
        dry(int(words[1]))
        return
    import torch

    out, seconds = Path(words[0]), float(words[1])
    rows = json.loads((out / "front.json").read_text(encoding="utf-8"))["rows"] if goes_on else []
    with torch.no_grad():
        is_lost = run(torch, out, seconds, rows)
    if is_lost:
        sys.stdout.flush()
        left = f"{seconds - (time.monotonic() - began):.1f}"
        os.execv(sys.executable, [sys.executable, __file__, words[0], left, GO_ON])


if __name__ == "__main__":
    main(sys.argv[1:])
