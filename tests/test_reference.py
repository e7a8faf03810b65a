"""The reference against naive numpy: loops over tokens, dispatch order from its definition."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import generators
from jax_megamoe import quantize, reference, weights
from jax_megamoe.config import MegaMoEConfig, swiglu
from jax_megamoe.errors import MegaMoEError

RANKS, TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 2, 13, 8, 3, 256, 128
BLOCK_M = 8
CONFIG = MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTER, TOKENS, activation=swiglu(limit=1.0))
BF16_UNIT = 2.0**-8  # largest relative error of one rounding to BF16
FP32_UNIT = 2.0**-24

# Jitted: eagerly, every operation of every stage would be compiled on its own.
STAGE_INPUT = jax.jit(reference.stage_input, static_argnames="group")
DEQUANTIZE = jax.jit(quantize.dequantize_e4m3)
DISPATCH = jax.jit(reference.dispatch, static_argnames=("config", "block_m", "max_pool_rows"))
LINEAR1, LINEAR2 = jax.jit(reference.linear1), jax.jit(reference.linear2)
SWIGLU = jax.jit(reference.swiglu, static_argnames="activation")
COMBINE = jax.jit(reference.combine, static_argnames=("num_tokens", "config"))


@functools.cache
def expert_weights():
    rng = np.random.default_rng(11)
    dense = generators.dense_weights(rng, EXPERTS, INTER, HIDDEN)
    quantized = jax.jit(weights.quantize_weights)(*dense)
    dense = jax.jit(weights.dequantize_weights)(quantized)
    return quantized, [np.asarray(w).astype(np.float64) for w in dense]


def inputs(kind="uniform", seed=0, num_ranks=RANKS, num_tokens=TOKENS, config=CONFIG):
    """x [R, T, H] bfloat16, topk_idx [R, T, K], topk_weights [R, T, K]."""
    rng = np.random.default_rng(seed)
    rows = num_ranks * num_tokens
    x = generators.tokens(rng, rows, config.hidden)
    idx, topk = generators.routing(rng, rows, config.top_k, config.num_experts, kind, num_ranks)
    split = (num_ranks, num_tokens, -1)
    return x.reshape(split), idx.reshape(split), topk.reshape(split)


# Dispatch ----------------------------------------------------------------------------------------


def min_peel(counts, position):
    """(rank, slot) of a position: take turns for as long as the same ranks have slots left."""
    left, base = list(counts), 0
    while True:
        active = [r for r, n in enumerate(left) if n > 0]
        rounds = min(left[r] for r in active)
        if position < rounds * len(active):
            return active[position % len(active)], base + position // len(active)
        position -= rounds * len(active)
        base += rounds
        left = [n - rounds if n > 0 else 0 for n in left]


def naive_dispatch(idx, num_tokens, num_experts, block_m):
    """Per owner: [(source rank, source slot) or None per row], [local expert per block]; counts."""
    num_ranks, _, top_k = idx.shape
    local = num_experts // num_ranks
    rows, blocks = [[] for _ in range(num_ranks)], [[] for _ in range(num_ranks)]
    recv = np.zeros((num_ranks, num_ranks, local), np.int32)
    for expert in range(num_experts):
        owner = expert // local
        slots = [
            [
                t * top_k + k
                for t in range(num_tokens[r])
                for k in range(top_k)
                if idx[r, t, k] == expert
            ]
            for r in range(num_ranks)
        ]
        counts = [len(s) for s in slots]
        recv[owner, :, expert % local] = counts
        for position in range(sum(counts)):
            rank, slot = min_peel(counts, position)
            rows[owner].append((rank, slots[rank][slot]))
        while len(rows[owner]) % block_m:
            rows[owner].append(None)
        blocks[owner] += [expert % local] * (len(rows[owner]) // block_m - len(blocks[owner]))
    return rows, blocks, recv


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("kind", generators.ROUTINGS)
def test_dispatch_follows_its_definition(kind, num_ranks):
    x, idx, topk = inputs(kind, seed=3, num_ranks=num_ranks)
    used = np.random.default_rng(5).integers(0, TOKENS + 3, num_ranks)  # more than T means all
    codes, sf = map(np.asarray, STAGE_INPUT(jnp.asarray(x)))
    got = jax.tree.map(
        np.asarray,
        DISPATCH(codes, sf, idx, topk, CONFIG, num_tokens=jnp.asarray(used), block_m=BLOCK_M),
    )
    used = np.minimum(used, TOKENS)
    rows, blocks, recv = naive_dispatch(idx, used, EXPERTS, BLOCK_M)
    np.testing.assert_array_equal(got.recv_count, recv)
    for owner in range(num_ranks):
        for p in range(got.acts.shape[1]):
            row = rows[owner][p] if p < len(rows[owner]) else None
            source = (got.source_rank[owner, p], got.source_slot[owner, p])
            assert source == (row or (-1, -1)), (owner, p)
            if row is None:
                assert not got.acts[owner, p].any() and (got.acts_sf[owner, p] == 1).all()
                assert got.topk_weights[owner, p] == 0
            else:
                rank, token, k = row[0], row[1] // TOP_K, row[1] % TOP_K
                np.testing.assert_array_equal(got.acts[owner, p], codes[rank, token])
                np.testing.assert_array_equal(got.acts_sf[owner, p], sf[rank, token])
                assert got.topk_weights[owner, p] == topk[rank, token, k]
        unused = [-1] * (got.block_expert.shape[1] - len(blocks[owner]))
        np.testing.assert_array_equal(got.block_expert[owner], blocks[owner] + unused)
    in_use = np.arange(TOKENS)[None, :, None] < used[:, None, None]
    wild = in_use & ((idx < -1) | (idx >= EXPERTS))
    np.testing.assert_array_equal(got.out_of_range, wild.sum((1, 2)))


def test_worst_case_pool_is_enough_and_nothing_more():
    # Every slot on one owner, each of its experts one row over a block: no routing needs more rows.
    config = MegaMoEConfig(4, 3, 128, 128, 6)
    idx = np.concatenate([np.full(17, 0), np.full(1, 1), np.full(9, 0), np.full(9, 1)])
    idx = idx.reshape(2, 6, 3).astype(np.int32)
    codes, sf = jnp.ones((2, 6, 128), jnp.uint8), jnp.full((2, 6, 4), 127, jnp.uint8)
    topk = jnp.ones((2, 6, 3))
    full = DISPATCH(codes, sf, idx, topk, config, block_m=8)
    assert full.acts.shape[1] == (2 * 6 * 3 + 2 * 7) // 8 * 8
    assert int((full.source_rank >= 0).sum()) == idx.size


def test_int64_ids_do_not_wrap_around():
    x, idx, topk = inputs()
    wide = idx.astype(np.int64)
    wide[0, 0, 0] += 2**32
    with jax.enable_x64(True):
        codes, sf = STAGE_INPUT(jnp.asarray(x))
        got = DISPATCH(codes, sf, jnp.asarray(wide), topk, CONFIG, block_m=BLOCK_M)
    assert got.out_of_range.tolist() == [1, 0]
    assert int(got.recv_count.sum()) == idx.size - 1


# Stages ------------------------------------------------------------------------------------------


def test_products_are_within_the_error_of_an_fp32_sum():
    quantized, (w_gate, w_up, w_down) = expert_weights()
    x, idx, topk = inputs(seed=1)
    dispatched = DISPATCH(*STAGE_INPUT(jnp.asarray(x)), idx, topk, CONFIG, block_m=BLOCK_M)
    gate_up = LINEAR1(dispatched, quantized)
    acts, acts_sf = SWIGLU(gate_up, dispatched.topk_weights, CONFIG.activation)
    rows = LINEAR2(acts, acts_sf, dispatched, quantized)
    assert gate_up.dtype == jnp.float32 and rows.dtype == jnp.bfloat16

    def compare(got, codes, sf, matrix, unit):
        values = np.asarray(DEQUANTIZE(codes, sf)).astype(np.float64)
        got = np.asarray(got).astype(np.float64)
        for owner, block in np.ndindex(dispatched.block_expert.shape):
            at = owner, slice(block * BLOCK_M, (block + 1) * BLOCK_M)
            local = int(dispatched.block_expert[owner, block])
            if local < 0:
                assert not got[at].any()
                continue
            w = matrix[owner * (EXPERTS // RANKS) + local]
            # A sum of n products, in any order, is off by at most n units of the sum of magnitudes.
            bound = values.shape[-1] * FP32_UNIT * (np.abs(values[at]) @ np.abs(w).T)
            want = values[at] @ w.T
            assert (np.abs(got[at] - want) <= bound + unit * (np.abs(want) + bound)).all()

    w13 = np.concatenate([w_gate, w_up], 1)
    compare(gate_up, dispatched.acts, dispatched.acts_sf, w13, 0)
    compare(rows, acts, acts_sf, w_down, BF16_UNIT)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_activate(limit):
    rng = np.random.default_rng(2)
    gate_up = (4 * rng.standard_normal((5, 64))).astype(np.float32)
    gate_up[0, 3], gate_up[1, 40] = np.nan, np.nan  # one in the gate half, one in the up half
    gate_up[2, 0], gate_up[2, 1] = -200, 1e30  # exp(200) overflows, which has to give silu = 0
    topk = rng.random(5, np.float32)
    got = np.asarray(reference.activate(gate_up, topk, swiglu(limit)))
    gate, up = gate_up[:, :32].astype(np.float64), gate_up[:, 32:].astype(np.float64)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    want = gate / (1 + np.exp(-gate)) * up * topk[:, None]
    # exp is good to about an ulp; its argument's rounding and three products add a few more.
    np.testing.assert_allclose(got, want, rtol=16 * FP32_UNIT, atol=1e-30)
    assert np.isnan(got[0, 3]) and np.isnan(got[1, 8]) and np.isnan(got).sum() == 2


def test_gradient_of_silu_at_both_ends():
    gate = np.float32([-3e38, -200, -89, -5, -0.5, 0, 1, 30, 200])
    up, topk = np.ones_like(gate), np.ones(1, np.float32)

    def total(gate):
        return jnp.sum(reference.activate(jnp.concatenate([gate, up])[None], topk, swiglu()))

    exact = gate.astype(np.float64)
    sigmoid = 0.5 * (1 + np.tanh(exact / 2))  # has no exp that overflows
    want = sigmoid + exact * sigmoid * (1 - sigmoid)
    got = jax.grad(total)(jnp.asarray(gate))
    np.testing.assert_allclose(got, want, rtol=16 * FP32_UNIT, atol=1e-30)


def test_combine_adds_in_slot_order():
    # In FP32, (2^24 + 1) + 1 = 2^24, but (1 + 1) + 2^24 = 2^24 + 2. And a large -2^24 cancels.
    config = MegaMoEConfig(4, 4, 128, 128, 1)
    values = np.array([2.0**24, 1, 1, -(2.0**24)])
    codes, sf = jnp.zeros((1, 1, 128), jnp.uint8), jnp.ones((1, 1, 4), jnp.uint8)
    for order in ([0, 1, 2, 3], [1, 2, 0, 3], [3, 0, 1, 2], [0, 3, 1, 2]):
        idx = np.array(order, np.int32).reshape(1, 1, 4)  # slot k holds the value of its expert
        dispatched = DISPATCH(codes, sf, idx, jnp.ones((1, 1, 4)), config, block_m=8)
        expert = np.repeat(np.asarray(dispatched.block_expert), 8, axis=1)
        rows = np.broadcast_to(values[expert][..., None], (*expert.shape, 128))
        got = COMBINE(jnp.asarray(rows, jnp.bfloat16), dispatched, 1, config)
        total = np.float32(0)
        for v in values[order].astype(np.float32):
            total += v
        assert (np.asarray(got).astype(np.float32) == total).all(), order


# The whole layer ---------------------------------------------------------------------------------


def naive_e4m3(v, group=32):
    """FP8 rounding by ml_dtypes' cast, with the scale from a float64 logarithm."""
    blocks = v.astype(np.float32).astype(np.float64).reshape(*v.shape[:-1], -1, group)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(amax == 0, 1, amax) / 448)))
    rounded = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (rounded.astype(np.float64) * scale).reshape(v.shape)


