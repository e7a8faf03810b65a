"""Weights and tokens of widths that are not whole tiles: padded, cropped, and taken everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from jax_megamoe import padding
from jax_megamoe.weights import LAYOUTS, check_weights
from moe_case import Case, experts, mesh_of

WIDTHS = [(128, 128), (96, 160), (160, 96), (32, 128), (128, 32)]


def config_of(hidden, intermediate):
    return jmm.MegaMoEConfig(4, 2, hidden, intermediate, max_tokens_per_rank=8)


@pytest.mark.parametrize(("hidden", "intermediate"), WIDTHS)
def test_padding_adds_zeros_at_the_ends_of_gate_up_and_down(hidden, intermediate):
    config = config_of(hidden, intermediate)
    weights = experts(4, intermediate, hidden)
    padded = padding.pad_weights(weights, config)
    check_weights(padded, config, 4)
    padded_i, padded_h = config.padded_intermediate, config.padded_hidden
    assert padded.w13.shape == (4, 2 * padded_i, padded_h // 2)
    dense, wide = jmm.dequantize_weights(weights), jmm.dequantize_weights(padded)
    for w, p, shape in zip(
        dense, wide, [(padded_i, padded_h)] * 2 + [(padded_h, padded_i)], strict=True
    ):
        assert p.shape[1:] == shape
        np.testing.assert_array_equal(p[:, : w.shape[1], : w.shape[2]], w)
        assert (p[:, w.shape[1] :] == 0).all() and (p[:, :, w.shape[2] :] == 0).all()
    # A block of zeros looks as the quantiser would have written it.
    assert (np.asarray(padded.w2_sf)[:, hidden:] == 1).all()
    again = padding.pad_weights(padded, config)
    jax.tree.map(np.testing.assert_array_equal, again, padded)


@pytest.mark.parametrize(("hidden", "intermediate"), WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cropping_undoes_padding_in_any_layout(hidden, intermediate, layout):
    config = config_of(hidden, intermediate)
    weights = experts(4, intermediate, hidden)
    stored = jmm.to_layout(padding.pad_weights(weights, config), layout)
    check_weights(stored, config, 4)
    cropped = padding.crop_weights(stored, config)
    assert cropped.layout == "canonical"
    jax.tree.map(np.testing.assert_array_equal, cropped, padding.crop_weights(weights, config))
    jax.tree.map(np.testing.assert_array_equal, cropped, weights)


def test_other_widths_are_refused():
    weights = experts(4, 160, 96)
    for hidden, intermediate in ((128, 160), (96, 256), (256, 160)):
        with pytest.raises(jmm.MegaMoEError, match=r"weights\.w13"):
            check_weights(weights, config_of(hidden, intermediate), 4)


def test_tokens_are_padded_with_zeros_and_the_last_scale():
    config = config_of(160, 128)
    x = jnp.arange(320, dtype=jnp.float32).reshape(2, 160).astype(jnp.bfloat16)
    padded = padding.pad_tokens(x, config)
    assert padded.shape == (2, 256)
    np.testing.assert_array_equal(padded[:, :160], x)
    assert (padded[:, 160:] == 0).all()
    for group in (128, "row"):
        codes, sf = padding.pad_tokens(jmm.quantize.quantize_e4m3(x, group), config)
        want_codes, want_sf = jmm.quantize.quantize_e4m3(padded, group)
        np.testing.assert_array_equal(codes, want_codes)
        np.testing.assert_array_equal(sf, want_sf)


def test_what_shard_returns_is_taken_everywhere():
    config = config_of(96, 160)
    case = Case(np.random.default_rng(12), config, 2, 8)
    with jmm.MegaMoE(config, mesh_of(2)) as layer:
        sharded = layer.shard(case.weights)
        canonical = jmm.to_layout(sharded, "canonical")
        assert canonical.w2.shape == (4, 128, 128)
        for weights in (sharded, canonical):
            again = layer.shard(weights)
            jax.tree.map(np.testing.assert_array_equal, again, sharded)
        want = case.reference()
        case.weights = sharded
        np.testing.assert_array_equal(case.reference(), want)
