"""`flashgen.attention` on a card by the runtime of emitted modules: launches are computed in float64."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import flashgen
import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.templates import runtime
from flashgen.tuner.front import again, alike, attend, bound, call

from tests.support.entered import functions_entered
from tests.support.stand_in_driver import PRIMARY, Tensor, host
from tests.templates.scored_kernels import computing
from tests.tuner.front.test_attention import assert_near, expected

D = 64
SHAPE, KEYS = (1, 4, 40, D), (1, 2, 72, D)


def tensors(driver, dtype=np.float16):
    hosts = [host(*shape, seed=i, dtype=dtype) for i, shape in enumerate((SHAPE, KEYS, KEYS))]
    return [Tensor(driver.own(each)) for each in hosts]


def test_a_tensor_runs_on_the_best_kernel_built_and_proved_once(driver, torch, card):
    q, k, v = tensors(driver)
    with computing(driver, Problem(dtype="f16", head_dim=D)) as computed, torch_without_gradients(torch):
        o = flashgen.attention(q, k, v)
        first = len(computed.values)
        again = flashgen.attention(q, k, v)
    assert len(card.made_by.built) == 1
    assert (first, len(computed.values)) == (2, 3), "the proof, and a launch for each call"
    for made in (o, again):
        assert_near(made.host, expected(q.host, k.host, v.host).o, 2e-3)


def test_a_call_like_the_last_enters_two_functions(driver, torch, card):
    arrays = tensors(driver)
    files = [each.__file__ for each in (again, alike, attend, bound, call)]
    files += [each.__file__ for each in (runtime.attention, runtime.plans, runtime.tensors)]
    driver.library.fake_push(PRIMARY)  # as where PyTorch has launched something
    with computing(driver, Problem(dtype="f16", head_dim=D)), torch_without_gradients(torch):
        for _ in range(2):  # the second makes what a stream's launches are told
            flashgen.attention(*arrays)
        # Of memory at an address that was never seen the driver makes another map, the first time only.
        entered = [functions_entered(lambda: flashgen.attention(*arrays), files) for _ in range(9)]
    assert min(entered, key=len) == ["attention", "again"]


def test_another_mask_is_another_binary_of_its_own(driver, torch, card):
    q, k, v = tensors(driver)
    with computing(driver, Problem(dtype="f16", head_dim=D)), torch_without_gradients(torch):
        flashgen.attention(q, k, v)
        o = flashgen.attention(q, k, v, causal=True)
    assert [each.problem.causal for each in card.made_by.built] == [False, True]
    assert_near(o.host, expected(q.host, k.host, v.host, causal=True).o, 2e-3)


def test_what_spills_makes_room_for_the_next(driver, torch, card):
    card.made_by.spills["bc=64"] = 16
    q, k, v = tensors(driver)
    with computing(driver, Problem(dtype="f16", head_dim=D)), torch_without_gradients(torch):
        flashgen.attention(q, k, v)
    spilled = ["bc=64" in each.variant.name for each in card.made_by.built]
    assert spilled == [True] * (len(spilled) - 1) + [False] and len(spilled) > 1


def test_a_kernel_that_is_wrong_is_told_of_and_never_serves(driver, torch, card, capfd):
    q, k, v = tensors(driver)
    driver.library.fake_reset(0, 9, 0, 232448)  # launches compute nothing: what is made stays as it was
    with torch_without_gradients(torch), pytest.raises(RuntimeError, match=r"no kernel for f16_d64.* serves"):
        flashgen.attention(q, k, v)
    assert "is wrong on H200" in capfd.readouterr().err


def test_masks_read_tensors_and_numbers(driver, torch, card):
    q, k, v = tensors(driver)
    sinks = Tensor(driver.own(host(4, seed=5)))
    asked = Scoring(window=(15, 0), sinks=True)
    with computing(driver, Problem(dtype="f16", head_dim=D, scoring=asked)), torch_without_gradients(torch):
        o = flashgen.attention(q, k, v, window=(9, 2), sinks=sinks)
    values = {"window_left": 9, "window_right": 2, "sinks": sinks.host}
    assert_near(o.host, expected(q.host, k.host, v.host, scoring=asked, values=values).o, 2e-3)


@pytest.mark.parametrize("rows", [255, 256])
def test_head_dims_that_eight_does_not_divide_are_filled_up_where_that_pays(
    rows, driver, torch, card, monkeypatch
):
    def pad(x, columns):
        wide = np.pad(x.host, [*[(0, 0)] * 3, columns])
        return Tensor(driver.own(wide))

    monkeypatch.setattr(torch.nn.functional, "pad", pad, raising=False)
    shapes = (1, 4, rows, 61), (1, 2, 256, 61), (1, 2, 256, 59)
    hosts = [host(*shape, seed=i, dtype=np.float16) for i, shape in enumerate(shapes)]
    q, k, v = (Tensor(driver.own(each)) for each in hosts)
    fills = rows == 256
    columns = (64, 64) if fills else (61, 59)
    problem = Problem(dtype="f16", head_dim=columns[0], head_dim_v=columns[1])
    with computing(driver, problem), torch_without_gradients(torch):
        o, lse = flashgen.attention(q, k, v, return_lse=True)
        assert flashgen.explain(q, k, v).problem.head_dim == columns[0]
    assert [each.problem.head_dim for each in card.made_by.built] == [columns[0]]
    wanted = expected(*hosts)
    assert o.shape == (1, 4, rows, 59)
    assert_near(o.host, wanted.o, 2e-3)
    assert np.abs(lse.host - wanted.lse).max() < 1e-3


def test_lists_of_tiles_have_memory_that_all_launches_of_a_call_know(driver, torch, card):
    """What is known of a kind of call before its kernel was chosen says nothing of lists."""
    q, k, v = tensors(driver)
    shown = Tensor(driver.own(host(1, 4, 40, 72, seed=6) > 0.5))
    asked = Scoring(bias="u8")
    problem = Problem(dtype="f16", head_dim=D, scoring=asked)
    with computing(driver, problem) as computed, torch_without_gradients(torch):
        o = flashgen.attention(q, k, v, attn_mask=shown)
    listed, attended = computed.list_addresses[-2:]
    assert listed == attended != 0
    values = {"bias": shown.host.view(np.uint8)}
    assert_near(o.host, expected(q.host, k.host, v.host, scoring=asked, values=values).o, 2e-3)


def test_lists_of_tiles_are_made_once_where_numbers_alone_tell_what_rows_see(driver, torch, card):
    q, k, v = tensors(driver)
    few = [Tensor(driver.own(x.host[:, :, :33])) for x in (q, k, v)]
    shown = Tensor(driver.own(host(1, 4, 40, 72, seed=6) > 0.5))

    def launches(problem, *arrays, **told):
        """So many a call makes, once its kernel is proved."""
        with computing(driver, problem) as computed, torch_without_gradients(torch):
            flashgen.attention(*arrays, **told)
            flashgen.attention(*arrays, **{**told, **({"dilation": 9} if "dilation" in told else {})})
            made = []
            for numbers in ({"dilation": 3}, {"dilation": 3}, {"dilation": 4}, {"dilation": 3}):
                before = len(computed.list_addresses)
                o = flashgen.attention(*arrays, **(numbers if "dilation" in told else told))
                made.append(len(computed.list_addresses) - before)
        return o, made

    dilated = Problem(dtype="f16", head_dim=D, scoring=Scoring(dilation=2))
    o, made = launches(dilated, q, k, v, dilation=2)
    assert made == [2, 1, 2, 1]
    asked = {"scoring": dilated.scoring, "values": {"dilation": 3}}
    assert_near(o.host, expected(q.host, k.host, v.host, **asked).o, 2e-3)
    assert launches(dilated, *few, dilation=2)[1] == [2, 1, 2, 1]
    formula = Problem(dtype="f16", head_dim=D, scoring=Scoring(mask="(q - k) % 4 == 0"))
    assert launches(formula, q, k, v, mask=lambda b, h, q, k: (q - k) % 4 == 0)[1] == [1, 1, 1, 1]
    # What an array says may be another the next time.
    by_array = Problem(dtype="f16", head_dim=D, scoring=Scoring(bias="u8"))
    assert launches(by_array, q, k, v, attn_mask=shown)[1] == [2, 2, 2, 2]


def test_arrays_of_cupy_and_numpy_take_the_same_way(driver, cupy, card):
    q, k, v = (driver.own(each.host) for each in tensors(driver))
    with computing(driver, Problem(dtype="f16", head_dim=D)):
        o, lse = flashgen.attention(q, k, v, return_lse=True)
        found = flashgen.attention(*(cupy.ndarray(x) for x in (q, k, v)), scale=0.2)
    wanted = expected(q, k, v)
    assert_near(o, wanted.o, 2e-3)
    assert np.abs(lse - wanted.lse).max() < 1e-3
    assert_near(found.host, expected(q, k, v, scale=0.2).o, 2e-3)
    assert len(card.made_by.built) == 1


class torch_without_gradients:
    """What torch.no_grad does to the stand-in."""

    def __init__(self, torch) -> None:
        self.torch = torch

    def __enter__(self):
        self.torch.grad = False

    def __exit__(self, *_):
        self.torch.grad = True


def test_a_call_that_does_not_wait_takes_what_is_ready_while_the_best_is_built(driver, torch, card):
    q, k, v = tensors(driver)
    ready = bound.workshop_of(card)
    with computing(driver, Problem(dtype="f16", head_dim=D)), torch_without_gradients(torch):
        flashgen.attention(q, k, v, wait=False)  # nothing is ready: it waits
        first = card.made_by.built[0]
        short = Problem(dtype="f16", head_dim=D, batch=1, num_q_heads=4, num_kv_heads=2, seqlen_q=40)
        short = replace(short, seqlen_k=72)
        ready.ranked(short).reverse()  # as if more were known by now
        bound.forget_choices()
        flashgen.attention(q, k, v, wait=False)
        for thread in threading.enumerate():
            if thread.name.startswith("flashgen"):
                thread.join()
        flashgen.attention(q, k, v, wait=False)
    built = [each.variant for each in card.made_by.built]
    assert built == [first.variant, ready.ranked(short)[0].variant]


def test_pytorch_computes_what_is_not_served_where_that_is_asked_for(driver, torch, card, capfd):
    wide = Tensor(driver.own(host(1, 2, 8, 300, dtype=np.float16)))
    with torch_without_gradients(torch):
        with pytest.raises(ValueError, match=r"q has the head dim 300; served are 1\.\.256"):
            flashgen.attention(wide, wide, wide)
        for _ in range(2):
            library, _, told = flashgen.attention(wide, wide, wide, causal=True, fallback="torch")
    assert (library, told["is_causal"]) == ("torch", True)
    assert capfd.readouterr().err.count("PyTorch computes what no kernel serves: q has the head dim 300") == 1


def test_tensors_of_the_host_are_told_how_to_emulate_a_card(driver, torch, card):
    on_host = SimpleNamespace(type="cpu")
    table = bound.bound_of(None).attending()._table
    with pytest.raises(ValueError, match=r'q is on .* move it with q\.cuda\(\), or pass device="sim:h200"'):
        table.inspect("q", (torch.float16, (1, 2, 8, D), None, on_host), "bhsd", torch)


def test_what_calls_read_of_a_kind_is_there_before_graphs_are_traced():
    kind = bound.outline(bound.bound_of(None).attending(Scoring(window=(15, 0), sinks=True)))
    assert {"named", "keywords", "required", "reads", "numbers", "integers", "exact"} <= kind.__dict__.keys()
