"""Weight quantisation, layouts and their inverses, and the pytree that carries them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import generators
from jax_megamoe import quantize, weights
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import MegaMoEError
from jax_megamoe.weights import ExpertWeights

FIELDS = ("w13", "w13_sf", "w2", "w2_sf")
EXPERTS, INTER, HIDDEN = 3, 128, 256
TO_LAYOUT = jax.jit(weights.to_layout, static_argnums=1)


def random_bytes(rng, num_experts=EXPERTS, intermediate=INTER, hidden=HIDDEN) -> ExpertWeights:
    """Canonical weights of arbitrary bytes: layouts have to move NaN scales as well."""

    def draw(*shape):
        return jnp.asarray(rng.integers(0, 256, (num_experts, *shape), dtype=np.uint8))

    return ExpertWeights(
        draw(2 * intermediate, hidden // 2),
        draw(2 * intermediate, hidden // 32),
        draw(hidden, intermediate // 2),
        draw(hidden, intermediate // 32),
    )


def dense():
    return generators.dense_weights(np.random.default_rng(0), EXPERTS, INTER, HIDDEN)


def config(**changes) -> MegaMoEConfig:
    fields = {"num_experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, "intermediate": INTER}
    return MegaMoEConfig(**{**fields, "max_tokens_per_rank": 8, **changes})


def assert_same(a: ExpertWeights, b: ExpertWeights) -> None:
    assert a.layout == b.layout
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


# Quantisation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f4", "f2", "bf"]
)
def test_quantize_weights_places_gate_then_up(dtype):
    gate, up, down = (w.astype(dtype) for w in dense())
    got = weights.quantize_weights(gate, up, down)
    assert got.layout == "canonical" and got.num_experts == EXPERTS
    assert [getattr(got, n).shape for n in FIELDS] == [
        (EXPERTS, 2 * INTER, HIDDEN // 2),
        (EXPERTS, 2 * INTER, HIDDEN // 32),
        (EXPERTS, HIDDEN, INTER // 2),
        (EXPERTS, HIDDEN, INTER // 32),
    ]
    assert all(getattr(got, n).dtype == jnp.uint8 for n in FIELDS)
    weights.check_weights(got, config(), EXPERTS)
    for packed, sf, want in (
        (got.w13[:, :INTER], got.w13_sf[:, :INTER], gate),
        (got.w13[:, INTER:], got.w13_sf[:, INTER:], up),
        (got.w2, got.w2_sf, down),
    ):
        want_codes, want_sf = quantize.quantize_e2m1(jnp.asarray(want))
        np.testing.assert_array_equal(sf, want_sf)
        np.testing.assert_array_equal(packed & 15, want_codes[..., 0::2])
        np.testing.assert_array_equal(packed >> 4, want_codes[..., 1::2])
    # A block's largest element lands in (3, 6]; above 4 half a step is 1, below it is at most 1/2.
    for value, original in zip(weights.dequantize_weights(got), (gate, up, down), strict=True):
        original = original.astype(np.float32)
        amax = np.abs(original.reshape(*original.shape[:-1], -1, 32)).max(-1).repeat(32, axis=-1)
        assert (np.abs(value - original) <= amax / 4).all()


def test_dequantize_weights_gives_gate_up_down_of_any_dtype():
    w = weights.quantize_weights(*dense())
    assert [v.shape for v in weights.dequantize_weights(w)] == [
        (EXPERTS, INTER, HIDDEN),
        (EXPERTS, INTER, HIDDEN),
        (EXPERTS, HIDDEN, INTER),
    ]
    again = weights.quantize_weights(*weights.dequantize_weights(w))
    for value, value2 in zip(
        weights.dequantize_weights(w), weights.dequantize_weights(again), strict=True
    ):
        np.testing.assert_array_equal(value, value2)
    assert all(v.dtype == jnp.bfloat16 for v in weights.dequantize_weights(w, jnp.bfloat16))


# Layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_every_layout_has_an_exact_inverse(layout, jit):
    convert = TO_LAYOUT if jit else weights.to_layout
    w = random_bytes(np.random.default_rng(1))
    moved = convert(w, layout)
    assert moved.layout == layout
    weights.check_weights(moved, config(), EXPERTS)
    for name in FIELDS:  # the same bytes, each as often as before
        counts = [np.bincount(np.ravel(getattr(x, name)), minlength=256) for x in (w, moved)]
        np.testing.assert_array_equal(*counts)
    assert_same(convert(moved, "canonical"), w)
    for other in weights.LAYOUTS:
        assert_same(convert(convert(moved, other), layout), moved)


def test_every_byte_value_survives():
    w = random_bytes(np.random.default_rng(2), num_experts=4)
    assert all(np.unique(getattr(w, name)).size == 256 for name in FIELDS)
    for layout in weights.LAYOUTS:
        assert_same(weights.to_layout(weights.to_layout(w, layout), "canonical"), w)


@given(st.sampled_from([1, 3]), st.integers(1, 2), st.integers(1, 2), st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_layouts_are_inverse_for_any_shape(num_experts, intermediate, hidden, seed):
    rng = np.random.default_rng(seed)
    w = random_bytes(rng, num_experts, 128 * intermediate, 128 * hidden)
    for layout in weights.LAYOUTS:
        assert_same(TO_LAYOUT(TO_LAYOUT(w, layout), "canonical"), w)


def test_interleave_order():
    intermediate = 32
    gate = [f"gate {i}" for i in range(intermediate)]
    up = [f"up {i}" for i in range(intermediate)]
    number = {name: n for n, name in enumerate(gate + up)}
    order = (
        *("gate 0", "gate 1", "gate 2", "gate 3", "gate 4", "gate 5", "gate 6", "gate 7"),
        *("up 0", "up 1", "up 2", "up 3", "up 4", "up 5", "up 6", "up 7"),
        *("gate 8", "gate 9", "gate 10", "gate 11", "gate 12", "gate 13", "gate 14", "gate 15"),
        *("up 8", "up 9", "up 10", "up 11", "up 12", "up 13", "up 14", "up 15"),
    )
    rows = jnp.arange(2 * intermediate).reshape(1, -1, 1) + jnp.zeros((2, 1, 3), jnp.int32)
    mixed = weights.interleave_gate_up(rows)
    assert mixed[1, :32, 2].tolist() == [number[name] for name in order]
    # The same as a formula: row 16 p + j holds gate row 8 p + j, row 16 p + 8 + j its up row.
    for i in range(intermediate):
        pair, j = divmod(i, 8)
        assert int(mixed[0, 16 * pair + j, 0]) == number[f"gate {i}"]
        assert int(mixed[0, 16 * pair + 8 + j, 0]) == number[f"up {i}"]
    np.testing.assert_array_equal(weights.deinterleave_gate_up(mixed), rows)


def test_cpu_panel_positions():
    w = random_bytes(np.random.default_rng(3))
    cpu = weights.to_layout(w, "cpu")
    assert cpu.w13.shape == (EXPERTS, 2 * INTER // 16, HIDDEN // 2, 16)
    assert cpu.w13_sf.shape == (EXPERTS, 2 * INTER // 16, HIDDEN // 32, 16)
    assert cpu.w2.shape == (EXPERTS, HIDDEN // 16, INTER // 2, 16)
    assert cpu.w2_sf.shape == (EXPERTS, HIDDEN // 16, INTER // 32, 16)
    canonical = {name: np.asarray(getattr(w, name)) for name in FIELDS}
    panels = {name: np.asarray(getattr(cpu, name)) for name in FIELDS}
    for name in ("w13", "w13_sf"):
        for panel in range(2 * INTER // 16):
            for lane in range(16):
                # Lanes 0..7: gate rows of channels 8 p .. 8 p + 7; lanes 8..15: their up rows.
                row = 8 * panel + lane if lane < 8 else INTER + 8 * panel + lane - 8
                np.testing.assert_array_equal(
                    panels[name][:, panel, :, lane], canonical[name][:, row, :]
                )
    for name in ("w2", "w2_sf"):
        for panel in range(HIDDEN // 16):
            for lane in range(16):
                np.testing.assert_array_equal(
                    panels[name][:, panel, :, lane], canonical[name][:, 16 * panel + lane, :]
                )
    # One element by hand: k = 70 of up row 19 is the low nibble of byte 35, in panel 2, lane 11.
    assert panels["w13"][1, 2, 35, 11] & 15 == canonical["w13"][1, INTER + 19, 35] & 15
    assert panels["w13_sf"][1, 2, 70 // 32, 11] == canonical["w13_sf"][1, INTER + 19, 2]


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_dequantised_values_do_not_depend_on_the_layout(layout):
    w = weights.quantize_weights(*dense())
    moved = weights.to_layout(w, layout)
    for value, want in zip(
        weights.dequantize_weights(moved), weights.dequantize_weights(w), strict=True
    ):
        np.testing.assert_array_equal(value, want)


def test_same_layout_is_no_copy():
    w = random_bytes(np.random.default_rng(4))
    assert weights.to_layout(w, "canonical") is w


# The pytree --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_pytree_keeps_the_layout(layout):
    w = weights.to_layout(random_bytes(np.random.default_rng(5)), layout)
    leaves, treedef = jax.tree.flatten(w)
    assert len(leaves) == 4
    assert_same(jax.tree.unflatten(treedef, leaves), w)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(w)]
    assert paths == [".w13", ".w13_sf", ".w2", ".w2_sf"]


def test_layouts_are_different_trees():
    w = random_bytes(np.random.default_rng(6))
    cpu = weights.to_layout(w, "cpu")
    assert jax.tree.structure(w) != jax.tree.structure(cpu)
    with pytest.raises(ValueError):
        jax.tree.map(lambda a, b: a, w, cpu)


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_tree_map_under_jit_and_donation(layout):
    w = weights.to_layout(random_bytes(np.random.default_rng(7)), layout)
    want = jax.tree.map(lambda a: np.asarray(a) ^ 0xFF, w)

    def invert(tree):
        return jax.tree.map(lambda a: a ^ jnp.uint8(0xFF), tree)

    assert_same(jax.jit(invert)(w), want)
    donated = jax.jit(invert, donate_argnums=0)(w)
    assert_same(donated, want)
    assert_same(
        jax.jit(lambda t: weights.to_layout(t, "canonical"))(donated),
        weights.to_layout(want, "canonical"),
    )


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_bytes(np.random.default_rng(8)).layout = "cpu"


# Errors ------------------------------------------------------------------------------------------


def refused(call, *parts: str) -> None:
    with pytest.raises(MegaMoEError) as error:
        call()
    for part in ("jax_megamoe: ", *parts):
        assert part.lower() in str(error.value).lower(), f"{part!r} is not in {error.value}"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_non_finite_weights_are_refused(which, bad):
    arrays = list(dense())
    arrays[which][1, 5, 77] = bad
    refused(
        lambda: weights.quantize_weights(*arrays),
        ("w_gate or w_up", "w_gate or w_up", "w_down")[which] + ": got a NaN or an infinity",
        "expected finite weights",
        "look at the source of these weights",
    )


def test_non_finite_weights_under_jit_are_nan_not_an_error():
    gate, up, down = dense()
    gate[1, 5, 77] = np.nan
    w = jax.jit(weights.quantize_weights)(gate, up, down)
    got_gate, got_up, got_down = weights.dequantize_weights(w)
    assert np.argwhere(np.isnan(got_gate))[:, 2].tolist() == list(range(64, 96))
    assert not np.isnan(got_up).any() and not np.isnan(got_down).any()


def test_messages_of_quantize_weights():
    gate, up, down = dense()
    transposed = "weights are [experts, out, in]; transpose [in, out] matrices first"
    cases = [
        ((gate[0], up, down), "w_gate: got float32[128, 256]", "[E, I, H]"),
        (([1.0], up, down), "w_gate: got list", "[E, I, H]"),
        (
            (gate.astype(np.float64), up, down),
            "w_gate: got float64",
            "float32 or bfloat16 or float16",
        ),
        ((gate, up[:, :64], down), "w_up: got float32[3, 64, 256]", "[3, 128, 256]"),
        ((gate, up.astype(np.int8), down), "w_up: got int8", "float32 or bfloat16 or float16"),
        ((gate, up, gate), "w_down: got float32[3, 128, 256]", "[3, 256, 128]"),
        ((gate, up, down[:2]), "w_down: got float32[2, 256, 128]", "[3, 256, 128]"),
    ]
    for arrays, got, want in cases:
        refused(lambda a=arrays: weights.quantize_weights(*a), got, want, transposed)
    narrow = [w[..., :48] for w in (gate, up)]
    refused(
        lambda: weights.quantize_weights(*narrow, np.zeros((EXPERTS, 48, INTER), np.float32)),
        "last axis of the array to quantise: got [3, 256, 48]",
        "a multiple of 32",
    )


def test_messages_of_to_layout():
    w = random_bytes(np.random.default_rng(9))
    for call in (
        lambda: weights.to_layout(w, "tpu"),
        lambda: weights.to_layout(dataclasses.replace(w, layout="tpu"), "canonical"),
    ):
        refused(
            call,
            "weights layout: got 'tpu'",
            f"expected one of {weights.LAYOUTS}",
            "layer.shard(weights) picks the right one",
        )


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_messages_of_check_weights(layout):
    w = weights.to_layout(random_bytes(np.random.default_rng(10)), layout)
    weights.check_weights(w, config(), EXPERTS)
    refused(
        lambda: weights.check_weights({"w13": w.w13}, config(), EXPERTS),
        "weights: got dict",
        "expected jax_megamoe.ExpertWeights",
        "jax_megamoe.quantize_weights",
    )
    remedy = "compare num_experts, hidden and intermediate of the config with the weights"
    for name in FIELDS:
        array = getattr(w, name)
        label = f"weights.{name} ({layout} layout): got "
        spelled = list(array.shape)
        short = dataclasses.replace(w, **{name: array[:, :-1]})
        refused(
            lambda short=short: weights.check_weights(short, config(), EXPERTS),
            f"{label}uint8{[EXPERTS, spelled[1] - 1, *spelled[2:]]}",
            f"expected uint8 {spelled}",
            remedy,
        )
        signed = dataclasses.replace(w, **{name: array.astype(jnp.int8)})
        refused(
            lambda signed=signed: weights.check_weights(signed, config(), EXPERTS),
            f"{label}int8{spelled}",
            f"expected uint8 {spelled}",
            remedy,
        )
    refused(
        lambda: weights.check_weights(w, config(), EXPERTS + 1),
        f"expected uint8 [{EXPERTS + 1}, ",
        remedy,
    )
    refused(
        lambda: weights.check_weights(w, config(hidden=2 * HIDDEN), EXPERTS),
        "weights.w13 (",
        remedy,
    )
    refused(
        lambda: weights.check_weights(w, config(intermediate=2 * INTER), EXPERTS),
        "weights.w13 (",
        remedy,
    )