def naive_layer(x, idx, topk, dense, limit, round_acts):
    """(y, sum over k of the rows' norms squared): token by token, slot by slot, float64."""
    w_gate, w_up, w_down = dense
    y, rows = np.zeros(x.shape), np.zeros((*idx.shape, x.shape[-1]))
    for r, t, k in np.ndindex(idx.shape):
        e = idx[r, t, k]
        if not 0 <= e < len(w_gate):
            continue
        gate, up = w_gate[e] @ x[r, t], w_up[e] @ x[r, t]
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        act = gate / (1 + np.exp(-gate)) * up * float(topk[r, t, k])
        rows[r, t, k] = w_down[e] @ round_acts(act)
        y[r, t] += rows[r, t, k]
    return y, rows


@pytest.mark.parametrize("kind", generators.ROUTINGS)
def test_layer_against_token_by_token_float64(kind):
    quantized, dense = expert_weights()
    x, idx, topk = inputs(kind, seed=7)
    limit = CONFIG.activation.limit
    codes, sf = STAGE_INPUT(jnp.asarray(x))
    x_values = np.asarray(DEQUANTIZE(codes, sf)).astype(np.float64)

    exact, _ = naive_layer(x_values, idx, topk, dense, limit, lambda a: a)
    truth = reference.dense_float64(x_values, idx, topk, *dense, CONFIG)
    np.testing.assert_allclose(truth, exact, rtol=1e-12, atol=1e-12)

    staged, rows = naive_layer(x_values, idx, topk, dense, limit, naive_e4m3)
    truth = reference.staged_float64(codes, sf, idx, topk, *dense, CONFIG)
    np.testing.assert_allclose(truth, staged, rtol=1e-12, atol=1e-12)

    y = reference.mega_moe(jnp.asarray(x), idx, topk, quantized, CONFIG, block_m=BLOCK_M)
    assert y.dtype == jnp.bfloat16 and y.shape == x.shape
    # Each row is rounded to BF16 and so is the sum: at most one unit of each one's norm. FP32 sums
    # are 2^15 times finer; doubled for elements that they push to another E4M3 code.
    norms = [np.linalg.norm(rows[:, :, k]) for k in range(TOP_K)]
    bound = BF16_UNIT * (sum(norms) + np.linalg.norm(staged))
    assert np.linalg.norm(np.asarray(y).astype(np.float64) - staged) <= 2 * bound
    unrouted = ~((idx >= 0) & (idx < EXPERTS)).any(-1)
    assert not np.asarray(y)[unrouted].astype(np.float32).any()

    # E4M3 of x is in `staged` already; that of the activation is at most 2^-4 an element.
    if np.linalg.norm(exact):
        assert reference.relative_error(staged, exact) < 2**-4


