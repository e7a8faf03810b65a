"""Every mistake is caught with operand, what was given, what is expected, and what to do."""

import dataclasses
import re
from pathlib import Path

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


MASKED = np.ma.masked_array(np.zeros((32, 2), np.float32), mask=np.eye(32, 2, dtype=bool))
SPEC = jax.ShapeDtypeStruct((32, 128), jnp.bfloat16)


def rows_of(count):
    """Tokens and slots of `count` rows."""
    return dict(
        x=zeros("bfloat16", count, 128),
        topk_idx=zeros("int32", count, 2),
        topk_weights=zeros("float32", count, 2),
    )


# operands that replace good ones -> (operand, got, want, remedy), parts of the message. Shapes are
# those of all 4 ranks together, as they were passed.
MISTAKES = {
    "x width": (dict(x=zeros("bfloat16", 32, 256)), "x", "bfloat16[32, 256]", "[..., 128]", "128"),
    "x dtype": (
        dict(x=zeros("float32", 32, 128)),
        "x",
        "float32[32, 128]",
        "bfloat16 [..., 128]",
        "x.astype(jnp.bfloat16)",
    ),
    "x codes without scales": (
        dict(x=zeros("float8_e4m3fn", 32, 128)),
        "x",
        "float8_e4m3fn[32, 128]",
        "bfloat16 [..., 128]",
        "pair (codes, sf)",
    ),
    "x of one axis": (dict(x=zeros("bfloat16", 128)), "x", "[128]", "[..., 128]", "last axis"),
    "x rows": (rows_of(30), "x", "bfloat16[30, 128]", "multiple of 4 token shards", "num_tokens"),
    "x of sequences": (
        dict(x=zeros("bfloat16", 2, 16, 128)),
        "x",
        "bfloat16[2, 16, 128]",
        "first axis that is a multiple of 4",
        "reshape x to [N, 128]",
    ),
    "too many rows": (rows_of(64), "x", "16 rows", "max_tokens_per_rank = 8", "split"),
    "x a list": (dict(x=[1, 2]), "x", "list of 2", "bfloat16 [..., 128]", "jnp.asarray"),
    "x None": (dict(x=None), "x", "None", "bfloat16 [..., 128]", "cannot be left out"),
    "x a number": (dict(x=1.5), "x", "1.5, a float", "bfloat16 [..., 128]", "jnp.asarray"),
    "x a string": (dict(x="x"), "x", "'x', a str", "bfloat16 [..., 128]", "order"),
    "x a function": (dict(x=zeros), "x", "function", "bfloat16 [..., 128]", "order"),
    "x abstract": (dict(x=SPEC), "x", "ShapeDtypeStruct bfloat16[32, 128]", "bfloat16", "lower"),
    "x a key": (dict(x=jax.random.key(0)), "x", "key<fry>[]", "bfloat16 [..., 128]", "order"),
    "x token ids": (
        dict(x=zeros("int32", 32)),
        "x",
        "int32[32]",
        "bfloat16 [..., 128]",
        "order",
    ),
    "x object": (
        dict(x=np.full((32, 128), None)),
        "x",
        "object[32, 128]",
        "bfloat16 [..., 128]",
        "order",
    ),
    "x empty tuple": (dict(x=()), "x", "an empty tuple", "pair (codes, sf)", "quantize_e4m3"),
    "x a list of two": (
        dict(x=[zeros("uint8", 32, 128), zeros("uint8", 32, 4)]),
        "x",
        "list of uint8[32, 128] and uint8[32, 4]",
        "pair (codes, sf)",
        "tuple",
    ),
    "three arrays": (
        dict(x=(zeros("uint8", 32, 128),) * 3),
        "x",
        "tuple of 3",
        "(codes, sf)",
        "quantize_e4m3",
    ),
    "code dtype": (
        dict(x=(zeros("int8", 32, 128), zeros("uint8", 32, 4))),
        "x codes",
        "int8[32, 128]",
        "float8_e4m3fn or uint8",
        "quantize_e4m3",
    ),
    "sf shape": (
        dict(x=(zeros("uint8", 32, 128), zeros("uint8", 32, 1))),
        "x sf",
        "uint8[32, 1]",
        "[32, 4]",
        "scale for each 32",
    ),
    "sf None": (
        dict(x=(zeros("uint8", 32, 128), None)),
        "x sf",
        "None",
        "[32, 4]",
        "cannot be left out",
    ),
    "idx dtype": (
        dict(topk_idx=zeros("int8", 32, 2)),
        "topk_idx",
        "int8[32, 2]",
        "int32 or int64 [32, 2]",
        "astype(jnp.int32)",
    ),
    "idx unsigned": (
        dict(topk_idx=zeros("uint32", 32, 2)),
        "topk_idx",
        "uint32[32, 2]",
        "int32 or int64",
        "astype(jnp.int32)",
    ),
    "idx float": (
        dict(topk_idx=zeros("float32", 32, 2)),
        "topk_idx",
        "float32[32, 2]",
        "int32 or int64",
        "topk_idx comes before topk_weights",
    ),
    "idx bool": (
        dict(topk_idx=zeros("bool", 32, 2)),
        "topk_idx",
        "bool[32, 2]",
        "int32 or int64",
        "topk_idx comes before topk_weights",
    ),
    "idx a key": (
        dict(topk_idx=jax.random.key(0)),
        "topk_idx",
        "key<fry>[]",
        "int32 or int64 [32, 2]",
        "topk_idx comes before topk_weights",
    ),
    "idx a list": (
        dict(topk_idx=[[0, 1]] * 32),
        "topk_idx",
        "list of 32",
        "int32 or int64 [32, 2]",
        "jnp.asarray(..., jnp.int32)",
    ),
    "idx one-hot": (
        dict(topk_idx=zeros("int32", 32, 8)),
        "topk_idx",
        "int32[32, 8]",
        "[32, 2]",
        "config.top_k is 2",
    ),
    "idx rows": (
        dict(topk_idx=zeros("int32", 16, 2)),
        "topk_idx",
        "int32[16, 2]",
        "[32, 2]",
        "x has [32] tokens",
    ),
    "idx rows that shards do not divide": (
        dict(topk_idx=zeros("int32", 14, 2)),
        "topk_idx",
        "int32[14, 2]",
        "[32, 2]",
        "x has [32] tokens",
    ),
    "idx of sequences": (
        dict(topk_idx=zeros("int32", 4, 8, 2)),
        "topk_idx",
        "int32[4, 8, 2]",
        "[32, 2]",
        "x has [32] tokens",
    ),
    "weights dtype": (
        dict(topk_weights=zeros("int32", 32, 2)),
        "topk_weights",
        "int32[32, 2]",
        "float32",
        "topk_idx comes before topk_weights",
    ),
    "weights double": (
        dict(topk_weights=np.zeros((32, 2))),
        "topk_weights",
        "float64[32, 2]",
        "float32",
        "astype(jnp.float32)",
    ),
    "weights slots": (
        dict(topk_weights=zeros("float32", 32, 1)),
        "topk_weights",
        "float32[32, 1]",
        "[32, 2]",
        "one weight per slot",
    ),
    "weights a number": (
        dict(topk_weights=1.0),
        "topk_weights",
        "1.0, a float",
        "[32, 2]",
        "jnp.asarray(..., jnp.float32)",
    ),
    "weights masked": (
        dict(topk_weights=MASKED),
        "topk_weights",
        "numpy.MaskedArray float32[32, 2]",
        "[32, 2]",
        "filled",
    ),
    "num_tokens shape": (
        dict(num_tokens=zeros("int32", 8)),
        "num_tokens",
        "int32[8]",
        "int32 [4]",
        "4 token shards",
    ),
    "num_tokens dtype": (
        dict(num_tokens=zeros("float32", 4)),
        "num_tokens",
        "float32[4]",
        "int32",
        "order",
    ),
    "num_tokens a number": (
        dict(num_tokens=5),
        "num_tokens",
        "5, an int",
        "int32 [4]",
        "jnp.asarray",
    ),
    "no weights": (
        dict(weights=None),
        "weights",
        "None",
        "jax_megamoe.ExpertWeights",
        "quantize_weights",
    ),
    "dense weights": (
        dict(weights=(zeros("float32", 8, 128, 128),) * 3),
        "weights",
        "tuple of 3",
        "jax_megamoe.ExpertWeights",
        "quantize_weights",
    ),
    "weights of the unfused layer": (
        dict(weights=jmm.unfused.WideWeights(zeros("bfloat16", 1), zeros("bfloat16", 1))),
        "weights",
        "jax_megamoe.WideWeights",
        "jax_megamoe.ExpertWeights",
        "jax_megamoe.unfused",
    ),
    "weights of a block": (
        dict(weights=jmm.blocks.BlockWeights(experts(8, 128, 128), {})),
        "weights",
        "jax_megamoe.BlockWeights",
        "jax_megamoe.ExpertWeights",
        "blocks.MoEBlock",
    ),
    "weights of another layout": (
        dict(weights=experts(8, 128, 128)),
        "weights.layout",
        "'canonical'",
        "'cpu'",
        "layer.shard",
    ),
    "weights of one rank": (
        dict(weights=jmm.to_layout(experts(2, 128, 128), "cpu")),
        "weights.w13 (cpu layout)",
        "uint8[2, 16, 64, 16]",
        "[8, 16, 64, 16]",
        "num_experts = 8",
    ),
    "weights of another dtype": (
        dict(weights=jax.tree.map(jnp.float32, jmm.to_layout(experts(8, 128, 128), "cpu"))),
        "weights.w13 (cpu layout)",
        "float32[8, 16, 64, 16]",
        "uint8",
        "from_arrays",
    ),
    "bias for a layout": (
        dict(weights=jmm.ExpertWeights(1, 2, 3, 4, zeros("float32", 2))),
        "weights.layout",
        "Array",
        "canonical",
        "keywords",
    ),
}


