"""Every mistake is caught with operand, what was given, what is expected, and what to do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from moe_case import Case, experts, mesh_of

CONFIG = jmm.MegaMoEConfig(
    num_experts=8, top_k=2, hidden=128, intermediate=128, max_tokens_per_rank=8, timeout_s=60.0
)


@pytest.fixture(scope="module")
def layer():
    with jmm.MegaMoE(CONFIG, mesh_of(4)) as layer:
        yield layer


@pytest.fixture(scope="module")
def good(layer):
    case = Case(np.random.default_rng(2), CONFIG, 4, 8)
    return dict(
        x=case.x,
        topk_idx=case.topk_idx,
        topk_weights=case.topk_weights,
        weights=layer.shard(case.weights),
        num_tokens=jnp.full((4,), 8, jnp.int32),
    )


def zeros(dtype, *shape):
    return jnp.zeros(shape, dtype)


MISTAKES = {
    "x width": (dict(x=zeros("bfloat16", 32, 256)), "x", "bfloat16[8, 256]", "[T, 128]"),
    "x dtype": (dict(x=zeros("float32", 32, 128)), "x", "float32[8, 128]", "bfloat16 [T, 128]"),
    "x rank": (dict(x=zeros("bfloat16", 2, 16, 128)), "x", "[2, 16, 128]", "[N, 128]"),
    "x rows": (dict(x=zeros("bfloat16", 30, 128)), "x", "[30, 128]", "multiple of 4"),
    "too many rows": (
        dict(
            x=zeros("bfloat16", 64, 128),
            topk_idx=zeros("int32", 64, 2),
            topk_weights=zeros("float32", 64, 2),
        ),
        "x",
        "16 rows",
        "max_tokens_per_rank = 8",
    ),
    "x not an array": (dict(x=[1, 2]), "x", "list", "multiple of 4"),
    "three arrays": (
        dict(x=(zeros("uint8", 32, 128),) * 3),
        "x",
        "3 arrays",
        "(codes, sf)",
    ),
    "code dtype": (
        dict(x=(zeros("int8", 32, 128), zeros("uint8", 32, 4))),
        "x codes",
        "int8[8, 128]",
        "float8_e4m3fn or uint8",
    ),
    "sf shape": (
        dict(x=(zeros("uint8", 32, 128), zeros("uint8", 32, 1))),
        "x sf",
        "uint8[8, 1]",
        "[8, 4]",
    ),
    "idx dtype": (dict(topk_idx=zeros("int8", 32, 2)), "topk_idx", "int8[8, 2]", "int32 or int64"),
    "idx slots": (dict(topk_idx=zeros("int32", 32, 3)), "topk_idx", "int32[8, 3]", "[8, 2]"),
    "idx rows": (dict(topk_idx=zeros("int32", 16, 2)), "topk_idx", "int32[4, 2]", "[8, 2]"),
    "weights dtype": (
        dict(topk_weights=zeros("int32", 32, 2)),
        "topk_weights",
        "int32[8, 2]",
        "float32",
    ),
    "num_tokens shape": (
        dict(num_tokens=zeros("int32", 8)),
        "num_tokens",
        "int32[8]",
        "int32 [4]",
    ),
    "num_tokens dtype": (
        dict(num_tokens=zeros("float32", 4)),
        "num_tokens",
        "float32[4]",
        "int32",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_operand_mistakes(layer, good, name):
    changes, operand, got, want = MISTAKES[name]
    operands = {**good, **changes}
    num_tokens = operands.pop("num_tokens")
    with pytest.raises(jmm.MegaMoEError) as caught:
        layer(*operands.values(), num_tokens=num_tokens)
    text = str(caught.value)
    assert f"jax_megamoe: {operand}: got " in text
    given, _, expected = text.partition("; expected ")
    assert got in given, text
    assert want in expected, text
    assert expected.count(". ") >= 1, "no remedy: " + text


def test_weights_in_canonical_layout(layer, good):
    with pytest.raises(jmm.MegaMoEError, match=r"layout: got 'canonical'.*layer\.shard"):
        layer(good["x"], good["topk_idx"], good["topk_weights"], experts(8, 128, 128))


def test_weights_of_another_config(layer, good):
    with pytest.raises(jmm.MegaMoEError, match=r"weights\.w13.*\[16, 256, 64\].*\[8, 256, 64\]"):
        layer.shard(experts(16, 128, 128))
    with pytest.raises(jmm.MegaMoEError, match=r"weights: got dict; expected .*ExpertWeights"):
        layer(good["x"], good["topk_idx"], good["topk_weights"], {"w13": 1})


@pytest.mark.parametrize(("granularity", "limit"), [("row", 14), (128, 14), (32, 132)])
def test_weights_that_a_gpu_layout_cannot_hold(monkeypatch, granularity, limit):
    """`shard` looks at the values before the conversion, which runs on tracers."""
    config = dataclasses.replace(CONFIG, activation_granularity=granularity, intermediate=96)
    weights = experts(config.num_experts, config.intermediate, config.hidden)
    sf = np.array(weights.w13_sf)
    sf[:] = 200
    sf[5, 96 + 7, 2] = 200 - limit - 1
    bad = dataclasses.replace(weights, w13_sf=jnp.asarray(sf))
    sf[5, 96 + 7, 2] = 200 - limit
    good = dataclasses.replace(weights, w13_sf=jnp.asarray(sf))
    with jmm.MegaMoE(config, mesh_of(4)) as layer:
        layer.shard(bad)  # the CPU's layout has no such limit
        monkeypatch.setattr(layer, "_site", layer._site._replace(backend="sm_90a"))
        with pytest.raises(jmm.MegaMoEError) as error:
            layer.shard(bad)
        message = str(error.value)
        assert "weights.w13, expert 5, up row 7: got groups of 32 whose scales are up" in message
        assert f"2^{limit + 1} apart (1 of " in message and f"at most 2^{limit}" in message
        remedy = "source of these weights" if granularity == 32 else "activation_granularity=32"
        assert remedy in message
        placed = layer.shard(good)
        assert placed.layout == layer._site.layout != "cpu"
        assert len(placed.w13.sharding.device_set) == 4
        assert not (np.asarray(placed.w13_sf) == 255).any()


def test_mesh_mistakes():
    with pytest.raises(jmm.MegaMoEError, match=r"axis: got 'expert'; expected .*\('ep',\)"):
        jmm.MegaMoE(CONFIG, mesh_of(4), axis="expert")
    with pytest.raises(jmm.MegaMoEError, match=r"mesh: got list; expected a jax\.sharding\.Mesh"):
        jmm.MegaMoE(CONFIG, [1, 2])
    with pytest.raises(jmm.MegaMoEError, match="num_experts: got 6 on 4 ranks"):
        jmm.MegaMoE(dataclasses.replace(CONFIG, num_experts=6), mesh_of(4))
    with pytest.raises(jmm.MegaMoEError, match="config: got dict"):
        jmm.MegaMoE({}, mesh_of(4))
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "ep"), auto)
    for axes in (("data",), ("ep", "tensor")):
        with pytest.raises(jmm.MegaMoEError, match="token_axes"):
            jmm.MegaMoE(CONFIG, mesh, token_axes=axes)


def test_a_shape_whose_padded_rows_do_not_fit():
    config = jmm.MegaMoEConfig(64, 1, 128, 128, max_tokens_per_rank=2**31 - 1)
    with pytest.raises(jmm.MegaMoEError, match=r"config: got .*below 2\^31.*max_tokens_per_rank"):
        jmm.buffer_bytes(config, 1)


def test_local_outside_shard_map(layer, good):
    with pytest.raises(NameError, match=r"'ep' is not bound.*shard_map"):
        layer.local(good["x"][:8], good["topk_idx"][:8], good["topk_weights"][:8], good["weights"])


def test_tokens_replicated_over_the_ranks(layer, good):
    step = jax.shard_map(
        lambda x, i, p, w: layer.local(x, i, p, w),
        mesh=layer.mesh,
        in_specs=(P(), P(), P(), P("ep")),
        out_specs=P("ep"),
    )
    operands = [good[name][:8] for name in ("x", "topk_idx", "topk_weights")]
    with pytest.raises(jmm.MegaMoEError, match=r"x: got the same tokens on every rank.*Shard x"):
        jax.jit(step)(*operands, good["weights"])


def test_local_on_a_mesh_of_another_size(layer, good):
    step = jax.shard_map(
        lambda x, i, p, w: layer.local(x, i, p, w),
        mesh=mesh_of(2),
        in_specs=(P("ep"),) * 4,
        out_specs=P("ep"),
    )
    operands = (np.asarray(good[name]) for name in ("x", "topk_idx", "topk_weights"))
    weights = jax.tree.map(np.asarray, good["weights"])
    with pytest.raises(jmm.MegaMoEError, match=r"size of axis 'ep': got 2; expected 4"):
        jax.jit(step)(*operands, weights)


def test_local_on_the_same_devices_in_another_order(layer, good):
    """The program's rank and the buffer's differ: refused, or rows would go to the wrong rank."""
    mesh = jax.sharding.Mesh(layer.mesh.devices[::-1], ("ep",))
    step = jax.shard_map(
        lambda x, i, p, w: layer.local(x, i, p, w),
        mesh=mesh,
        in_specs=(P("ep"),) * 4,
        out_specs=P("ep"),
    )
    operands = (np.asarray(good[name]) for name in ("x", "topk_idx", "topk_weights"))
    weights = jax.tree.map(np.asarray, good["weights"])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"is rank \d in the program, but rank \d"):
        jax.jit(step)(*operands, weights).block_until_ready()


@pytest.mark.parametrize("count", [-1, 9, 2**31 - 1])
def test_num_tokens_out_of_range(layer, good, count):
    num_tokens = good["num_tokens"].at[2].set(count)
    operands = [good[name] for name in ("x", "topk_idx", "topk_weights", "weights")]
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=f"num_tokens: got {count} on rank 2; expected 0..8"
    ):
        jax.jit(layer)(*operands, num_tokens=num_tokens).block_until_ready()
    y = jax.jit(layer)(*operands, num_tokens=good["num_tokens"])  # the layer still works
    assert np.isfinite(np.asarray(y, np.float32)).all()


@pytest.mark.parametrize("expert", [8, -2, 2**31 - 1, -(2**31)])
def test_checked_mode_refuses_out_of_range_experts(good, expert):
    config = dataclasses.replace(CONFIG, checked=True)
    operands = [good[name] for name in ("x", "topk_idx", "topk_weights", "weights")]
    with jmm.MegaMoE(config, mesh_of(4)) as layer:
        step = jax.jit(layer)
        fine = np.asarray(step(*operands))
        wrong = list(operands)
        wrong[1] = operands[1].at[19, 1].set(expert)
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=rf"topk_idx: got expert id {expert} at token 3, slot 1 of rank 2.*expected -1 or "
            r"0\.\.7",
        ):
            step(*wrong).block_until_ready()
        np.testing.assert_array_equal(np.asarray(step(*operands)), fine)


def test_a_refused_call_does_not_leave_ranks_in_a_collective(good):
    """The error reaches every rank, so that none waits in the psum that follows."""
    config = dataclasses.replace(CONFIG, checked=True)
    operands = [good[name] for name in ("x", "topk_idx", "topk_weights", "weights")]
    operands[1] = operands[1].at[0, 0].set(99)
    with jmm.MegaMoE(config, mesh_of(4)) as layer:
        step = jax.shard_map(
            lambda *a: jax.lax.psum(layer.local(*a).astype(jnp.float32).sum(), "ep"),
            mesh=layer.mesh,
            in_specs=(P("ep"),) * 4,
            out_specs=P(),
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match="expert id 99"):
            jax.jit(step)(*operands).block_until_ready()


def test_direct_use_of_the_target_is_checked(layer, good):
    """The handler itself checks: a program need not come from the Python layer."""

    def body(x):
        return jax.lax.pcast(
            jax.ffi.ffi_call(
                "jax_megamoe.mega_moe.v3",
                (
                    jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
                    jax.ShapeDtypeStruct((2,), jnp.int32),
                    jax.ShapeDtypeStruct((4,), jnp.int32),
                ),
            )(
                x,
                jnp.zeros((0, 0), jnp.uint8),
                jnp.zeros((8, 3), jnp.int32),  # one slot too many
                *(jnp.zeros((8, 2), jnp.float32), jnp.zeros((1,), jnp.int32)),
                jax.lax.axis_index("ep").reshape(1),
                *(jnp.zeros((2, 1, 1, 16), jnp.uint8),) * 4,
                *(jnp.zeros(0),) * 2,
                key=layer.buffer.key,
                activation=np.int32(0),
                activation_params=np.ones(4, np.float32),
                granularity=np.int32(32),
                timeout_s=np.float64(5),
                checked=False,
            )[0],
            "ep",
            to="varying",
        )

    step = jax.shard_map(body, mesh=layer.mesh, in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"topk_idx: got int32\[8, 3\]; expected int32\[8, 2\]"
    ):
        jax.jit(step)(good["x"]).block_until_ready()
