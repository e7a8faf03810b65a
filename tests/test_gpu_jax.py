"""The layer in JAX programs on GPUs: loops, collectives, several layers, gradients, meshes.

The same programs run on virtual CPU devices, so that what they expect is known to be right.
"""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from gpu_case import CONFIG, on_cpu, with_granularity
from jax_megamoe.config import GRANULARITIES
from moe_case import GpuCase as Case

TOKENS = 64
PLACES = [
    pytest.param(("cpu", 2), id="2 virtual"),
    pytest.param(("gpu", 1), id="1 GPU", marks=pytest.mark.gpu),
    pytest.param(("gpu", 2), id="2 GPUs", marks=pytest.mark.multi_gpu),
]
TWO_RANKS = [PLACES[0], PLACES[2]]


def mesh_on(platform, num_ranks, order=slice(None), shape=None, names=("ep",)):
    devices = np.array(jax.devices(platform)[:num_ranks])[order].reshape(shape or (-1,))
    auto = (jax.sharding.AxisType.Auto,) * devices.ndim
    return jax.sharding.Mesh(devices, names, axis_types=auto)


class Setup:
    """A layer, a case and its operands on the devices of a mesh."""

    def __init__(self, config, mesh, seed=5, kind="uniform", tokens=TOKENS):
        ranks = int(mesh.devices.size)
        with on_cpu():
            self.case = Case(np.random.default_rng(seed), config, ranks, tokens, kind)
        self.layer = jmm.MegaMoE(config, mesh)
        self.place = NamedSharding(mesh, P(mesh.axis_names))
        self.x, self.idx, self.p = jax.device_put(self.case.operands, self.place)
        self.weights = self.layer.shard(
            jax.device_put(self.case.weights, NamedSharding(mesh, P("ep")))
        )

    @property
    def operands(self):
        return self.x, self.idx, self.p, self.weights

    def check(self, y, num_tokens=None):
        with on_cpu():
            self.case.check(np.asarray(y, np.float64), num_tokens)

    def mapped(self, body, out_specs):
        return jax.jit(
            jax.shard_map(body, mesh=self.layer.mesh, in_specs=(P("ep"),) * 4, out_specs=out_specs)
        )


@pytest.fixture
def setup():
    made = []

    def make(place, config=None, **options):
        config = with_granularity(128) if config is None else config
        made.append(Setup(config, mesh_on(*place), **options))
        return made[-1]

    yield make
    for one in made:
        one.layer.close()


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# Programs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_scan_over_layers_with_a_psum_in_each_step(setup, place):
    one = setup(place)

    def body(x, idx, p, w):
        def step(carry, shift):
            y = one.layer.local(carry, jnp.roll(idx, shift, axis=0), p, w)
            total = jax.lax.psum(jnp.sum(jnp.abs(y.astype(jnp.float32))), "ep")
            return jnp.tanh(y), total

        return jax.lax.scan(step, x, jnp.arange(4))

    y, totals = one.mapped(body, (P("ep"), P()))(*one.operands)
    step, x = jax.jit(one.layer), one.x  # the same by hand, a call at a time
    rows = one.case.by_rank(np.asarray(one.idx))
    for shift in range(4):
        idx = np.roll(rows, shift, axis=1).reshape(one.idx.shape)
        out = step(x, jax.device_put(idx, one.place), one.p, one.weights)
        x = jax.jit(jnp.tanh)(out)
        # FP32 sums of n numbers of one sign, in another order.
        exact = np.abs(np.asarray(out, np.float64)).sum()
        np.testing.assert_allclose(totals[shift], exact, rtol=out.size * 2.0**-24)
    same(y, x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("granularity", [32, "row"])
def test_scan_over_a_stack_of_layers(setup, place, granularity):
    one = setup(place, with_granularity(granularity))
    first = jax.tree.map(np.asarray, one.case.weights)
    layers = [first, jax.tree.map(lambda a: a[::-1], first), first]
    stack = one.layer.shard(jax.tree.map(lambda *arrays: np.stack(arrays), *layers))
    alone = [one.layer.shard(weights) for weights in layers]
    for number, weights in enumerate(alone):
        jax.tree.map(lambda every, a, i=number: same(every[i], a), stack, weights)

    def step(x, weights):
        y = one.layer(x, one.idx, one.p, weights)
        return jnp.tanh(y), y

    _, ys = jax.jit(lambda x, stack: jax.lax.scan(step, x, stack))(one.x, stack)
    call, x = jax.jit(one.layer), one.x  # the same by hand, a call at a time
    for y, weights in zip(ys, alone, strict=True):
        same(y, call(x, one.idx, one.p, weights))
        x = jax.jit(jnp.tanh)(y)


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "free"])
@pytest.mark.parametrize("place", TWO_RANKS)
def test_collectives_between_calls(setup, place, chained):
    """Ranks must not block each other; XLA may run a free collective beside a call."""
    one = setup(place)

    def body(x, idx, p, w):
        wide = x.astype(jnp.float32)
        total, ys = jax.lax.psum(wide, "ep"), []
        for turn in range(3):
            if chained:
                x += (0 * total).astype(x.dtype)
            ys.append(one.layer.local(x, jnp.roll(idx, turn, axis=0), p, w))
            # Zero, but XLA cannot know that: numbers may be a NaN.
            after = 0 * ys[-1].astype(jnp.float32) if chained else 0
            total += jax.lax.psum(wide * (turn + 1) + after, "ep")
        gathered = jax.lax.all_gather(ys[-1], "ep", axis=0, tiled=True)
        return jnp.stack(ys), total, gathered[: x.shape[0]]

    step = one.mapped(body, (P(None, "ep"), P(), P("ep")))
    first = jax.block_until_ready(step(*one.operands))
    same(first[0][0], jax.jit(one.layer)(*one.operands))
    want = 7 * np.asarray(one.x, np.float32).reshape(2, TOKENS, -1).sum(axis=0)
    np.testing.assert_allclose(first[1], want, rtol=2.0**-20, atol=2.0**-18)
    for _ in range(20):
        for got, expected in zip(step(*one.operands), first, strict=True):
            same(got, expected)