def check_message(error, operand, *parts):
    """operand, got, want and remedy, each where it belongs."""
    text = str(error)
    start, separator, rest = text.partition(": got ")
    assert start == f"jax_megamoe: {operand}", text
    given, _, rest = rest.partition("; expected ")
    expected, stop, remedy = rest.rpartition(". ")
    assert separator and stop and remedy.endswith("."), text
    while parts[2] not in remedy and ". " in expected:  # a remedy of several sentences
        expected, _, more = expected.rpartition(". ")
        remedy = f"{more}. {remedy}"
    for part, place in zip(parts, (given, expected, remedy), strict=True):
        assert part in place, f"{part!r} is not in {place!r} of: {text}"
    assert not remedy[0].islower() or not remedy.split()[0].isalpha() or remedy[1] == " ", text


@pytest.mark.parametrize("name", MISTAKES)
def test_operand_mistakes(layer, good, name):
    changes, *parts = MISTAKES[name]
    operands = {**good, **changes}
    if "num_tokens" not in changes:
        operands.pop("num_tokens")
    with pytest.raises(jmm.MegaMoEError) as caught:
        layer(**operands)
    check_message(caught.value, *parts)


# The same inside shard_map, where shapes are those of a rank, and the message says so.
LOCAL_MISTAKES = {
    "x width": (dict(x=zeros("bfloat16", 32, 256)), "x", "bfloat16[8, 256]", "[..., 128]", "128"),
    "slots": (
        dict(topk_idx=zeros("int32", 32, 3)),
        "topk_idx",
        "int32[8, 3]",
        "[8, 2]",
        "config.top_k is 2",
    ),
    "rows": (
        dict(topk_weights=zeros("float32", 16, 2)),
        "topk_weights",
        "float32[4, 2]",
        "[8, 2]",
        "x has [8] tokens",
    ),
    "num_tokens": (
        dict(num_tokens=zeros("float32", 4)),
        "num_tokens",
        "float32[1]",
        "an int32 scalar",
        "this rank's number",
    ),
    "weights": (
        dict(weights=jmm.to_layout(experts(16, 128, 128), "cpu")),
        "weights.w13 (cpu layout)",
        "uint8[4, 16, 64, 16]",
        "[2, 16, 64, 16]",
        "num_experts / ranks",
    ),
}