@pytest.mark.parametrize("granularity", [128, "row"])
def test_granularities_against_token_by_token_float64(granularity):
    config = dataclasses.replace(CONFIG, activation_granularity=granularity)
    quantized, dense = expert_weights()
    x, idx, topk = inputs(seed=17)
    x = x.copy()
    x[..., :32] *= 2.0**12  # what shares its scale loses bits
    group = HIDDEN if granularity == "row" else 128
    values = naive_e4m3(x, group)
    codes, sf = STAGE_INPUT(jnp.asarray(x), group=config.x_group)
    np.testing.assert_array_equal(np.asarray(DEQUANTIZE(codes, sf)).astype(np.float64), values)

    limit, acts_group = CONFIG.activation.limit, functools.partial(naive_e4m3, group=128)
    staged, rows = naive_layer(values, idx, topk, dense, limit, acts_group)
    truth = reference.staged_float64(codes, sf, idx, topk, *dense, config)
    np.testing.assert_allclose(truth, staged, rtol=1e-12, atol=1e-12)
    y = reference.mega_moe(jnp.asarray(x), idx, topk, quantized, config, block_m=BLOCK_M)
    norms = [np.linalg.norm(rows[:, :, k]) for k in range(TOP_K)]
    bound = BF16_UNIT * (sum(norms) + np.linalg.norm(staged))
    assert np.linalg.norm(np.asarray(y).astype(np.float64) - staged) <= 2 * bound


