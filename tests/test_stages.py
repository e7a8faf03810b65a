"""The CPU back end's workspace after a call, stage by stage, against the staged reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from jax_megamoe import quantize, reference
from jax_megamoe._ffi import native
from jax_megamoe.config import GRANULARITIES
from moe_case import Case, mesh_of

RANKS, TOKENS = 4, 45
CONFIG = jmm.MegaMoEConfig(
    num_experts=8,
    top_k=3,
    hidden=256,
    intermediate=256,
    max_tokens_per_rank=48,
    activation=jmm.swiglu(limit=3.0),
    ring_tokens=10**6,  # the whole pool, so that every row is still there after the call
)


@pytest.fixture(scope="module", params=GRANULARITIES)
def run(request):
    config = dataclasses.replace(CONFIG, activation_granularity=request.param)
    case = Case(np.random.default_rng(11), config, RANKS, TOKENS, "masked")
    layer = jmm.MegaMoE(config, mesh_of(RANKS))
    layer.buffer.poison()
    y = np.asarray(jax.jit(layer)(*case.operands, layer.shard(case.weights)))
    codes, sf = quantize.quantize_e4m3(case.by_rank(case.x), config.x_group)
    dispatched = reference.dispatch(
        codes,
        sf,
        case.by_rank(case.topk_idx),
        case.by_rank(case.topk_weights),
        CONFIG,
        block_m=native.CPU_BLOCK_M,
    )
    yield case, layer.buffer, dispatched, y
    layer.close()


def valid_rows(dispatched, rank):
    return np.asarray(dispatched.source_rank[rank]) >= 0


def test_dispatch_is_bit_exact(run):
    _, buffer, dispatched, _ = run
    for rank in range(RANKS):
        valid = valid_rows(dispatched, rank)
        assert valid.any()
        source = buffer.read("token_src_metadata", rank)[: len(valid)]
        np.testing.assert_array_equal(source[valid, 0], dispatched.source_rank[rank][valid])
        np.testing.assert_array_equal(source[valid, 1], dispatched.source_slot[rank][valid])
        for region, want in (
            ("l1_acts", dispatched.acts),
            ("l1_acts_sf", dispatched.acts_sf),
            ("l1_topk_weights", dispatched.topk_weights),
        ):
            got = buffer.read(region, rank)[: len(valid)]
            np.testing.assert_array_equal(got[valid], np.asarray(want[rank])[valid], region)


def test_dispatch_does_not_touch_padding_rows(run):
    _, buffer, dispatched, _ = run
    for rank in range(RANKS):
        padding = ~valid_rows(dispatched, rank)
        rows = buffer.read("l1_acts", rank)
        assert (rows[: len(padding)][padding] == 0xFF).all()  # the poison


def test_input_codes_are_bit_exact(run):
    case, buffer, _, _ = run
    codes, sf = quantize.quantize_e4m3(case.by_rank(case.x), case.config.x_group)
    for rank in range(RANKS):
        np.testing.assert_array_equal(buffer.read("x", rank)[:TOKENS], codes[rank])
        np.testing.assert_array_equal(buffer.read("x_sf", rank)[:TOKENS], sf[rank])


def test_swiglu_codes_differ_only_where_fp32_error_reaches_a_tie(run):
    """Every code and scale is one that a value within the FP32 error bound would have.

    For linear 1 with K products summed in any order, |fp32 - exact| <= gamma * sum |a||w| with
    gamma = K u / (1 - K u), u = 2^-24. SwiGLU has |d silu| <= 1.1 |d gate| and five roundings.
    """
    case, buffer, dispatched, _ = run
    w_gate, w_up, _ = (np.asarray(w, np.float64) for w in jmm.dequantize_weights(case.weights))
    limit, local = CONFIG.activation.limit, CONFIG.num_experts // RANKS
    group = case.config.act_group
    gamma = CONFIG.hidden * 2.0**-24 / (1 - CONFIG.hidden * 2.0**-24)
    for rank in range(RANKS):
        valid = valid_rows(dispatched, rank)
        block_expert = np.repeat(np.asarray(dispatched.block_expert[rank]), native.CPU_BLOCK_M)
        acts = np.asarray(
            quantize.dequantize_e4m3(dispatched.acts[rank], dispatched.acts_sf[rank]), np.float64
        )
        codes = buffer.read("l2_acts", rank)
        sf = buffer.read("l2_acts_sf", rank)
        weight = np.abs(np.asarray(dispatched.topk_weights[rank], np.float64))
        for row in np.flatnonzero(valid):
            expert = rank * local + block_expert[row]
            gate, up = w_gate[expert] @ acts[row], w_up[expert] @ acts[row]
            d_gate = gamma * np.abs(w_gate[expert]) @ np.abs(acts[row])
            d_up = gamma * np.abs(w_up[expert]) @ np.abs(acts[row])
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            silu = gate / (1 + np.exp(-gate))
            value = silu * up * np.asarray(dispatched.topk_weights[rank], np.float64)[row]
            error = weight[row] * (1.1 * np.abs(up) * d_gate + np.abs(silu) * d_up)
            error += 5 * 2.0**-23 * np.abs(value) + 2.0**-140
            low, high = value - error, value + error
            amax_low = np.maximum(0, np.abs(value) - error).reshape(-1, group).max(axis=1)
            amax_high = (np.abs(value) + error).reshape(-1, group).max(axis=1)
            sf_range = [np.repeat(sf_of(amax), group // 32) for amax in (amax_low, amax_high)]
            same = sf[row].reshape(-1, group // 32)
            assert (same == same[:, :1]).all()
            assert (sf_range[0] <= sf[row]).all() and (sf[row] <= sf_range[1]).all()
            scale = np.repeat(np.ldexp(1.0, sf[row].astype(int) - 127), 32)
            got = e4m3(codes[row]) * scale
            assert (e4m3_round(low / scale) * scale <= got).all()
            assert (got <= e4m3_round(high / scale) * scale).all()


def sf_of(amax):
    """Smallest byte in [1, 254] with amax <= 448 * 2^(byte - 127)."""
    byte = np.ceil(np.log2(np.maximum(amax, 1e-300) / 448)).astype(int) + 127
    return np.clip(byte, 1, 254)


def e4m3(codes):
    return native.e4m3_to_float(np.ascontiguousarray(codes)).astype(np.float64)


def e4m3_round(values):
    """Nearest E4M3 value, ties to even, by the definition of the format."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-300))), -6)
    quantum = np.exp2(exponent - 3)
    return np.clip(np.round(values / quantum) * quantum, -448, 448)


