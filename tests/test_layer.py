"""The layer on virtual CPU devices against the reference, over routings, ranks and edge cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_megamoe as jmm
from generators import ROUTINGS, routing
from jax_megamoe.config import GRANULARITIES
from moe_case import Case, mesh_of

CONFIG = jmm.MegaMoEConfig(
    num_experts=16,
    top_k=3,
    hidden=256,
    intermediate=128,
    max_tokens_per_rank=96,
    activation=jmm.swiglu(limit=10.0),
    timeout_s=60.0,
    checked=False,  # routings with ids out of range are among those below
)


@pytest.fixture(scope="module")
def layers():
    made = {}

    def layer_on(num_ranks, config=CONFIG):
        if (num_ranks, config) not in made:
            layer = jmm.MegaMoE(config, mesh_of(num_ranks))
            made[num_ranks, config] = (
                layer,
                jax.jit(lambda *args, **kwargs: layer(*args, return_stats=True, **kwargs)),
            )
        return made[num_ranks, config]

    yield layer_on
    for layer, _ in made.values():
        layer.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_layer_meets_the_error_rule(layers, rng, num_ranks, kind):
    layer, step = layers(num_ranks)
    case = Case(rng, CONFIG, num_ranks, 37, kind)
    layer.buffer.poison()
    y, stats = step(*case.operands, layer.shard(case.weights))
    case.check(y)
    idx = np.asarray(case.topk_idx)
    routed = idx[(idx >= 0) & (idx < CONFIG.num_experts)]
    np.testing.assert_array_equal(
        stats.tokens_per_expert, np.bincount(routed, minlength=CONFIG.num_experts)
    )
    wrong = (idx < -1) | (idx >= CONFIG.num_experts)
    np.testing.assert_array_equal(stats.out_of_range, wrong.reshape(num_ranks, -1).sum(axis=1))
    owner = routed // (CONFIG.num_experts // num_ranks)
    np.testing.assert_array_equal(stats.received_rows, np.bincount(owner, minlength=num_ranks))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 96])
def test_row_counts_around_a_block(layers, rng, rows):
    layer, step = layers(2)
    case = Case(rng, CONFIG, 2, rows, "one_expert")
    y, stats = step(*case.operands, layer.shard(case.weights))
    case.check(y)
    assert int(stats.pool_blocks.sum()) == -(-2 * rows // 64)


def test_same_inputs_give_the_same_bits(layers, rng):
    layer, step = layers(8)
    case = Case(rng, CONFIG, 8, 50, "zipf")
    weights = layer.shard(case.weights)
    first = np.asarray(step(*case.operands, weights)[0])
    for _ in range(20):
        layer.buffer.poison()
        np.testing.assert_array_equal(first, np.asarray(step(*case.operands, weights)[0]))


@pytest.mark.parametrize("ring_tokens", [1, 64, 128, 320])
def test_a_small_ring_changes_nothing(layers, rng, ring_tokens):
    layer, step = layers(4)
    case = Case(rng, CONFIG, 4, 96, "zipf")
    want = step(*case.operands, layer.shard(case.weights))[0]
    small_layer, small_step = layers(4, dataclasses.replace(CONFIG, ring_tokens=ring_tokens))
    got, stats = small_step(*case.operands, small_layer.shard(case.weights))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    laps = -(-np.asarray(stats.pool_blocks) // -(-ring_tokens // 64))
    np.testing.assert_array_equal(stats.ring_laps, laps)
    assert laps.max() > 1


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 20, 1, 0], [20, 20, 20, 20], [3, 0, 20, 19]])
def test_num_tokens_per_rank(layers, rng, counts):
    layer, step = layers(4)
    case = Case(rng, CONFIG, 4, 20)
    # What lies past num_tokens must not matter, even if it is not a number or not an expert.
    x = case.by_rank(np.asarray(case.x, np.float32)).copy()
    idx = np.array(case.by_rank(case.topk_idx))
    for rank, count in enumerate(counts):
        x[rank, count:] = np.nan
        idx[rank, count:] = 10**6
    counts = np.asarray(counts, np.int32)
    case.x = jnp.asarray(x.reshape(-1, CONFIG.hidden), jnp.bfloat16)
    case.topk_idx = jnp.asarray(idx.reshape(-1, CONFIG.top_k))
    y, stats = step(
        *case.operands, layer.shard(case.weights), num_tokens=jnp.asarray(counts, jnp.int32)
    )
    assert int(stats.received_rows.sum()) == counts.sum() * CONFIG.top_k
    assert (np.asarray(stats.out_of_range) == 0).all()
    y = np.asarray(y, np.float64)
    past = (np.arange(20)[None] >= counts[:, None]).reshape(-1)
    assert (y[past] == 0).all()
    if counts.sum():
        x[~np.isfinite(x)] = 0
        case.x = jnp.asarray(x.reshape(-1, CONFIG.hidden), jnp.bfloat16)
        case.check(y, num_tokens=counts)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_prequantised_input_is_the_same_as_bf16(layers, rng, granularity):
    config = dataclasses.replace(CONFIG, activation_granularity=granularity)
    layer, step = layers(2, config)
    case = Case(rng, config, 2, 30)
    weights = layer.shard(case.weights)
    want = np.asarray(step(*case.operands, weights)[0])
    codes, sf = jmm.quantize.quantize_e4m3(case.x, config.x_group)
    got = step((codes, sf), *case.operands[1:], weights)[0]
    np.testing.assert_array_equal(np.asarray(got), want)
    typed = (
        jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn),
        jax.lax.bitcast_convert_type(sf, jnp.float8_e8m0fnu),
    )
    got = step(typed, *case.operands[1:], weights)[0]
    np.testing.assert_array_equal(np.asarray(got), want)


def test_granularity_decides_the_scales(layers):
    """Each granularity gives what the reference does with it, and not what another one gives."""
    cases, results = {}, {}
    for granularity in GRANULARITIES:
        config = dataclasses.replace(CONFIG, activation_granularity=granularity)
        layer, step = layers(4, config)
        case = Case(np.random.default_rng(6), config, 4, 37, "zipf")
        case.add_outliers()
        cases[granularity] = case
        results[granularity] = step(*case.operands, layer.shard(case.weights))[0]
        case.check(results[granularity])
    for granularity in GRANULARITIES:
        for other in set(GRANULARITIES) - {granularity}:
            with pytest.raises(AssertionError):
                cases[granularity].check(results[other])


def test_prequantised_input_has_equal_scales_within_a_group(layers, rng):
    for granularity in (128, "row"):
        config = dataclasses.replace(CONFIG, activation_granularity=granularity)
        layer, _ = layers(2, config)
        case = Case(rng, config, 2, 30)
        pair = jmm.quantize.quantize_e4m3(case.x)
        with pytest.raises(jmm.MegaMoEError, match=r"x sf: got scale bytes that differ within"):
            layer(pair, *case.operands[1:], layer.shard(case.weights))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 160), (160, 32), (2880, 96)])
def test_widths_that_are_not_whole_tiles(rng, hidden, intermediate, granularity):
    config = dataclasses.replace(
        CONFIG,
        hidden=hidden,
        intermediate=intermediate,
        max_tokens_per_rank=24,
        activation_granularity=granularity,
    )
    case = Case(rng, config, 4, 24, "zipf")
    with jmm.MegaMoE(config, mesh_of(4)) as layer:
        layer.buffer.poison()
        weights = layer.shard(case.weights)
        step = jax.jit(layer)
        y = step(*case.operands, weights)
        assert y.shape == (96, hidden)
        case.check(y)
        pair = jmm.quantize.quantize_e4m3(case.x, config.x_group)
        again = step(pair, *case.operands[1:], weights)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(y))
        assert jax.jit(layer)(case.x[:0], *(a[:0] for a in case.operands[1:]), weights).shape == (
            0,
            hidden,
        )

    # Padding by hand gives the same bits.
    padded = (config.padded_hidden, config.padded_intermediate)
    by_hand = dataclasses.replace(config, hidden=padded[0], intermediate=padded[1])
    h, i = padded[0] - hidden, padded[1] - intermediate
    dense = [
        jnp.pad(w, ((0, 0), *((0, n) for n in extra)))
        for w, extra in zip(
            jmm.dequantize_weights(case.weights), [(i, h), (i, h), (h, i)], strict=True
        )
    ]
    x = jnp.pad(case.x, ((0, 0), (0, h)))
    with jmm.MegaMoE(by_hand, mesh_of(4)) as layer:
        weights = layer.shard(jmm.quantize_weights(*dense))
        want = np.asarray(jax.jit(layer)(x, *case.operands[1:], weights))
    np.testing.assert_array_equal(np.asarray(y), want[:, :hidden])
    assert (want[:, hidden:] == 0).all()


def test_int64_expert_ids(layers, rng):
    layer, step = layers(2)
    case = Case(rng, CONFIG, 2, 30, "masked")
    weights = layer.shard(case.weights)
    with jax.enable_x64(True):
        wide = np.asarray(case.topk_idx, np.int64)
        wide[3, 0] = 2**40 + 1  # would be expert 1 if only 32 bits were looked at
        narrow = np.asarray(case.topk_idx).copy()
        narrow[3, 0] = -1
        got, stats = jax.jit(lambda *a: layer(*a, return_stats=True))(
            case.x, jnp.asarray(wide), case.topk_weights, weights
        )
    assert int(stats.out_of_range.sum()) == 1
    want = np.asarray(step(case.x, jnp.asarray(narrow), case.topk_weights, weights)[0])
    np.testing.assert_array_equal(np.asarray(got), want)


def test_int64_expert_ids_of_numpy_do_not_wrap(layers, rng):
    """Without x64 JAX narrows NumPy's int64 by dropping bits; 2^40 + 1 must not become expert 1."""
    layer, _ = layers(2)
    case = Case(rng, CONFIG, 2, 30)
    weights = layer.shard(case.weights)
    wide = np.asarray(case.topk_idx, np.int64)
    wide[3, 0], wide[7, 2] = 2**40 + 1, -(2**40) + 1
    narrow = np.where(np.abs(wide) > 2**31, -1, wide).astype(np.int32)
    got, stats = layer(case.x, wide, case.topk_weights, weights, return_stats=True)
    want = layer(case.x, narrow, case.topk_weights, weights)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert int(stats.out_of_range.sum()) == 2