def test_a_pair_with_unequal_scales_is_refused():
    pair = STAGE_INPUT(jnp.asarray(inputs()[0]))
    reference.stage_input(pair)
    for group in (128, "row"):
        with pytest.raises(MegaMoEError, match=r"x\[1\]: got scale bytes that differ"):
            reference.stage_input(pair, group)


def test_block_size_pool_size_layout_and_quantised_input_do_not_change_a_bit():
    quantized, _ = expert_weights()
    x, idx, topk = inputs("masked", seed=8)
    x = jnp.asarray(x)
    want = np.asarray(reference.mega_moe(x, idx, topk, quantized, CONFIG, block_m=BLOCK_M))
    codes, sf = STAGE_INPUT(x)
    eight_bit = (
        jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn),
        jax.lax.bitcast_convert_type(sf, jnp.float8_e8m0fnu),
    )
    small = reference.mega_moe(
        eight_bit,
        idx,
        topk,
        weights.to_layout(quantized, "cpu"),
        CONFIG,
        block_m=BLOCK_M,
        max_pool_rows=8 * BLOCK_M,
    )
    np.testing.assert_array_equal(np.asarray(small), want)
    # A product of other block rows may sum in another order, hence the tolerance of one rounding.
    other = reference.mega_moe(x, idx, topk, quantized, CONFIG, block_m=32)
    assert reference.relative_error(other, want.astype(np.float64)) <= BF16_UNIT