def test_pushed_rows_meet_the_error_rule(run):
    """Rows in `combine`, from the kernel's own SwiGLU codes, against float64 and plain FP32."""
    case, buffer, dispatched, _ = run
    _, _, w_down = (np.asarray(w, np.float64) for w in jmm.dequantize_weights(case.weights))
    local = CONFIG.num_experts // RANKS
    pushed = [buffer.read("combine", rank) for rank in range(RANKS)]
    error = plain_error = 0.0
    for rank in range(RANKS):
        block_expert = np.repeat(np.asarray(dispatched.block_expert[rank]), native.CPU_BLOCK_M)
        codes, sf = buffer.read("l2_acts", rank), buffer.read("l2_acts_sf", rank)
        for row in np.flatnonzero(valid_rows(dispatched, rank)):
            scale = np.repeat(np.ldexp(1.0, sf[row].astype(int) - 127), 32)
            acts = e4m3(codes[row]) * scale
            weight = w_down[rank * local + block_expert[row]]
            exact = weight @ acts
            plain = np.float32(weight) @ np.float32(acts)
            plain = np.asarray(jnp.asarray(plain, jnp.bfloat16), np.float64)
            slot = int(dispatched.source_slot[rank][row])
            token, k = divmod(slot, CONFIG.top_k)
            got = pushed[int(dispatched.source_rank[rank][row])][k, token]
            got = native.bf16_to_float(np.ascontiguousarray(got)).astype(np.float64)
            error += ((got - exact) ** 2).sum()
            plain_error += ((plain - exact) ** 2).sum()
    assert 0 < np.sqrt(error) <= 2 * np.sqrt(plain_error)


def test_combine_is_bit_exact(run):
    case, buffer, _, y = run
    idx = np.asarray(case.by_rank(case.topk_idx))
    for rank in range(RANKS):
        rows = buffer.read("combine", rank)
        rows = native.bf16_to_float(rows.reshape(-1)).reshape(rows.shape)
        total = np.zeros((TOKENS, CONFIG.hidden), np.float32)
        for k in range(CONFIG.top_k):
            routed = idx[rank, :, k] >= 0
            total[routed] += rows[k, :TOKENS][routed]
        want = native.float_to_bf16(total.reshape(-1))
        got = y[rank * TOKENS : (rank + 1) * TOKENS].view(np.uint16).reshape(-1)
        np.testing.assert_array_equal(got, want)


def test_counters_are_clean_after_a_call(run):
    _, buffer, _, _ = run
    for rank in range(RANKS):
        for region in ("expert_send_count", "next_item"):
            assert not buffer.read(region, rank).any()
        for region in ("l1_arrival", "l1_empty", "l2_arrival", "l2_empty"):
            assert not buffer.read(region, rank).any()
        assert buffer.read("call_epoch", rank)[0] == 1


def test_published_counts_carry_the_number_of_the_call(run):
    _, buffer, dispatched, _ = run
    for rank in range(RANKS):
        words = buffer.read("expert_recv_count", rank)
        assert (words >> 32 == 1).all()
        np.testing.assert_array_equal(words & 0xFFFFFFFF, dispatched.recv_count[rank])