@pytest.mark.parametrize("place", PLACES)
def test_layers_of_two_shapes_in_one_program_again_and_again(setup, place):
    """Command buffers hold addresses: operands move about, results must not."""
    one = setup(place, kind="masked")
    other = setup(place, with_granularity("row", top_k=2, activation=jmm.swiglu()), seed=6)

    @jax.jit
    def step(x, y, weights, other_weights):
        a = one.layer(x, one.idx, one.p, weights)
        b = other.layer(y, other.idx, other.p, other_weights)
        c = one.layer(-x, one.idx, one.p, weights)
        return a, b, c

    alone = (
        jax.jit(one.layer)(*one.operands),
        jax.jit(other.layer)(*other.operands),
        jax.jit(one.layer)(-one.x, *one.operands[1:]),
    )
    one.check(alone[0])
    other.check(alone[1])
    for turn in range(12):
        junk = [jax.device_put(np.ones((turn + 1, 1 << 14), np.float32) * i) for i in range(4)]
        x, y = (jax.device_put(np.asarray(s.x), s.place) for s in (one, other))
        for got, want in zip(step(x, y, one.weights, other.weights), alone, strict=True):
            same(got, want)
        del junk


@pytest.mark.parametrize("place", PLACES)
def test_many_steps_without_waiting(setup, place):
    one = setup(place)
    step = jax.jit(one.layer)
    want = step(*one.operands)
    one.check(want)
    outs = [step(*one.operands) for _ in range(100)]
    for y in outs[::33]:
        same(y, want)


@pytest.mark.parametrize("place", PLACES)
def test_donated_tokens(setup, place):
    one = setup(place)
    want = np.asarray(jax.jit(one.layer)(*one.operands))
    donating = jax.jit(one.layer, donate_argnums=0)
    for _ in range(3):
        x = jax.device_put(np.asarray(one.case.x), one.place)
        same(donating(x, *one.operands[1:]), want)


# Operands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantised_pairs_and_num_tokens(setup, place, granularity):
    one = setup(place, with_granularity(granularity))
    step = jax.jit(lambda *a, **k: one.layer(*a, return_stats=True, **k))
    want, _ = step(*one.operands)
    one.check(want)
    with on_cpu():
        pair = jmm.quantize.quantize_e4m3(one.case.x, one.case.config.x_group)
    pair = jax.device_put(pair, one.place)
    same(step(pair, *one.operands[1:])[0], want)
    typed = (
        jax.lax.bitcast_convert_type(pair[0], jnp.float8_e4m3fn),
        jax.lax.bitcast_convert_type(pair[1], jnp.float8_e8m0fnu),
    )
    same(step(typed, *one.operands[1:])[0], want)
    counts = np.array([23, 0][: place[1]], np.int32)
    y, stats = step(*one.operands, num_tokens=jax.device_put(counts, one.place))
    one.check(y, num_tokens=counts)
    assert int(np.sum(stats.received_rows)) == 23 * CONFIG.top_k
    past = np.arange(TOKENS)[None] >= counts[:, None]
    assert (np.asarray(y, np.float32)[past.reshape(-1)] == 0).all()