def test_wide_ids_are_never_another_expert():
    """NumPy's int64 where the library sees it, x64 off: out of range wherever ids are taken."""
    wide = np.array([[2**32 + 3, 1], [-(2**32) + 3, 2]], np.int64)
    narrow = jnp.asarray([[-1, 1], [-1, 2]], jnp.int32)
    config = jmm.MegaMoEConfig(4, 2, 128, 128, 2, checked=False)
    case = Case(np.random.default_rng(4), config, 1, 2)
    mesh = mesh_of(1)
    with jmm.MegaMoE(config, mesh) as layer:
        weights = layer.shard(case.weights)
        spec = jax.P("ep")

        def local(body):
            return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))

        by_rank = [case.by_rank(a) for a in (case.x, case.topk_weights)]
        takers = {
            "layer": lambda ids: layer(case.x, ids, case.topk_weights, weights),
            "layer, jit": lambda ids: jax.jit(lambda x: layer(x, ids, case.topk_weights, weights))(
                case.x
            ),
            "local": lambda ids: local(lambda x, p, w: layer.local(x, ids, p, w))(
                case.x, case.topk_weights, weights
            ),
            "unfused": lambda ids: jmm.unfused.mega_moe(
                case.x, ids, case.topk_weights, case.weights, config, mesh, "ep"
            ),
            "unfused.local": lambda ids: local(
                lambda x, p, w: jmm.unfused.local(x, ids, p, w, config, axis="ep")
            )(case.x, case.topk_weights, case.weights),
            "reference": lambda ids: jmm.reference.mega_moe(
                by_rank[0], ids[None], by_rank[1], case.weights, config
            ),
            "load": lambda ids: jmm.routers.expert_load(ids, 4),
        }
        for name, take in takers.items():
            got, want = (np.asarray(take(ids), np.float32) for ids in (wide, narrow))
            np.testing.assert_array_equal(got, want, err_msg=name)
            assert want.any(), name
    config = dataclasses.replace(config, checked=True)
    with jmm.MegaMoE(config, mesh) as layer:
        for call in (layer, lambda *a: jax.jit(lambda x: layer(x, *a[1:]))(a[0])):
            with pytest.raises(jax.errors.JaxRuntimeError, match="expert id 2147483647"):
                call(case.x, wide, case.topk_weights, weights).block_until_ready()