@pytest.mark.parametrize("name", LOCAL_MISTAKES)
def test_operand_mistakes_inside_shard_map(layer, good, name):
    changes, *parts = LOCAL_MISTAKES[name]
    step = jax.shard_map(
        lambda x, i, p, w, n: layer.local(x, i, p, w, num_tokens=n),
        mesh=layer.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    with pytest.raises(jmm.MegaMoEError) as caught:
        step(*{**good, **changes}.values())
    check_message(caught.value, *parts)
    assert "on each rank" in str(caught.value)


X32 = zeros("float32", 4, 64)
CODES, SF = jmm.quantize.quantize_e4m3(X32)
NARROW = zeros("bfloat16", 4, 48)
q = jmm.quantize

# Functions beside the layer -> (call, operand, got, want, remedy).
CALLS = {
    "quantise a list": (lambda: q.quantize_e4m3([1.0]), "x", "list of 1", "float32", "asarray"),
    "quantise None": (lambda: q.quantize_e2m1(None), "x", "None", "[..., K]", "left out"),
    "quantise a name": (lambda: q.quantize_e2m1("x"), "x", "'x', a str", "[..., K]", "order"),
    "quantise a number": (lambda: q.quantize_e4m3(2.0), "x", "2.0, a float", "[...", "asarray"),
    "quantise double": (
        lambda: q.quantize_e4m3(np.zeros((4, 64))),
        "x",
        "float64[4, 64]",
        "bfloat16 or float16 or float32",
        "astype(jnp.bfloat16)",
    ),
    "quantise FP8": (
        lambda: q.quantize_e2m1(X32.astype(jnp.float8_e4m3fn)),
        "x",
        "float8_e4m3fn[4, 64]",
        "float32",
        "where this one comes from",
    ),
    "quantise 48": (
        lambda: q.quantize_e4m3(NARROW),
        "x",
        "bfloat16[4, 48]",
        "multiple of 32",
        "pad",
    ),
    "group": (lambda: q.quantize_e4m3(X32, [32]), "group", "[32]", "(32, 128, 'row')", "share"),
    "group as text": (lambda: q.quantize_e4m3(X32, "32"), "group", "'32'", "'row'", "share"),
    "scales swapped with codes": (
        lambda: q.dequantize_e4m3(SF, CODES),
        "codes",
        "uint8[4, 2]",
        "multiple of 32",
        "scale covers 32",
    ),
    "scales of other codes": (
        lambda: q.dequantize_e4m3(CODES, SF[:, :1]),
        "sf",
        "uint8[4, 1]",
        "[4, 2]",
        "scale for each 32",
    ),
    "scales as numbers": (
        lambda: q.dequantize_e2m1(CODES, SF.astype(jnp.float32)),
        "sf",
        "float32[4, 2]",
        "float8_e8m0fnu",
        "powers of two",
    ),
    "values for codes": (
        lambda: q.dequantize_e4m3(X32, SF),
        "codes",
        "float32[4, 64]",
        "uint8 or float8_e4m3fn",
        "order",
    ),
    "pack a list": (lambda: q.pack_e2m1([1, 2]), "codes", "list of 2", "uint8", "asarray"),
    "unpack a list": (lambda: q.unpack_e2m1([1, 2]), "packed", "list of 2", "uint8", "asarray"),
    "unpack floats": (lambda: q.unpack_e2m1(X32), "packed", "float32[4, 64]", "uint8", "order"),
    "devices as text": (
        lambda: jmm.use_virtual_cpu_devices("8"),
        "num_devices",
        "'8', a str",
        "a positive int",
        "8 is a good number",
    ),
    "bytes for ranks as text": (
        lambda: jmm.buffer_bytes(CONFIG, "4"),
        "num_ranks",
        "'4'",
        "a positive int",
        "int(...)",
    ),
    "bytes of a mesh": (
        lambda: jmm.buffer_bytes(CONFIG, mesh_of(4)),
        "num_ranks",
        "Mesh",
        "a positive int",
        "int(...)",
    ),
    "bytes of no config": (
        lambda: jmm.buffer_bytes(None, 4),
        "config",
        "None",
        "MegaMoEConfig",
        "Build it with",
    ),
    "bytes on another back end": (
        lambda: jmm.buffer_regions(CONFIG, 4, "tpu"),
        "backend",
        "'tpu'",
        "('cpu', 'sm_90a')",
        "layer.backend",
    ),
    "load of no experts": (
        lambda: jmm.routers.expert_load(zeros("int32", 4, 2), "8"),
        "num_experts",
        "'8'",
        "a positive int",
        "int(...)",
    ),
    "load of weights": (
        lambda: jmm.routers.expert_load(X32, 8),
        "topk_idx",
        "float32[4, 64]",
        "int32 or int64 [..., K]",
        "order",
    ),
    "a router's flag": (
        lambda: jmm.routers.qwen3_moe(norm_topk_prob="yes"),
        "norm_topk_prob",
        "'yes', a str",
        "True or False",
        "divided",
    ),
    "a router of a text": (
        lambda: jmm.routers.qwen3_moe(top_k="8"),
        "top_k",
        "'8'",
        "a positive int",
        "A router takes",
    ),
    "unfused x": (
        lambda: jmm.unfused.mega_moe(
            [1.0], None, None, experts(8, 128, 128), CONFIG, mesh_of(4), "ep"
        ),
        "x",
        "list of 1",
        "bfloat16 [..., 128]",
        "asarray",
    ),
    "unfused rows": (
        lambda: jmm.unfused.mega_moe(
            *rows_of(30).values(), experts(8, 128, 128), CONFIG, mesh_of(4), "ep"
        ),
        "x",
        "bfloat16[30, 128]",
        "multiple of 4",
        "num_tokens",
    ),
    "unfused axis": (
        lambda: jmm.unfused.mega_moe(
            *rows_of(32).values(), experts(8, 128, 128), CONFIG, mesh_of(4), "expert"
        ),
        "mesh and axis",
        "'expert'",
        "an axis, or axes, of it",
        "jax.make_mesh",
    ),
    "unfused config": (
        lambda: jmm.unfused.mega_moe(
            *rows_of(32).values(), experts(8, 128, 128), None, mesh_of(4), "ep"
        ),
        "config",
        "None",
        "MegaMoEConfig",
        "Build it with",
    ),
    "token axes": (
        lambda: jmm.MegaMoE(CONFIG, mesh_of(4), token_axes=3),
        "token_axes",
        "(3,)",
        "axes of the mesh ('ep',)",
        "sharded over",
    ),
    "a dtype of no floats": (
        lambda: jmm.dequantize_weights(experts(8, 128, 128), "int8"),
        "dtype",
        "'int8'",
        "a floating-point dtype",
        "jnp.float32",
    ),
    "an unknown dtype": (
        lambda: jmm.dequantize_weights(experts(8, 128, 128), "float99"),
        "dtype",
        "'float99'",
        "a floating-point dtype",
        "jnp.float32",
    ),
    "an activation by name": (
        lambda: jmm.blocks.shared_expert(zeros("bfloat16", 4, 64), {}, "silu"),
        "activation",
        "'silu', a str",
        "jax_megamoe.Activation",
        "swiglu",
    ),
    "a rate": (
        lambda: jmm.routers.update_bias(zeros("float32", 4), zeros("int32", 4), "fast"),
        "rate",
        "'fast', a str",
        "a number",
        "0.001",
    ),
    "the reference's x": (
        lambda: jmm.reference.mega_moe([1.0], None, None, experts(8, 128, 128), CONFIG),
        "x",
        "list of 1",
        "bfloat16, or the pair",
        "bfloat16",
    ),
    "ranks of the reference": (
        lambda: jmm.reference.mega_moe(*rows_of(8).values(), experts(8, 128, 128), CONFIG),
        "codes",
        "uint8[8, 128]",
        "[R, T, 128]",
        "axis of ranks",
    ),
    "unfused weights": (
        lambda: jmm.unfused.mega_moe(*rows_of(32).values(), None, CONFIG, mesh_of(4), "ep"),
        "weights",
        "None",
        "jax_megamoe.ExpertWeights",
        "quantize_weights",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_beside_the_layer(name):
    call, *parts = CALLS[name]
    with pytest.raises(jmm.MegaMoEError) as caught:
        call()
    check_message(caught.value, *parts)


def test_a_buffer_of_no_rank(layer):
    for place, name in (
        (dict(rank=4), "rank"),
        (dict(rank="a"), "rank"),
        (dict(rank=0, group=1), "group"),
    ):
        with pytest.raises(jmm.MegaMoEError) as caught:
            layer.buffer.read("l1_acts", **place)
        got = repr(list(place.values())[-1])
        check_message(caught.value, name, got, "an int from 0 to", "one buffer per rank")


def test_numbers_of_numpy_are_python_numbers():
    router = jmm.routers.deepseek_v3(top_k=np.int64(8), routed_scaling_factor=np.float32(2.5))
    assert router == jmm.routers.deepseek_v3() and type(router.top_k) is int
    assert jmm.buffer_bytes(CONFIG, np.int32(4)) == jmm.buffer_bytes(CONFIG, 4)


def test_devices_after_jax_has_started():
    running = len(jax.devices("cpu"))
    jmm.use_virtual_cpu_devices(np.int64(running))  # what there is already
    with pytest.raises(RuntimeError, match=rf"got {running + 1} after .*with {running} .*top of"):
        jmm.use_virtual_cpu_devices(running + 1)


def test_the_unfused_layer_outside_shard_map():
    with pytest.raises(NameError, match=r"unfused\.local: axis 'ep' is not bound.*shard_map"):
        jmm.unfused.local(*rows_of(8).values(), experts(8, 128, 128), CONFIG, axis="ep")


class Parameter:
    """As a neural-network library has them: it stands for an array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def test_parameters_stand_for_their_arrays(layer, good):
    operands = [good[name] for name in ("x", "topk_idx", "topk_weights")]
    want = np.asarray(layer(*operands, good["weights"]))
    got = layer(*map(Parameter, operands), good["weights"])
    np.testing.assert_array_equal(np.asarray(got), want)


def test_weights_in_canonical_layout(layer, good):
    with pytest.raises(jmm.MegaMoEError, match=r"layout: got 'canonical'.*layer\.shard"):
        layer(good["x"], good["topk_idx"], good["topk_weights"], experts(8, 128, 128))


def test_weights_of_another_config(layer, good):
    with pytest.raises(jmm.MegaMoEError, match=r"weights\.w13.*\[16, 256, 64\].*\[8, 256, 64\]"):
        layer.shard(experts(16, 128, 128))
    with pytest.raises(jmm.MegaMoEError, match=r"weights: got dict of 1; expected .*ExpertWeights"):
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


@pytest.mark.parametrize("tensor", ["w13", "w2"])
@pytest.mark.parametrize("layout", ["canonical", "cpu"])
def test_scales_that_are_nan(layer, tensor, layout):
    """Byte 255 is refused wherever values can be seen; under jit its rows come out as NaN."""
    weights = experts(CONFIG.num_experts, CONFIG.intermediate, CONFIG.hidden)
    sf = np.array(getattr(weights, f"{tensor}_sf"))
    sf[3, 9, 1] = 255
    bad = jmm.to_layout(dataclasses.replace(weights, **{f"{tensor}_sf": jnp.asarray(sf)}), layout)
    with pytest.raises(jmm.MegaMoEError) as error:
        layer.shard(bad)
    row = "gate row 9" if tensor == "w13" else "row 9"
    assert f"weights.{tensor}, expert 3, {row}: got scale byte 255, a NaN" in str(error.value)
    traced = jax.jit(layer.shard)(bad)
    back = jmm.to_layout(traced, "canonical")
    np.testing.assert_array_equal(getattr(back, f"{tensor}_sf"), sf)


def test_mesh_mistakes():
    with pytest.raises(jmm.MegaMoEError, match=r"axis: got 'expert'; expected .*\('ep',\)"):
        jmm.MegaMoE(CONFIG, mesh_of(4), axis="expert")
    with pytest.raises(
        jmm.MegaMoEError, match=r"mesh: got list of 2; expected a jax\.sharding\.Mesh"
    ):
        jmm.MegaMoE(CONFIG, [1, 2])
    with pytest.raises(jmm.MegaMoEError, match="num_experts: got 6 on 4 ranks"):
        jmm.MegaMoE(dataclasses.replace(CONFIG, num_experts=6), mesh_of(4))
    with pytest.raises(jmm.MegaMoEError, match="config: got an empty dict"):
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


def test_refusals_end_a_function():
    """`refuse` never returns, and types say so; what is always false is no condition to check."""
    root = Path(jmm.__file__).parent
    sources = {path.name: path.read_text() for path in root.rglob("*.py")}
    assert len(sources) > 30
    found = re.compile(r"check\(\s*False\b|raise AssertionError$", re.MULTILINE)
    assert [name for name, text in sources.items() if found.search(text)] == []
    assert found.search("check(\n    False,") and found.search("    raise AssertionError\n")