@pytest.mark.parametrize("place", PLACES[:2])
def test_each_granularity_has_its_own_scales(setup, place):
    """What one granularity gives is refused by the rule for another one."""
    ones, results = {}, {}
    for granularity in GRANULARITIES:
        one = ones[granularity] = setup(place, with_granularity(granularity), kind="zipf")
        with on_cpu():
            one.case.add_outliers()
        x = jax.device_put(one.case.x, one.place)
        by_expert = NamedSharding(one.layer.mesh, P("ep"))
        weights = one.layer.shard(jax.device_put(one.case.weights, by_expert))
        results[granularity] = jax.jit(one.layer)(x, one.idx, one.p, weights)
        one.check(results[granularity])
    for granularity in GRANULARITIES:
        for other in set(GRANULARITIES) - {granularity}:
            with pytest.raises(AssertionError):
                ones[granularity].check(results[other])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("granularity", [32, "row"])
def test_widths_that_are_not_whole_tiles(setup, place, granularity):
    config = with_granularity(granularity, hidden=160, intermediate=96)
    one = setup(place, config, kind="zipf")
    y = jax.jit(one.layer)(*one.operands)
    assert y.shape == (place[1] * TOKENS, 160)
    one.check(y)


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_those_of_the_unfused_layer(setup, place):
    """Through two residual layers, the second at the point that the first one really gave.

    Per layer the backward pass rounds four times to BF16, 2^-8 each in norm; doubled, as in
    tests/test_unfused.py. (At the unfused layer's own point the gradient is another one: clamps and
    roundings to E4M3 decide otherwise there.)
    """
    one = setup(place, kind="masked")
    mesh = one.layer.mesh
    with on_cpu():
        c = np.random.default_rng(1).standard_normal(one.x.shape).astype(jnp.bfloat16)
    c = jax.device_put(c, one.place)
    plain_weights = jax.device_put(one.case.weights, NamedSharding(mesh, P("ep")))

    @jax.jit
    def gradient(x, p):
        def loss(x, p):
            y = x + one.layer(x, one.idx, p, one.weights)
            return jnp.sum((one.layer(y, one.idx, p, one.weights) * c).astype(jnp.float32))

        return jax.grad(loss, (0, 1))(x, p)

    @jax.jit
    def pull_back(x, p, cotangent):
        def plain(x, p):
            config = one.case.config
            return jmm.unfused.mega_moe(
                x, one.idx, p, plain_weights, config, mesh, "ep", differentiable=True
            )

        return jax.vjp(plain, x, p)[1](cotangent)

    y = one.x + jax.jit(one.layer)(*one.operands)
    by_y, second_by_p = pull_back(y, one.p, c)
    by_x, first_by_p = pull_back(one.x, one.p, by_y)
    want = by_y + by_x, second_by_p + first_by_p
    for got, expected in zip(gradient(one.x, one.p), want, strict=True):
        got, expected = (np.asarray(g, np.float64) for g in (got, expected))
        assert np.linalg.norm(expected) > 0
        limit = 2 * 2 * 4 * 2.0**-8 * np.linalg.norm(expected)
        assert np.linalg.norm(got - expected) <= limit


# Meshes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", TWO_RANKS)
def test_the_order_of_the_mesh_decides_the_ranks(setup, place):
    one = setup(place)
    want = jax.jit(one.layer)(*one.operands)
    turned = Setup(one.case.config, mesh_on(*place, order=slice(None, None, -1)))
    same(jax.jit(turned.layer)(*turned.operands), want)
    turned.layer.close()


@pytest.mark.parametrize("place", TWO_RANKS)
def test_two_groups_of_one_rank_each(place):
    """A data axis: every place on it is an expert-parallel group, with all experts."""
    mesh = mesh_on(*place, shape=(2, 1), names=("data", "ep"))
    one = Setup(with_granularity("row"), mesh)
    assert one.layer.buffer.num_groups == 2 and one.layer.num_ranks == 1
    one.check(jax.jit(one.layer)(*one.operands))
    one.layer.close()


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", TWO_RANKS)
def test_a_rank_that_does_not_enter_the_call(setup, place):
    one = setup(place, with_granularity(128, timeout_s=1.0))

    def body(x, idx, p, w):
        enters = jax.lax.axis_index("ep") == 0
        return jax.lax.cond(enters, lambda: one.layer.local(x, idx, p, w), lambda: x)

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=one.layer.mesh,
            in_specs=(P("ep"),) * 4,
            out_specs=P("ep"),
            check_vma=False,
        )
    )
    errors = (jmm.MegaMoERuntimeError, jax.errors.JaxRuntimeError)
    with pytest.raises(errors) as caught:
        jax.block_until_ready(step(*one.operands))
        for _ in range(1200):  # on GPUs nobody waits for the kernel's report
            time.sleep(0.05)
            one.layer.check_failures()
    text = str(caught.value)
    assert re.search(r"timed out after 1 s: .*(missing rank 1|here rank 1)", text), text
    one.layer.check_failures()
    one.check(jax.jit(one.layer)(*one.operands))