def test_wide_token_ids_are_never_another_token():
    router = jmm.routers.deepseek_v4(routed_scaling_factor=1.0, top_k=2)
    table = np.array([[0, 1], [2, 3]], np.int64)
    logits = jnp.zeros((2, 4))
    idx, _ = router.from_logits(logits, tid2eid=table, token_ids=np.array([1, 2**32 + 1]))
    np.testing.assert_array_equal(idx, [[2, 3], [4, 4]])
    table[1] = 2**32 + 1, -(2**32) + 1
    idx, _ = router.from_logits(logits, tid2eid=table, token_ids=np.array([0, 1]))
    np.testing.assert_array_equal(idx, [[0, 1], [2**31 - 1, -(2**31)]])


def test_a_duplicate_expert_counts_twice(layers):
    layer, step = layers(2)
    rng = np.random.default_rng(3)
    case = Case(rng, CONFIG, 2, 8)
    idx = np.full((16, 3), -1, np.int32)
    weights = np.full((16, 3), 0.25, np.float32)
    idx[:, 0] = idx[:, 2] = 5
    case.topk_idx, case.topk_weights = jnp.asarray(idx), jnp.asarray(weights)
    twice, stats = step(*case.operands, layer.shard(case.weights))
    idx[:, 2] = -1
    once, _ = step(case.x, jnp.asarray(idx), case.topk_weights, layer.shard(case.weights))
    assert int(stats.tokens_per_expert[5]) == 32
    np.testing.assert_array_equal(
        np.asarray(twice, np.float32), 2 * np.asarray(once, np.float32)
    )  # doubling is exact in BF16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_token_stays_alone(layers, rng, bad):
    layer, step = layers(4)
    case = Case(rng, CONFIG, 4, 33, "zipf")
    weights = layer.shard(case.weights)
    clean = np.asarray(step(*case.operands, weights)[0], np.float32)
    x = np.array(case.x, np.float32)
    x[40, 17] = bad
    dirty = np.asarray(
        step(jnp.asarray(x, jnp.bfloat16), *case.operands[1:], weights)[0], np.float32
    )
    assert np.isnan(dirty[40]).all()
    others = np.arange(len(x)) != 40
    np.testing.assert_array_equal(dirty[others], clean[others])


