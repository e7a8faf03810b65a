"""The GPU kernel with every activation, with and without biases: stage by stage, at edges, in JAX.

The formulas are written out here, in float64, and share nothing with the library's.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_layer import gpu_mesh, placed
from test_gpu_stages import Expected as ExpectedOfSwiglu
from test_gpu_stages import (
    check_counters,
    check_linear2,
    check_row,
    check_stages,
    check_swiglu,
    rows_of,
    run,
    scaled,
)

import jax_megamoe as jmm
from gpu_case import BACKENDS, SimulatedRanks, load, num_tiles, on_cpu, with_granularity
from gpu_case import check as check_layer
from jax_megamoe import quantize
from jax_megamoe._ffi import native
from jax_megamoe.config import GRANULARITIES
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.devtools.gpu_measure import compile_ahead
from jax_megamoe.symmetric import granularity_number
from moe_case import GpuCase as Case

ACTIVATIONS = {
    "swiglu": jmm.swiglu(limit=3.0),
    "gpt_oss_swiglu": jmm.gpt_oss_swiglu(limit=3.0),
    "situ": jmm.situ(beta=1.5, linear_beta=4.0),  # sums of order one come close to the bounds
}
VARIANTS = list(itertools.product(ACTIVATIONS, (False, True)))
PLAIN = "swiglu", False  # what test_gpu_stages.py covers
RANKS, TOKENS = 2, 37
TILE_TOKENS = 128


@pytest.fixture(scope="module", autouse=True)
def _reference_on_cpu():
    with on_cpu():
        yield


def sigmoid(z):
    power = np.exp(-np.abs(z))  # never overflows
    return np.where(z >= 0, 1, power) / (1 + power)


def sides(gate, up, activation):
    """(gate's side, up's side): the activation is their product. Any float dtype."""
    a = activation
    if a.kind == "situ":
        bounded = a.beta * np.tanh(gate / a.beta) * sigmoid(gate)
        return bounded, a.linear_beta * np.tanh(up / a.linear_beta)
    gate, up = np.minimum(gate, a.limit), np.clip(up, -a.limit, a.limit)
    if a.kind == "gpt_oss_swiglu":
        return gate * sigmoid(a.alpha * gate), up + 1
    return gate * sigmoid(gate), up


def relative_error(gate, activation):
    """Of the kernel's activation, in units of the value: docs/numerics.md, and its products."""
    if activation.kind == "situ":
        return np.abs(gate) * 2.0**-23 + 2.0**-21 + 2 * (2.0**-20 + 2.0**-23) + 6 * 2.0**-24
    if activation.kind == "gpt_oss_swiglu":
        gate = np.minimum(gate, activation.limit)
        return np.abs(activation.alpha * gate) * 2.0**-22 + 2.0**-21 + 5 * 2.0**-24
    return np.abs(np.minimum(gate, activation.limit)) * 2.0**-23 + 2.0**-21 + 4 * 2.0**-24


class Expected(ExpectedOfSwiglu):
    """`_bound` holds for all three: no gate's side is steeper than 1.1, no up's side than 1.

    z sigmoid(z) has a slope of at most 1.1 and that of the gate's side of situ is not larger:
    tanh(g / b) b is at most |g| and its slope at most 1. A bias is one more product of the sums.
    """

    def _activate(self, gate, up, weight):
        gates_side, ups_side = sides(gate, up, self.case.config.activation)
        return gates_side * ups_side * weight[:, None], gates_side, gate, ups_side

    def _relative(self, gate):
        return relative_error(gate, self.case.config.activation)


_cases = {}