def test_num_tokens_hides_whatever_lies_beyond():
    quantized, _ = expert_weights()
    x, idx, topk = inputs(seed=9)
    used = np.array([4, 0], np.int32)
    run = functools.partial(reference.mega_moe, config=CONFIG, num_tokens=used, block_m=BLOCK_M)
    want = np.asarray(run(jnp.asarray(x), idx, topk, quantized)).astype(np.float32)
    assert want[0, :4].any() and not want[0, 4:].any() and not want[1].any()
    for poison in (np.nan, np.inf, 3.1e38):
        bad_x, bad_idx, bad_topk = x.copy(), idx.copy(), topk.copy()
        for rank, first in enumerate(used):
            bad_x[rank, first:] = poison
            bad_idx[rank, first:] = 2**31 - 1
            bad_topk[rank, first:] = poison
        got = run(jnp.asarray(bad_x), bad_idx, bad_topk, quantized)
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_non_finite_token_stays_alone(poison):
    quantized, _ = expert_weights()
    x, idx, topk = inputs("duplicates", seed=10)
    clean = reference.mega_moe(jnp.asarray(x), idx, topk, quantized, CONFIG, block_m=BLOCK_M)
    x[1, 6, 77] = poison
    x[0, 2] = 0  # an all-zero token besides: exact zeros, no 0 / 0
    got = reference.mega_moe(jnp.asarray(x), idx, topk, quantized, CONFIG, block_m=BLOCK_M)
    got, clean = (np.asarray(a).astype(np.float32) for a in (got, clean))
    assert np.isnan(got[1, 6]).all()
    assert not got[0, 2].any()
    untouched = np.ones(x.shape[:2], bool)
    untouched[1, 6] = untouched[0, 2] = False
    np.testing.assert_array_equal(got[untouched], clean[untouched])


def test_no_tokens_at_all():
    quantized, _ = expert_weights()
    x, idx, topk = inputs(num_tokens=TOKENS)
    y = reference.mega_moe(jnp.asarray(x[:, :0]), idx[:, :0], topk[:, :0], quantized, CONFIG)
    assert y.shape == (RANKS, 0, HIDDEN) and y.dtype == jnp.bfloat16


def test_relative_error():
    one = np.ones(4)
    assert reference.relative_error(one * 1.5, one) == 0.5
    assert reference.relative_error(0 * one, 0 * one) == 0
    assert reference.relative_error(one, 0 * one) == np.inf


def test_errors_name_the_operand():
    quantized, _ = expert_weights()
    x, idx, topk = inputs()
    x = jnp.asarray(x)
    codes, sf = STAGE_INPUT(x)
    for operand, arguments in (
        ("x: got float32", (x.astype(jnp.float32), idx, topk)),
        (r"x\[1\]: got uint8", ((codes, sf[..., :-1]), idx, topk)),
        ("x: got a tuple of 3", ((codes, sf, sf), idx, topk)),
        ("topk_idx: got int32", (x, idx[:, :-1], topk)),
        ("topk_weights: got int32", (x, idx, idx)),
    ):
        with pytest.raises(MegaMoEError, match=operand):
            reference.mega_moe(*arguments, quantized, CONFIG)
    with pytest.raises(MegaMoEError, match="max_pool_rows"):
        reference.dispatch(codes, sf, idx, topk, CONFIG, block_m=8, max_pool_rows=63)