def test_zero_and_tiny_rows(layers, rng):
    layer, step = layers(2)
    case = Case(rng, CONFIG, 2, 20)
    x = np.array(case.x, np.float32)
    x[0] = 0
    x[1] *= 2.0**-30  # scales go far below one, relative accuracy stays: about 2^-60 comes out
    case.x = jnp.asarray(x, jnp.bfloat16)
    y = np.asarray(step(*case.operands, layer.shard(case.weights))[0], np.float64)
    assert (y[0] == 0).all()
    truth, plain = case.truth()[1], case.reference()[1]
    assert 0 < np.linalg.norm(truth) < 2.0**-50
    assert np.linalg.norm(y[1] - truth) <= 2 * np.linalg.norm(plain - truth)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def everywhere(config, x, topk_weights, weights):
    """[N, H] float64 of one token's experts, by each implementation on one rank."""
    mesh, idx = mesh_of(1), jnp.zeros((1, 1), jnp.int32)
    p = jnp.full((1, 1), topk_weights, jnp.float32)
    with jmm.MegaMoE(config, mesh) as layer:
        results = {"layer": layer(x, idx, p, layer.shard(weights))}
    for differentiable in (False, True):
        results[f"unfused, {differentiable}"] = jmm.unfused.mega_moe(
            x, idx, p, weights, config, mesh, "ep", differentiable=differentiable
        )
    by_rank = jax.tree.map(lambda a: a[None], (x, idx, p))
    results["reference"] = jmm.reference.mega_moe(*by_rank, weights, config)[0]
    return {name: np.asarray(y, np.float64) for name, y in results.items()}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("byte", "code"), [(252, 7), (253, 5), (253, 6), (254, 2), (254, 7)])