def expected(variant, granularity, tokens=TOKENS, kind="masked"):
    key = variant, granularity, tokens, kind
    if key not in _cases:
        name, biased = variant
        config = with_granularity(granularity, activation=ACTIVATIONS[name])
        rng = np.random.default_rng(21)
        case = Case(rng, config, RANKS, tokens, kind)
        if biased:
            case.add_biases(rng)
        _cases[key] = Expected(case)
    return _cases[key]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_stage(backend, variant, granularity):
    want = expected(variant, granularity)
    ranks, tile = run(backend, want)
    check_stages(want, ranks, tile)
    if backend is not SimulatedRanks:
        check_counters(ranks)


@pytest.fixture(scope="module")
def compiled_tiles():
    for bias in (False, True):
        names = [name for name in ACTIVATIONS if (name, bias) != PLAIN]
        configs = [
            with_granularity(granularity, activation=ACTIVATIONS[name])
            for name, granularity in itertools.product(names, GRANULARITIES)
        ]
        kernels = [(config, RANKS, tile) for config in configs for tile in range(num_tiles(config))]
        compile_ahead(kernels, bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != PLAIN], ids=str)
def test_every_stage_of_every_tile(compiled_tiles, variant, granularity):
    want = expected(variant, granularity, TILE_TOKENS, "zipf")
    for tile in range(num_tiles(want.case.config)):
        ranks, _ = run(GpuRanks, want, tile)
        check_stages(want, ranks, tile)


