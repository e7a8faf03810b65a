"""Blocks of every family against float64, and everything that can be wrong with them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_gpu_layer import gpu_mesh

import checkpoint_files as files
import jax_megamoe as jmm
from block_case import CASES, BlockCase, rounded_experts
from checkpoint_files import EXPERTS, HIDDEN, TOP_K, VOCAB
from gpu_case import on_cpu
from jax_megamoe import blocks, routers
from jax_megamoe.errors import MegaMoEError
from router_oracle import assert_routes

TOKENS = 32
LOADED = {"requantize": True}


def mesh_of(shape, axes, kind="Auto"):
    types = (getattr(jax.sharding.AxisType, kind),) * len(axes)
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, types, devices=devices)


def data_ep(kind="Auto"):
    return mesh_of((2, 2), ("data", "ep"), kind)


def open_block(case, mesh=None, **options):
    mesh = data_ep() if mesh is None else mesh
    options = {"max_tokens_per_rank": TOKENS, "timeout_s": 60.0} | options
    return blocks.MoEBlock.of(case.checkpoint, mesh, **options)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    @functools.cache
    def make(name, layer):
        rng = np.random.default_rng([*name.encode(), layer])
        return BlockCase(rng, name, layer, tmp_path_factory.mktemp("model"), TOKENS)

    return make


def routed(case, block, weights):
    """The block's own routing, after comparing it with the oracle's."""
    table = weights.router.get("tid2eid")
    idx, w = block.router(
        jnp.asarray(case.x),
        weights.router["weight"],
        weights.router.get("bias"),
        tid2eid=table,
        token_ids=None if table is None else jnp.asarray(case.token_ids, jnp.int32),
    )
    # Logits are sums of H products of order one, with weights that lie within a few powers of two.
    assert_routes((idx, w), case.routes64(), 64 * case.x.shape[1])
    return idx, w


# Results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, layer", CASES)
def test_block(name, layer, cases):
    case = cases(name, layer)
    loaded = blocks.load(case.checkpoint, layer, **LOADED)
    with open_block(case) as block:
        assert block.config.activation == case.config.activation
        y, stats = jax.jit(block, static_argnames="return_stats")(
            case.x, block.shard(loaded), token_ids=case.token_ids, return_stats=True
        )
        assert y.dtype == jnp.bfloat16
        idx, w = routed(case, block, loaded)
        case.check(y, idx, w)
    load = np.bincount(np.asarray(idx).ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.tokens_per_expert, load)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu)],
)
@pytest.mark.parametrize("name, layer", CASES)
def test_block_on_gpus(name, layer, num_ranks, cases):
    """Router and shared expert are computed there as well; a product in TF32 would be noticed."""
    with on_cpu():
        case = cases(name, layer)
        loaded = blocks.load(case.checkpoint, layer, **LOADED)
    with open_block(case, gpu_mesh(num_ranks)) as block:
        assert block.layer.backend == "sm_90a"
        y = jax.jit(block)(case.x, block.shard(loaded), token_ids=case.token_ids)
        idx, w = routed(case, block, loaded)
    with on_cpu():
        case.check(y, np.asarray(idx), np.asarray(w))


def test_the_rule_notices_what_is_missing(cases):
    case = cases("V4", 1)
    weights = blocks.load(case.checkpoint, 1)
    with open_block(case) as block:
        good = block.shard(weights)
        idx, w = routed(case, block, weights)
        swapped = dict(good.shared, gate=good.shared["up"], up=good.shared["gate"])
        for bad in (good._replace(shared={}), good._replace(shared=swapped)):
            y = block(case.x, bad)
            with pytest.raises(AssertionError):
                case.check(y, idx, w)
    with open_block(case, shared_activation=jmm.swiglu()) as block:
        y = block(case.x, good)
        with pytest.raises(AssertionError):
            case.check(y, idx, w)
        unclamped = jmm.blocks.shared_expert(jnp.asarray(case.x), weights.shared, jmm.swiglu())
        clamped = jmm.blocks.shared_expert(jnp.asarray(case.x), weights.shared, jmm.swiglu(10.0))
        # One rounding of y to BF16 on either side, and one of the routed part.
        moved = np.asarray(y, np.float64) + np.asarray(clamped - unclamped, np.float64)
        case.check(moved, idx, w)


def test_the_rule_notices_experts_without_their_biases(cases):
    case = cases("gpt-oss", 1)
    loaded = blocks.load(case.checkpoint, 1)
    with open_block(case) as block:
        idx, w = routed(case, block, loaded)
        for name in ("b13", "b2"):
            zeros = {name: np.zeros_like(getattr(loaded.experts, name))}
            experts = dataclasses.replace(loaded.experts, **zeros)
            y = block(case.x, block.shard(loaded._replace(experts=experts)))
            with pytest.raises(AssertionError):
                case.check(y, idx, w)


def test_the_rule_notices_a_latent_without_its_norm(cases):
    case = cases("Kimi-K3", 1)
    loaded = blocks.load(case.checkpoint, 1)
    with open_block(case) as block:
        idx, w = routed(case, block, loaded)
        latent = {"down": loaded.latent["down"], "up": loaded.latent["up"]}
        y = block(case.x, block.shard(loaded._replace(latent=latent)))
        with pytest.raises(AssertionError):
            case.check(y, idx, w)
    eps = case.model.text_config["rms_norm_eps"]
    assert block._site.norm_eps == eps != 1e-6


def test_the_mesh_does_not_matter(cases):
    case = cases("V4", 0)
    loaded = blocks.load(case.checkpoint, 0)
    results = []
    for mesh in (mesh_of((1,), ("ep",)), mesh_of((4,), ("ep",)), data_ep("Explicit")):
        with open_block(case, mesh) as block:
            y = block(case.x, block.shard(loaded), token_ids=case.token_ids)
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(mesh.axis_names)), 2)
            results.append(np.asarray(y))
    for y in results[1:]:
        np.testing.assert_array_equal(y, results[0])


def test_data_axis_without_tokens(cases):
    case = cases("V3", 1)
    loaded = blocks.load(case.checkpoint, 1, **LOADED)
    with open_block(case) as block, open_block(case, token_axes=("ep",)) as other:
        want = block(case.x, block.shard(loaded))
        got = other(case.x, other.shard(loaded))
    assert got.sharding.spec == P(("ep",), None) or got.sharding.spec == P("ep")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_with_other_code(check_vma, cases):
    case, mesh = cases("V4", 0), data_ep()
    tokens = P(("data", "ep"))
    with open_block(case, mesh) as block:
        weights = block.shard(blocks.load(case.checkpoint, 0))
        want = block(case.x, weights, token_ids=case.token_ids)

        def residual(x, weights, token_ids):
            y, stats = block.local(x, weights, token_ids=token_ids, return_stats=True)
            assert stats.received_rows.shape == (1,)
            return x + y

        specs = (tokens, blocks.BlockWeights(P("ep"), P(), P(), P()), tokens)
        model = jax.shard_map(
            residual, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=check_vma
        )
        got = jax.jit(model)(case.x, weights, case.token_ids)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(jnp.asarray(case.x) + want))


def test_layers_of_a_model_share_a_block(cases):
    case = cases("V4", 0)
    with open_block(case) as block:
        layers = [block.shard(blocks.load(case.checkpoint, layer)) for layer in (0, 1)]

        @jax.jit
        def model(x, layers, token_ids):
            for weights in layers:
                x = block(x, weights, token_ids=token_ids)  # layer 1 has no use for them
            return x

        got = model(case.x, layers, case.token_ids)
        want = block(block(case.x, layers[0], token_ids=case.token_ids), layers[1])
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("name, layer", [("V4", 0), ("Kimi-K3", 1), ("gpt-oss", 1), ("Qwen2", 1)])
def test_padding_is_zero_and_reaches_nothing(name, layer, cases):
    case = cases(name, layer)
    mask = case.rng.random(TOKENS) < 0.6
    x = np.where(mask[:, None], case.x, np.nan).astype(ml_dtypes.bfloat16)
    ids = np.where(mask, case.token_ids, VOCAB + 5)
    with open_block(case) as block:
        weights = block.shard(blocks.load(case.checkpoint, layer, **LOADED))
        want = np.asarray(block(case.x, weights, token_ids=case.token_ids))

        def loss(x, w_gate, shared, latent):
            router = weights.router | {"weight": w_gate}
            changed = weights._replace(router=router, shared=shared, latent=latent)
            y = block(x, changed, token_ids=ids, mask=mask)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        floats = weights.router["weight"], weights.shared, weights.latent
        (dx, *others), y = gradient(x, *floats)
    np.testing.assert_array_equal(np.asarray(y)[mask], want[mask])
    assert not np.asarray(y)[~mask].any()
    assert not np.asarray(dx)[~mask].any() and np.asarray(dx)[mask].any()
    for leaf in jax.tree.leaves(others):
        assert np.isfinite(np.asarray(leaf, np.float32)).all() and np.asarray(leaf).any()


def test_gradients_of_the_shared_expert_are_summed_over_devices(cases):
    case = cases("V3", 1)
    rng = np.random.default_rng(5)
    dy = rng.normal(size=case.x.shape).astype(ml_dtypes.bfloat16)
    mesh = data_ep()
    with open_block(case, mesh) as block:
        weights = block.shard(blocks.load(case.checkpoint, 1, **LOADED))

        def loss(shared):
            y = block(case.x, weights._replace(shared=shared))
            return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

        got = np.asarray(jax.jit(jax.grad(loss))(weights.shared)["down"], np.float64)
    x, dy = case.x.astype(np.float64), dy.astype(np.float64)
    gate, up = (x @ case.shared[name].T for name in ("gate", "up"))
    acts = gate / (1 + np.exp(-gate)) * up
    # acts are rounded to BF16, and so are each device's part of the sum and sums of parts.
    bound = (2 + mesh.size) * 2.0**-8 * (np.abs(dy).T @ np.abs(acts))
    assert np.all(np.abs(got - dy.T @ acts) <= bound)


def test_gradients_of_biases_are_summed_over_data(cases):
    case = cases("gpt-oss", 1)
    dy = np.random.default_rng(6).normal(size=case.x.shape).astype(ml_dtypes.bfloat16)
    loaded = blocks.load(case.checkpoint, 1)
    with open_block(case) as block:
        idx, w = (np.asarray(a) for a in routed(case, block, loaded))
        weights = block.shard(loaded)

        def loss(b2):
            experts = dataclasses.replace(weights.experts, b2=b2)
            y = block(case.x, weights._replace(experts=experts))
            return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

        got = np.asarray(jax.jit(jax.grad(loss))(weights.experts.b2), np.float64)[:, :HIDDEN]
    of_slots = w[..., None] * dy.astype(np.float64)[:, None]  # a row's weight times dy
    want, size = np.zeros((2, EXPERTS, HIDDEN))
    np.add.at(want, idx, of_slots)
    np.add.at(size, idx, np.abs(of_slots))
    # Rows are BF16, and their cotangents with them; sums are FP32.
    assert np.all(np.abs(got - want) <= 2.0**-8 * size)


def test_gradients_of_the_router_are_summed_over_devices(cases):
    case = cases("V4", 0)
    loaded = blocks.load(case.checkpoint, 0)

    def gradient(block):
        weights = block.shard(loaded)

        def loss(w_gate, mask):
            router = dict(weights.router, weight=w_gate)
            y = block(case.x, weights._replace(router=router), token_ids=case.token_ids, mask=mask)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        step = jax.jit(jax.grad(loss))
        w_gate = weights.router["weight"].astype(jnp.float32)
        return lambda mask: np.asarray(step(w_gate, mask), np.float64)

    with open_block(case) as block:
        together = gradient(block)(np.ones(TOKENS, bool))
    with open_block(case, mesh_of((1,), ("ep",))) as block:
        of_tokens = gradient(block)
        parts = np.stack([of_tokens(mask) for mask in np.eye(TOKENS, dtype=bool)])
    # A token whose weights do not depend on its logits to first order has only rounding to show.
    assert np.count_nonzero(np.abs(parts).sum(axis=(1, 2)) > 1) > TOKENS // 2
    bound = TOKENS * 2.0**-24 * np.abs(parts).sum(axis=0)  # sums of FP32 in any order
    assert np.all(np.abs(together - parts.sum(axis=0)) <= bound)


def test_export(cases):
    pytest.importorskip("flatbuffers", reason="needs pip install 'jax-megamoe[export]'")
    case = cases("V4", 0)
    with open_block(case) as block:
        weights = block.shard(blocks.load(case.checkpoint, 0))
        ids = jnp.asarray(case.token_ids, jnp.int32)

        @jax.jit
        def run(x, weights, ids):
            return block(x, weights, token_ids=ids)

        exported = jax.export.export(run, disabled_checks=jmm.export_checks())(case.x, weights, ids)
        again = jax.export.deserialize(exported.serialize())
        got = again.call(case.x, weights, ids)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(run(case.x, weights, ids)))


# Loading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, layer", CASES)
def test_load(name, layer, cases):
    case = cases(name, layer)
    weights = blocks.load(case.checkpoint, layer, **LOADED)
    assert (weights.experts.b2 is None) == (case.family != "gpt_oss")
    for field in ("w13", "w13_sf", "w2", "w2_sf", "b13", "b2"):
        want = getattr(rounded_experts(case.model.expected[layer]), field)
        np.testing.assert_array_equal(getattr(weights.experts, field), want)
    names = {"weight"} | ({"tid2eid"} if case.table is not None else set())
    names |= {"bias"} if case.bias is not None else set()
    assert set(weights.router) == names
    if case.table is not None:
        assert weights.router["tid2eid"].dtype == np.int32
        np.testing.assert_array_equal(weights.router["tid2eid"], case.table)
    assert set(weights.latent) == set(case.latent)
    for role, matrix in weights.latent.items():
        np.testing.assert_array_equal(matrix.astype(np.float64), case.latent[role])
    assert set(weights.shared) == set(case.shared)
    for role, matrix in weights.shared.items():
        assert matrix.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(matrix.astype(np.float64), case.shared[role])


def test_a_part_of_the_experts(cases):
    case = cases("V4", 1)
    weights = blocks.load(case.checkpoint, 1, experts=range(2, 4))
    np.testing.assert_array_equal(weights.experts.w2, case.model.expected[1]["w2"][2:4])
    assert weights.router["weight"].shape == (EXPERTS, HIDDEN)


@pytest.mark.parametrize(
    "name, layer, want",
    [
        ("V4", 1, routers.deepseek_v4(top_k=TOP_K, routed_scaling_factor=1.5)),
        ("V3", 1, routers.deepseek_v3(top_k=TOP_K, n_group=2, topk_group=1)),
        ("Kimi-K2", 1, routers.kimi_k2(top_k=TOP_K, routed_scaling_factor=2.5)),
        ("Kimi-K3", 1, routers.kimi_k3(top_k=TOP_K)),
        ("gpt-oss", 1, routers.gpt_oss(top_k=TOP_K)),
        ("gpt-oss original", 0, routers.gpt_oss(top_k=TOP_K)),
        ("Qwen3", 1, routers.qwen3_moe(top_k=TOP_K)),
        ("Qwen2", 1, routers.qwen3_moe(top_k=TOP_K, norm_topk_prob=False)),
    ],
)
def test_make_router(name, layer, want, cases):
    assert cases(name, layer).checkpoint.make_router() == want


def changed(maker, tmp_path, **entries):
    """A checkpoint whose config.json has other entries; None takes one out."""
    model = maker(np.random.default_rng(0), calm=True)
    for name, value in entries.items():
        model.text_config.pop(name, None)
        if value is not None:
            model.text_config[name] = value
    return jmm.checkpoints.open(files.write(model, tmp_path))


def test_qwen3_without_the_entry_has_the_default_of_its_class(tmp_path):
    checkpoint = changed(files.qwen3_moe, tmp_path, norm_topk_prob=None)
    assert not checkpoint.make_router().norm_topk_prob


@pytest.mark.parametrize(
    "maker, entries, message",
    [
        (files.deepseek_v3, {"scoring_func": "softmax"}, r"scoring_func: got 'softmax'; exp.*'sig"),
        (files.deepseek_v3, {"topk_method": "greedy"}, r"topk_method: got 'greedy'; .*'noaux_tc'"),
        (files.deepseek_v3, {"n_group": None}, r"n_group: got no such entry"),
        (files.deepseek_v4, {"scoring_func": "sigmoid"}, r"scoring_func: .*'sqrtsoftplus'"),
        (files.deepseek_v4, {"routed_scaling_factor": None}, r"routed_scaling_factor: got no such"),
        (files.kimi_k3, {"moe_router_activation_func": "softmax"}, r"activation_func: got 'softm"),
    ],
)
def test_a_config_that_describes_another_router(maker, entries, message, tmp_path):
    with pytest.raises(MegaMoEError, match=message):
        changed(maker, tmp_path, **entries).make_router()


def test_kimi_k3_says_how_its_norm_is_regularised(tmp_path):
    checkpoint = changed(files.kimi_k3, tmp_path, rms_norm_eps=None)
    with pytest.raises(MegaMoEError, match="rms_norm_eps: got no such entry"):
        blocks.MoEBlock.of(checkpoint, data_ep(), max_tokens_per_rank=8)


def test_tables_that_cannot_be(tmp_path, rng):
    model = files.deepseek_v4(rng)
    table = model.tensors["layers.0.ffn.gate.tid2eid"]
    table[3, 1] = EXPERTS
    checkpoint = jmm.checkpoints.open(files.write(model, tmp_path / "a"))
    with pytest.raises(
        MegaMoEError, match=r"tid2eid of layer 0 .*got numbers from 0 to 4; .*0 to 3"
    ):
        blocks.load(checkpoint, 0)
    table[3, 1] = -1
    model.tensors["layers.0.ffn.gate.bias"] = files.f32(rng, EXPERTS)
    checkpoint = jmm.checkpoints.open(files.write(model, tmp_path / "b"))
    with pytest.raises(MegaMoEError, match="got a bias as well"):
        blocks.load(checkpoint, 0)
    del model.tensors["layers.0.ffn.gate.bias"]
    checkpoint = jmm.checkpoints.open(files.write(model, tmp_path / "c"))
    assert blocks.load(checkpoint, 0).router["tid2eid"][3, 1] == -1


@pytest.mark.parametrize("num_hash_layers, layer", [(0, 0), (2, 1)])
def test_hash_layers_that_config_does_not_know(num_hash_layers, layer, tmp_path):
    checkpoint = changed(files.deepseek_v4, tmp_path, num_hash_layers=num_hash_layers)
    message = rf"router of layer {layer} .*tid2eid in the first {num_hash_layers} layers"
    with pytest.raises(MegaMoEError, match=message):
        blocks.load(checkpoint, layer)


def test_a_config_without_a_word_about_hash_layers(tmp_path):
    checkpoint = changed(files.deepseek_v4, tmp_path, num_hash_layers=None)
    assert "tid2eid" in blocks.load(checkpoint, 0).router
    assert "bias" in blocks.load(checkpoint, 1).router


# Mistakes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def placed(cases):
    case = cases("V4", 0)
    block = open_block(case, mesh_of((2,), ("ep",)))
    return case, block, block.shard(blocks.load(case.checkpoint, 0))


def without(tree, name):
    return {key: value for key, value in tree.items() if key != name}


MISTAKES = {
    "no token_ids": (lambda x, w: (x, w, None), r"token_ids: got None; .*looked up by token"),
    "token_ids of others": (
        lambda x, w: (x, w, np.zeros(4, np.int32)),
        r"token_ids: got int32\[4\]; .*\[32\]",
    ),
    "token_ids that are no integers": (
        lambda x, w: (x, w, np.zeros(32, np.float32)),
        r"token_ids: got float32\[32\]",
    ),
    "x in FP32": (
        lambda x, w: (x.astype(np.float32), w),
        r"x: got float32\[32, 192\]; expected bf",
    ),
    "x of a batch": (
        lambda x, w: (x[None], w),
        r"x: got bfloat16\[1, 32, 192\]; expected a first axis that is a multiple of 2",
    ),
    "x of another width": (
        lambda x, w: (x[:, :64], w),
        r"x: got bfloat16\[32, 64\]; expected bfloat16 \[..., 192\]\. The block's weights are "
        r"those of a model with 192 channels",
    ),
    "x a list": (lambda x, w: ([1.0], w), r"x: got list of 1; expected bfloat16 \[..., 192\]"),
    "x None": (lambda x, w: (None, w), r"x: got None; expected bfloat16 \[..., 192\]"),
    "router None": (
        lambda x, w: (x, w._replace(router=None)),
        r"weights.router: got None; expected a dict of arrays.*blocks\.load",
    ),
    "shared an array": (
        lambda x, w: (x, w._replace(shared=jnp.zeros(3))),
        r"weights.shared: got float32\[3\]; expected a dict of arrays",
    ),
    "no experts": (
        lambda x, w: (x, w._replace(experts=None)),
        r"weights.experts: got None; expected jax_megamoe.ExpertWeights",
    ),
    "experts of another number": (
        lambda x, w: (x, w._replace(experts=jax.tree.map(lambda a: a[:2], w.experts))),
        r"weights.w13 \(cpu layout\): got uint8\[2, .*expected uint8 \[4, ",
    ),
    "token ids of another length": (
        lambda x, w: (x, w, jnp.zeros(16, jnp.int32)),
        r"token_ids: got int32\[16\]; expected int32 or int64 \[32\]. One id for each token",
    ),
    "rows that do not divide": (
        lambda x, w: (x[:31], w),
        r"x: got bfloat16\[31, 192\]; .*multiple of 2 token shards",
    ),
    "no BlockWeights": (lambda x, w: (x, w.experts), r"weights: got jax_megamoe.ExpertWeights"),
    "no weight": (
        lambda x, w: (x, w._replace(router=without(w.router, "weight"))),
        r"weights.router: got \['tid2eid'\]",
    ),
    "a router of more experts": (
        lambda x, w: (x, w._replace(router=w.router | {"weight": jnp.zeros((8, HIDDEN))})),
        r"weights.router\['weight'\]: got float32\[8, 192\]; .*\[4, 192\]",
    ),
    "an unknown part of the router": (
        lambda x, w: (x, w._replace(router=w.router | {"scale": jnp.ones(1)})),
        r"weights.router: got .*'scale'",
    ),
    "a table and a bias": (
        lambda x, w: (x, w._replace(router=w.router | {"bias": jnp.zeros(EXPERTS)})),
        r"bias: got an array besides tid2eid",
    ),
    "half a shared expert": (
        lambda x, w: (x, w._replace(shared=without(w.shared, "up"))),
        r"weights.shared: got \['down', 'gate'\]",
    ),
    "down of another width": (
        lambda x, w: (x, w._replace(shared=w.shared | {"down": w.shared["down"][:, :64]})),
        r"weights.shared\['down'\]: got bfloat16\[192, 64\]; .*\[192, 96\]",
    ),
    "FP8 in the shared expert": (
        lambda x, w: (
            x,
            w._replace(shared=w.shared | {"up": w.shared["up"].astype(jnp.float8_e4m3fn)}),
        ),
        r"weights.shared\['up'\]: got float8_e4m3fn",
    ),
    "experts that were not placed": (
        lambda x, w: (x, w._replace(experts=jmm.to_layout(w.experts, "canonical"))),
        r"weights.layout: got 'canonical'; expected 'cpu'.*Call block\.shard",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, placed):
    case, block, weights = placed
    change, message = MISTAKES[name]
    x, weights, *ids = change(case.x, weights)
    with pytest.raises(MegaMoEError, match=message):
        block(x, weights, token_ids=ids[0] if ids else case.token_ids)


LATENT_MISTAKES = {
    "x of the latent's width": (lambda x, w: (x[:, :HIDDEN], w), r"x: got .*\[32, 192\]; .*384\]"),
    "no up": (
        lambda x, w: (x, w._replace(latent=without(w.latent, "up"))),
        r"weights.latent: got \['down', 'norm'\]",
    ),
    "down that does not lead to the experts": (
        lambda x, w: (x, w._replace(latent=w.latent | {"down": jnp.zeros((64, 384))})),
        r"weights.latent\['down'\]: got float32\[64, 384\]; .*\[192, H\]",
    ),
    "up that does not lead back": (
        lambda x, w: (x, w._replace(latent=w.latent | {"up": jnp.zeros((192, 192))})),
        r"weights.latent\['up'\]: got float32\[192, 192\]; .*\[384, 192\]",
    ),
    "a norm of the block's width": (
        lambda x, w: (x, w._replace(latent=w.latent | {"norm": jnp.ones(384)})),
        r"weights.latent\['norm'\]: got float32\[384\]; .*\[192\]",
    ),
    "no latent": (
        lambda x, w: (x, w._replace(latent={})),
        r"weights.router\['weight'\]: got bfloat16\[4, 384\]; .*\[4, 192\]",
    ),
}


@pytest.mark.parametrize("name", LATENT_MISTAKES)
def test_mistakes_with_a_latent(name, cases):
    case = cases("Kimi-K3", 1)
    change, message = LATENT_MISTAKES[name]
    with open_block(case, mesh_of((2,), ("ep",))) as block:
        x, weights = change(case.x, blocks.load(case.checkpoint, 1))
        with pytest.raises(MegaMoEError, match=message):
            block(x, weights)


def test_a_mask_of_numbers(placed):
    case, block, weights = placed
    with pytest.raises(MegaMoEError, match=r"mask: got int32\[32\]; expected bool \[32\]"):
        block(case.x, weights, token_ids=case.token_ids, mask=np.ones(32, np.int32))


def test_mistakes_of_the_constructor(placed):
    case = placed[0]
    with pytest.raises(MegaMoEError, match=r"router.top_k: got 8; expected 2"):
        blocks.MoEBlock(case.config, routers.qwen3_moe(), data_ep())
    with pytest.raises(MegaMoEError, match=r"router: got function; expected a jax_megamoe.rout"):
        blocks.MoEBlock(case.config, routers.qwen3_moe, data_ep())
    with pytest.raises(
        MegaMoEError, match=r"config: got an empty dict; expected a jax_megamoe.MegaMoE"
    ):
        blocks.MoEBlock({}, routers.qwen3_moe(), data_ep())
    good = case.config, routers.qwen3_moe(top_k=2), data_ep()
    with pytest.raises(MegaMoEError, match=r"shared_activation: got 'silu', a str; .*Activation"):
        blocks.MoEBlock(*good, shared_activation="silu")
    with pytest.raises(MegaMoEError, match=r"norm_eps: got None; expected a number"):
        blocks.MoEBlock(*good, norm_eps=None)
    with pytest.raises(MegaMoEError, match=r"router: got None; expected a jax_megamoe.routers.Ro"):
        blocks.MoEBlock(case.config, None, data_ep())
    for call in (blocks.load, functools.partial(blocks.MoEBlock.of, max_tokens_per_rank=1)):
        with pytest.raises(MegaMoEError, match=r"checkpoint: got '/models', a str; .*open\(path\)"):
            call("/models", 0)
    with pytest.raises(
        MegaMoEError, match=r"x: got bfloat16\[2, 64\]; expected bfloat16 \[..., 96\]"
    ):
        shared = {"gate": jnp.ones((8, 96)), "up": jnp.ones((8, 96)), "down": jnp.ones((96, 8))}
        blocks.shared_expert(jnp.ones((2, 64), jnp.bfloat16), shared, jmm.swiglu())
    assert repr(placed[1]).startswith("MoEBlock(Router(top_k=2, scores='sqrtsoftplus'")