def test_weights_that_are_no_fp32_numbers(byte, code, swapped):
    """6 * 2^127 times a small activation is one. `swapped`: in linear 1, where x is small."""
    config = jmm.MegaMoEConfig(1, 1, 128, 128, 1)

    def matrix(rows, code, byte):
        return np.full((1, rows, 64), code * 0x11, np.uint8), np.full((1, rows, 4), byte, np.uint8)

    # gate and up are g; linear 2 sums 128 of their products, rounded to E4M3.
    if swapped:
        first, second, x = (code, byte), (2, 127 - 7), 2.0**-120
    else:
        first, second, x = (2, 127 - 7 - 50), (code, byte), 1.0
    weights = jmm.ExpertWeights(*matrix(256, *first), *matrix(128, *second))
    g = 128 * x * E2M1[first[0]] * 2.0 ** (first[1] - 127)
    act = g / (1 + np.exp(-g)) * g
    exponent = np.floor(np.log2(act)) - 3
    act = np.rint(act * 2.0**-exponent) * 2.0**exponent
    want = 128 * act * E2M1[second[0]] * 2.0 ** (second[1] - 127)
    assert 2.0**-120 < want < 2.0**120
    for name, y in everywhere(config, jnp.full((1, 128), x, jnp.bfloat16), 1.0, weights).items():
        # One to E4M3, where FP32 may fall on the other side of a rounding, and one to BF16.
        assert (np.abs(y - want) <= 2.0**-3 * want).all(), name


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_tokens_and_weights(granularity):
    """BF16's largest number times zeros is zero, and times small weights a number."""
    config = jmm.MegaMoEConfig(1, 1, 128, 128, 1, activation_granularity=granularity)
    last = float(jnp.finfo(jnp.bfloat16).max)
    x = jnp.full((1, 128), last, jnp.bfloat16)

    def matrix(rows, code, byte):
        return np.full((1, rows, 64), code * 0x11, np.uint8), np.full((1, rows, 4), byte, np.uint8)

    zeros = jmm.ExpertWeights(*matrix(256, 0, 120), *matrix(128, 2, 120))
    for name, y in everywhere(config, x, 1.0, zeros).items():
        assert (y == 0).all(), name
    small = jmm.ExpertWeights(*matrix(256, 2, 2), *matrix(128, 2, 120))
    g = 128 * 240 * 2.0**120 * 2.0 ** (2 - 127)  # linear 2 sums 128 squares of it, times 2^-7
    for name, y in everywhere(config, x, 2.0**-20, small).items():
        want = g * g * 2.0**-20
        assert (np.abs(y - want) <= 2.0**-3 * want).all(), name

    dense = [np.full((1, 128, 128), 3.0e38, np.float32)] * 3
    weights = jmm.quantize_weights(*dense)
    for w in jmm.dequantize_weights(weights):
        assert np.isfinite(np.asarray(w)).all() and float(w[0, 0, 0]) == 3 * 2.0**126
    down = jmm.quantize_weights(np.full((1, 128, 128), 2.0**-7, np.float32), *[dense[0]] * 2)
    down = dataclasses.replace(
        down, w13=zeros.w13 | 0x22, w13_sf=np.full((1, 256, 4), 60, np.uint8)
    )
    act = (128 * 2.0 ** (60 - 127)) ** 2 / 2
    want = 128 * act * 3 * 2.0**126
    for name, y in everywhere(config, jnp.ones((1, 128), jnp.bfloat16), 1.0, down).items():
        assert (np.abs(y - want) <= 2.0**-3 * want).all(), name


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(ROUTINGS),
    num_ranks=st.sampled_from([2, 8]),
)
def test_random_routings(layers, seed, kind, num_ranks):
    rng = np.random.default_rng(seed)
    layer, step = layers(num_ranks)
    case = Case(rng, CONFIG, num_ranks, 37, kind)
    y, _ = step(*case.operands, layer.shard(case.weights))
    case.check(y)


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "intermediate"),
    [(8, 1, 128, 128), (8, 8, 128, 384), (24, 6, 640, 256), (256, 9, 128, 128)],
)
def test_other_shapes(experts, top_k, hidden, intermediate, rng):
    config = jmm.MegaMoEConfig(experts, top_k, hidden, intermediate, max_tokens_per_rank=24)
    case = Case(rng, config, 8, 24)
    with jmm.MegaMoE(config, mesh_of(8)) as layer:
        case.check(jax.jit(layer)(*case.operands, layer.shard(case.weights)))


def test_many_calls_with_fresh_routings(layers, rng):
    """Counters, epochs and the ring survive many calls whose loads differ."""
    layer, step = layers(4)
    case = Case(rng, CONFIG, 4, 96)
    weights = layer.shard(case.weights)
    for turn in range(60):
        kind = ROUTINGS[turn % len(ROUTINGS)]
        idx, p = routing(rng, 4 * 96, CONFIG.top_k, CONFIG.num_experts, kind, 4)
        case.topk_idx, case.topk_weights = jnp.asarray(idx), jnp.asarray(p)
        layer.buffer.poison()
        y, _ = step(*case.operands, weights)
        if turn % 12 == 0:
            case.check(y)
        assert np.isfinite(np.asarray(y, np.float32)).all()