@pytest.mark.parametrize(
    ("stage", "change", "check"),
    [("swiglu", scaled(-1), check_swiglu), ("linear2", scaled(1.02, row=0), check_linear2)],
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_damaged_stage_is_noticed(variant, stage, change, check):
    want = expected(variant, 32)
    ranks, tile = run(SimulatedRanks, want, damage={stage: change})
    with pytest.raises(AssertionError):
        check(want, ranks, native.gpu_tiles(32)[tile]["block_m"])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("forgotten", ["b13", "b2"])
def test_a_bias_that_is_left_out_is_noticed(granularity, forgotten):
    want = expected(("gpt_oss_swiglu", True), granularity)
    case = Case(np.random.default_rng(21), want.case.config, RANKS, TOKENS, "masked")
    zeros = jnp.zeros_like(getattr(want.case.weights, forgotten))
    case.weights = dataclasses.replace(want.case.weights, **{forgotten: zeros})
    ranks = load(SimulatedRanks(case.config, [0] * RANKS), case)
    tile = ranks.select_tile()
    ranks.launch(tile)
    block_m = native.gpu_tiles(granularity_number(case.config))[tile]["block_m"]
    with pytest.raises(AssertionError):
        (check_swiglu if forgotten == "b13" else check_linear2)(want, ranks, block_m)


# Biases alone: with x = 0 gate and up are what the biases say ------------------------------------


def edge_values(activation):
    """Both sides of every decision, tiny and large numbers, and where exp overflows."""
    limit = np.float32(activation.limit or 0.5 * activation.beta)  # tanh's polynomial ends at 0.5
    near = [np.nextafter(limit, np.float32(0)), limit, np.nextafter(limit, np.float32(9))]
    some = np.float32([0, 1e-20, 1e-6, 0.01, 0.3, 0.9, 1, 1.7, *near, 12, 40, 80, 88.8, 200])
    return np.concatenate([some, -some])


def edge_case(name, granularity, rng):
    """A case of zero tokens whose experts' biases are pairs of `edge_values`, and W2 of zeros."""
    config = with_granularity(granularity, activation=ACTIVATIONS[name])
    case = Case(rng, config, RANKS, TOKENS, "uniform")
    case.x = jnp.zeros_like(case.x)
    case.add_biases(rng)
    values = edge_values(config.activation)
    weights = case.weights
    b13 = rng.choice(values, weights.b13.shape).astype(np.float32)
    # A group's values share a scale: in ascending order, small ones keep their bits.
    gate, up = np.split(b13.astype(np.float64), 2, axis=1)
    order = np.argsort(np.abs(np.prod(sides(gate, up, config.activation), axis=0)))
    gate, up = (np.take_along_axis(part, order, 1) for part in (gate, up))
    b13 = jnp.asarray(np.concatenate([gate, up], axis=1), jnp.float32)
    case.weights = dataclasses.replace(weights, b13=b13, w2=jnp.zeros_like(weights.w2))
    case.topk_weights = jnp.ones_like(case.topk_weights)
    return case, gate, up


def check_edges(case, gate, up, ranks, tile):
    """SwiGLU's codes of every row against the formula's value of its expert's biases."""
    block_m = native.gpu_tiles(granularity_number(case.config))[tile]["block_m"]
    want, seen = ExpectedOfSwiglu.__new__(ExpectedOfSwiglu), 0
    want.case = case
    activation, group = case.config.activation, case.config.act_group
    value = np.prod(sides(gate, up, activation), axis=0)
    error = np.abs(value) * relative_error(gate, activation) + 2.0**-110
    local = case.config.num_experts // case.num_ranks
    for rank in range(case.num_ranks):
        space, pool, _ = rows_of(want, ranks, rank, block_m)
        values, scales = space.l2_values(), space.l2_scales()
        for row, expert in zip(pool.position, rank * local + pool.expert, strict=True):
            low, high = value[expert] - error[expert], value[expert] + error[expert]
            check_row(values[row], None if scales is None else scales[row], low, high, group)
            seen += 1
    assert seen == case.topk_idx.size
    # Products are zeros: y is the sum of the experts' second biases, each rounded to BF16.
    check_layer(case, ranks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_edges_of_the_activation(backend, name, granularity, rng):
    case, gate, up = edge_case(name, granularity, rng)
    ranks = load(backend(case.config, [0] * RANKS), case)
    ranks.poison()
    tile = ranks.select_tile()
    ranks.launch(tile)
    check_edges(case, gate, up, ranks, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity(name, granularity, rng):
    """What the CPU back end and the reference make of them: a NaN code, or the formula's limit."""
    case, *_ = edge_case(name, granularity, rng)
    b13, half = np.array(case.weights.b13), case.config.intermediate
    for channel, (g, u) in enumerate(
        [(np.nan, 1), (1, np.nan), (np.inf, 1), (1, np.inf), (1, -np.inf), (-np.inf, 1)]
    ):
        b13[:, 7 * channel], b13[:, half + 7 * channel] = g, u
    case.weights = dataclasses.replace(case.weights, b13=jnp.asarray(b13))
    ranks = load(GpuRanks(case.config, [0] * RANKS), case)
    tile = ranks.select_tile()
    ranks.launch(tile)
    rows = np.concatenate([b13[:, :half], b13[:, half:]], axis=1)
    acts = jmm.reference.activate(rows, jnp.ones(len(rows)), case.config.activation)
    want = np.asarray(
        quantize.dequantize_e4m3(*quantize.quantize_e4m3(acts, case.config.act_group))
    )
    block_m = native.gpu_tiles(granularity_number(case.config))[tile]["block_m"]
    of_case, local = ExpectedOfSwiglu.__new__(ExpectedOfSwiglu), case.config.num_experts // RANKS
    of_case.case = case
    for rank in range(RANKS):
        space, pool, _ = rows_of(of_case, ranks, rank, block_m)
        got, here = space.l2_values()[pool.position], want[rank * local + pool.expert]
        np.testing.assert_array_equal(np.isnan(got), np.isnan(here))
        assert np.isnan(here).any() and np.isfinite(here).any()
        # One code apart at most, where the approximations fall on the other side of a tie.
        finite = np.isfinite(here)
        assert (np.abs(got - here) <= 2.0**-3 * np.abs(here) + 2.0**-100)[finite].all()


# One buffer, several kernels; rings of several laps ----------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_small_ring_changes_nothing(granularity, rng):
    """Weights of biases survive laps of the ring; experts of one rank fill it many times."""
    config = with_granularity(granularity, activation=ACTIVATIONS["gpt_oss_swiglu"])
    case = Case(rng, config, RANKS, TILE_TOKENS, "one_rank")
    case.add_biases(rng)
    ys = []
    for ring_tokens in (None, 1):
        own = dataclasses.replace(config, ring_tokens=ring_tokens)
        ranks = load(GpuRanks(own, [0] * RANKS), case)
        ranks.poison()
        ranks.launch(0, repeats=3)
        check_layer(case, ranks)
        ys.append([ranks.outputs(rank).y for rank in range(RANKS)])
    assert max(ranks.outputs(rank).status[3] for rank in range(RANKS)) > 1
    np.testing.assert_array_equal(ys[0], ys[1])


@pytest.mark.gpu
def test_kernels_of_one_harness_follow_the_weights(rng):
    """Biases that come and go: the kernel is chosen at each launch."""
    config = with_granularity(128, activation=ACTIVATIONS["gpt_oss_swiglu"])
    case = Case(rng, config, RANKS, TOKENS)
    ranks = load(GpuRanks(config, [0] * RANKS), case)
    plain = case.weights
    for biased in (False, True, False):
        case.weights = plain
        if biased:
            case.add_biases(rng)
        load(ranks, case)
        ranks.launch(repeats=2)
        check_layer(case, ranks)


# Under JAX ---------------------------------------------------------------------------------------


def layer_formula(case):
    """The layer in float64 with FP4 weights and without E4M3, token by token."""
    dense = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(case.weights)]
    i = case.config.intermediate
    b13, b2 = (np.asarray(b, np.float64) for b in (case.weights.b13, case.weights.b2))
    x, idx, p = (np.asarray(a, np.float64) for a in case.operands)
    y = np.zeros(x.shape)
    for token, k in np.argwhere(idx >= 0):
        e = int(idx[token, k])
        gate, up = dense[0][e] @ x[token] + b13[e, :i], dense[1][e] @ x[token] + b13[e, i:]
        acts = np.prod(sides(gate, up, case.config.activation), axis=0)
        y[token] += p[token, k] * (dense[2][e] @ acts + b2[e])
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_layer_under_jax(name, granularity, rng):
    config = with_granularity(granularity, activation=ACTIVATIONS[name])
    case = Case(rng, config, 1, 100)
    case.add_biases(rng)
    with jmm.MegaMoE(config, gpu_mesh(1)) as layer:
        operands, weights = placed(case, layer)
        layer.buffer.poison()
        y = np.asarray(jax.jit(layer)(*operands, weights), np.float64)
        layer.check_failures()
    case.check(y)
    # E4M3 of x and of the activation, 2^-4 an element at most.
    exact = layer_formula(case)
    assert np.linalg.norm(y - exact) <= 2.0**-3 * np.linalg.norm(exact)


@pytest.mark.gpu
def test_layers_of_different_activations_share_a_buffer(rng):
    """In one program, with biases and without: six kernels of one shape."""
    case = Case(rng, with_granularity(128), 1, 64)
    plain = case.weights
    case.add_biases(rng)
    biased = case.weights
    mesh = gpu_mesh(1)
    configs = {name: with_granularity(128, activation=a) for name, a in ACTIVATIONS.items()}
    layers = {name: jmm.MegaMoE(config, mesh) for name, config in configs.items()}
    try:
        assert len({layer.buffer.key for layer in layers.values()}) == 1
        operands, with_biases = placed(case, layers["swiglu"])
        case.weights = plain
        _, without = placed(case, layers["swiglu"])

        @jax.jit
        def all_of_them(x, idx, p, with_biases, without):
            return {
                (name, own is with_biases): layer(x, idx, p, own)
                for name, layer in layers.items()
                for own in (with_biases, without)
            }

        for (name, has_biases), y in all_of_them(*operands, with_biases, without).items():
            case.config, case.weights = configs[name], biased if has_biases else plain
            case.check(np.asarray(y, np.float64))
    finally:
        for layer in layers.values():
            layer.close()
