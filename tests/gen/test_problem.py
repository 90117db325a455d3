from itertools import product

import numpy as np
import pytest
from flashgen.gen.problem import Problem


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), list(product((1, 3, 8), (1, 3, 8))))
@pytest.mark.parametrize("causal", [False, True])
def test_attended_pairs_are_those_of_the_mask(seqlen_q, seqlen_k, causal):
    problem = Problem(
        batch=2, num_q_heads=6, num_kv_heads=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal
    )
    mask = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if causal:
        mask = np.tril(mask, seqlen_k - seqlen_q)
    assert problem.num_attended == 12 * mask.sum()


def test_work_of_a_known_shape():
    problem = Problem(batch=500, num_q_heads=1, num_kv_heads=1, seqlen_q=2048, seqlen_k=2048, head_dim=64)
    assert problem.flops == 4 * 500 * 2048 * 2048 * 64
    assert problem.min_bytes == 4 * 500 * 2048 * 64 * 4


def test_work_of_16_bits_and_narrow_values():
    shape = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 10, "seqlen_k": 30, "head_dim": 64}
    problem = Problem(dtype="bf16", head_dim_v=16, **shape)
    assert problem.flops == 2 * 2 * 4 * 10 * 30 * (64 + 16)
    q, k, v, o = 4 * 10 * 64, 2 * 30 * 64, 2 * 30 * 16, 4 * 10 * 16
    assert problem.min_bytes == 2 * 2 * (q + k + v + o)
    assert Problem(**shape).head_dim_v == 64


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({}, 2e-6),
        ({"precision": "ieee"}, 2e-6),
        ({"precision": "3xtf32"}, 2e-6),
        ({"precision": "3xf16"}, 2e-6),
        ({"precision": "tf32"}, 1e-3),
        ({"dtype": "f16"}, 2e-3),
        ({"dtype": "bf16"}, 1e-2),
    ],
)
def test_tolerance_is_of_the_class(fields, tolerance):
    assert Problem(**fields).tolerance == tolerance


def test_grouped_heads_share_bytes():
    shared = Problem(num_q_heads=16, num_kv_heads=4)
    assert shared.flops == Problem().flops
    assert shared.min_bytes < Problem().min_bytes


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "f32_d64"),
        ({"head_dim": 128, "causal": True}, "f32_d128_causal"),
        ({"batch": 8, "num_q_heads": 12, "num_kv_heads": 12}, "f32_d64_b8_h12"),
        ({"num_kv_heads": 4}, "f32_d64_h16_kv4"),
        ({"seqlen_q": 1000, "seqlen_k": 777}, "f32_d64_n1000_m777"),
        ({"seqlen_q": 197, "seqlen_k": 197}, "f32_d64_n197"),
        ({"dtype": "f16"}, "f16_d64"),
        ({"precision": "tf32", "causal": True}, "f32_tf32_d64_causal"),
        ({"dtype": "bf16", "head_dim": 192, "head_dim_v": 128}, "bf16_d192v128"),
    ],
)
def test_name_is_an_identifier_that_tells_what_differs(fields, name):
    assert Problem(**fields).name == name
    assert name.isidentifier()


def test_round_trip():
    problem = Problem(head_dim=80, causal=True, seqlen_k=100)
    assert Problem.from_dict(problem.to_dict()) == problem


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "f64"}, "'f64'"),
        ({"dtype": "f16", "precision": "tf32"}, "'tf32' is not served for f16; choose one of auto"),
        ({"head_dim_v": 300}, "head_dim_v is 300"),
        ({"head_dim": 0}, "1..256"),
        ({"head_dim": 257}, "257"),
        ({"batch": 0}, "batch is 0"),
        ({"seqlen_k": 0}, "seqlen_k is 0"),
        ({"num_q_heads": 6, "num_kv_heads": 4}, "6 is not a multiple of num_kv_heads 4"),
    ],
)
def test_what_is_out_of_range_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        Problem(**fields)
