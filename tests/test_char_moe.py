"""examples/char_moe.py: the layer costs a language model what its number formats cost, no more."""

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import quantize, reference
from jax_megamoe._ffi import native
from moe_case import GpuCase, mesh_of

RANKS = 4
LAYERS = ("reference", "unfused layer", "fused layer")
BF16_UNIT, U = 2.0**-8, 2.0**-24  # of BF16 and of FP32
# Noise alone is beyond this many of its standard errors with a probability of 6e-7.
SIGMAS = 5
REGIONS = ("x", "x_sf", "l1_acts", "l1_acts_sf", "l1_topk_weights", "l2_acts", "l2_acts_sf")


def load_example():
    path = Path(__file__).parent.parent / "examples" / "char_moe.py"
    spec = importlib.util.spec_from_file_location("char_moe", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_moe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


char_moe = load_example()
SETTINGS = char_moe.QUICK


class Recorded(GpuCase):
    """What a block's experts were given in the model, on one rank: the rule knows no ranks."""

    def __init__(self, call, config, weights, on_gpu):
        self.config, self.num_ranks, self.weights = config, 1, weights
        self.x, self.topk_idx, self.topk_weights = map(jnp.asarray, call[1:4])
        self.on_gpu = on_gpu

    @property
    def fp8_sums(self):
        return self.on_gpu and super().fp8_sums


class Trained:
    """The model after --quick, on the CPU, and its comparisons."""

    def __init__(self):
        with jax.default_device(jax.devices("cpu")[0]):
            text, held_out = char_moe.load_text()
            self.text, self.held_out = text, held_out
            self.batches = char_moe.held_out_windows(held_out, SETTINGS)
            self.params, self.losses = char_moe.train(text, SETTINGS, log=lambda _: None)

    def compare(self, mesh, inspect=None):
        with jax.default_matmul_precision("highest"):
            return char_moe.compare(
                self.params, self.batches, SETTINGS, mesh, keep_calls=True, inspect=inspect
            )


@pytest.fixture(scope="module")
def trained():
    return Trained()


@pytest.fixture(scope="module")
def on_cpu(trained):
    """(comparison, {granularity: (last call of the fused layer, its regions on every rank)})."""
    seen = {}

    def inspect(layer, call):
        regions = [{name: layer.buffer.read(name, r) for name in REGIONS} for r in range(RANKS)]
        seen[layer.config.activation_granularity] = call, regions

    with jax.default_device(jax.devices("cpu")[0]):
        return trained.compare(mesh_of(RANKS), inspect), seen


@pytest.fixture(autouse=True, scope="module")
def computes_on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def limits(row, comparison, config, on_gpu=False):
    """What the error rule allows a row's outputs, as a norm for each block; checks each call."""
    squares = np.zeros(SETTINGS.num_blocks)
    for call in row.calls:
        case = Recorded(call, config, comparison.quantised[call.block], on_gpu)
        truth = case.truth()
        plain = case.reference(bf16_sums=case.fp8_sums)
        limit = 2 * np.linalg.norm(plain - truth)
        if row.name == "unfused layer":
            limit += BF16_UNIT * np.linalg.norm(truth)
        assert np.linalg.norm(call.y.astype(np.float64) - truth) <= limit, (row.name, call.block)
        squares[call.block] += limit**2
    return np.sqrt(squares)


def check_losses(comparison, mesh, on_gpu=False):
    """The rule for every call, and for losses what follows from it."""
    for group in SETTINGS.granularities:
        config = SETTINGS.config(group, mesh.size)
        sensitivity, both = comparison.sensitivity[group], comparison.row("both", group)
        allowed = {
            name: float(sensitivity @ limits(row, comparison, config, on_gpu))
            for name in ("both", *LAYERS)
            for row in [comparison.row(name, group)]
        }
        for name in LAYERS:
            row = comparison.row(name, group)
            assert abs(row.loss - both.loss) <= allowed[name] + allowed["both"]
            assert row.allowed <= allowed[name]  # what the example measures and prints
            for other in LAYERS:
                between = abs(row.loss - comparison.row(other, group).loss)
                assert between <= allowed[name] + allowed[other]
    char_moe.check(comparison)


def test_text_is_the_same_every_time_and_held_out(trained):
    again = char_moe.load_text()
    np.testing.assert_array_equal(trained.text, again[0])
    np.testing.assert_array_equal(trained.held_out, again[1])
    assert trained.text.max() < char_moe.VOCABULARY and len(trained.held_out) > 10_000
    learnt = set(bytes(trained.text).split(b"\n\n"))
    assert not learnt & set(bytes(trained.held_out).split(b"\n\n"))


def test_the_model_learns_and_uses_every_expert(trained, on_cpu):
    comparison, _ = on_cpu
    counts = np.bincount(trained.text, minlength=char_moe.VOCABULARY) / len(trained.text)
    single_characters = -np.sum(counts * np.log(np.maximum(counts, 1e-30)))
    assert comparison.row(char_moe.BF16).loss < single_characters
    for block in range(SETTINGS.num_blocks):
        calls = [c for c in comparison.row(char_moe.BF16).calls if c.block == block]
        idx = np.concatenate([c.topk_idx for c in calls])
        share = np.bincount(idx.reshape(-1), minlength=SETTINGS.num_experts) / idx.size
        assert share.min() > 0, share


def test_plain_experts_are_the_formula(trained, on_cpu):
    """The model's own mixture of experts against the dense float64 one, without any rounding."""
    comparison, _ = on_cpu
    config = SETTINGS.config(32, RANKS)
    for name, weights in (
        ("experts in FP32", [char_moe.dense_weights(b) for b in trained.params["blocks"]]),
        (char_moe.WEIGHTS_ONLY, comparison.dequantised),
    ):
        for call in comparison.row(name).calls[: SETTINGS.num_blocks]:
            operands = (np.asarray(a, np.float64)[None] for a in (call.x, call.topk_weights))
            x, topk_weights = operands
            idx = call.topk_idx[None]
            truth = reference.dense_float64(x, idx, topk_weights, *weights[call.block], config)[0]
            # FP32 sums: of hidden products, of intermediate products, and SwiGLU's roundings.
            bound = (SETTINGS.hidden + SETTINGS.top_k * SETTINGS.intermediate + 8) * 2.0**-24
            assert reference.relative_error(call.y, truth) <= bound


def test_layers_meet_the_rule_and_losses_agree(on_cpu):
    check_losses(on_cpu[0], mesh_of(RANKS))


@functools.partial(jax.jit, static_argnames="config")
def staged(x, topk_idx, topk_weights, quantised, config):
    """What the fused layer's buffers have to hold, and how far FP32 sums may differ.

    Returns:
      codes and sf of x; `Dispatched`; SwiGLU's output in FP32 and its codes and sf; and the most
      that two FP32 evaluations of that output differ by. Sums of H products are off by gamma times
      the sum of magnitudes, which is the product of operands without their signs. |silu'| < 1.1.
    """
    codes, sf = reference.stage_input(x, config.x_group)
    rows = reference.dispatch(codes, sf, topk_idx, topk_weights, config, block_m=native.CPU_BLOCK_M)
    gate_up = reference.linear1(rows, quantised)
    values = reference.activate(gate_up, rows.topk_weights, config.activation)
    unsigned = dataclasses.replace(quantised, w13=quantised.w13 & 0x77)
    magnitudes = reference.linear1(rows._replace(acts=rows.acts & 0x7F), unsigned)
    gamma = config.hidden * U / (1 - config.hidden * U)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    d_gate, d_up = jnp.split(gamma * magnitudes, 2, axis=-1)
    error = 1.1 * d_gate * (jnp.abs(up) + d_up) + jnp.abs(jax.nn.silu(gate)) * d_up
    error = error * jnp.abs(rows.topk_weights[..., None]) + 8 * U * jnp.abs(values)
    return (codes, sf), rows, values, quantize.quantize_e4m3(values, config.act_group), 2 * error


def test_codes_and_scales_are_those_of_the_reference(on_cpu):
    """In the fused layer's buffers after its last call; the ring still holds every row."""
    comparison, seen = on_cpu
    assert set(seen) == set(SETTINGS.granularities)
    for group, (call, regions) in seen.items():
        config = SETTINGS.config(group, RANKS)
        operands = (jnp.asarray(a).reshape(RANKS, -1, a.shape[-1]) for a in call[1:4])
        expected = staged(*operands, comparison.quantised[call.block], config)
        (codes, sf), rows, values, (acts, acts_sf), error = jax.tree.map(np.asarray, expected)
        for rank, got in enumerate(regions):
            tokens, width = codes.shape[1], config.intermediate  # buffers are padded
            np.testing.assert_array_equal(got["x"][:tokens], codes[rank])
            np.testing.assert_array_equal(got["x_sf"][:tokens], sf[rank])
            valid = np.flatnonzero(rows.source_rank[rank] >= 0)
            assert 0 < len(valid) and valid[-1] < len(got["l1_acts"])
            for name, want in (
                ("l1_acts", rows.acts),
                ("l1_acts_sf", rows.acts_sf),
                ("l1_topk_weights", rows.topk_weights),
            ):
                np.testing.assert_array_equal(got[name][valid], want[rank][valid])
            got_sf = got["l2_acts_sf"][valid][:, : width // 32]
            np.testing.assert_array_equal(got_sf, acts_sf[rank][valid])
            # Other codes only where a value that FP32 sums in another order give rounds to them.
            a, b = (
                np.asarray(quantize.dequantize_e4m3(jnp.asarray(c), jnp.asarray(got_sf)))
                for c in (got["l2_acts"][valid][:, :width], acts[rank][valid])
            )
            value, allowed = values[rank][valid], 2 * error[rank][valid]
            assert (np.abs(a - value) <= np.abs(b - value) + allowed).all()
            assert np.median(allowed) < np.median(np.abs(value)) * 2.0**-8  # E4M3 steps by 2^-3


def test_quantisation_explains_the_gap_to_bf16(on_cpu):
    comparison, _ = on_cpu
    bf16, fp32 = comparison.row(char_moe.BF16), comparison.row("experts in FP32")
    weights = comparison.row(char_moe.WEIGHTS_ONLY)
    from_weights, deviation = char_moe.difference(weights, bf16)
    assert from_weights > deviation > 0  # FP4 costs something, and the text is enough to see it
    assert abs(fp32.loss - bf16.loss) < from_weights
    for group in SETTINGS.granularities:
        activations = comparison.row("FP8 activations only", group)
        both, fused = (comparison.row(name, group) for name in ("both", "fused layer"))
        assert abs(activations.loss - bf16.loss) < from_weights
        # What is left of the gap after the roundings that have a name.
        rest, noise = char_moe.difference(fused, both)
        assert abs(rest) <= SIGMAS * noise
        assert SIGMAS * noise < both.loss - bf16.loss
    text = char_moe.table(comparison)
    assert len(text.splitlines()) == 1 + len(comparison.rows)
    assert text.count("fused layer") == 2 * len(SETTINGS.granularities)


@pytest.mark.parametrize("damage", ["weights swapped", "scale of one expert"])
def test_a_wrong_layer_is_found(trained, on_cpu, damage):
    """By the rule for the outputs, by the noise of the loss, and by its bound if much is wrong."""
    comparison, _ = on_cpu
    config, quantised = SETTINGS.config(32, 1), comparison.quantised
    if damage == "scale of one expert":
        quantised = [
            dataclasses.replace(q, w2_sf=q.w2_sf.at[0].add(np.uint8(1))) for q in quantised
        ]
    layer = char_moe.reference_moe(quantised, config)

    def moe(number, x, topk_idx, topk_weights):
        if damage == "weights swapped":
            topk_weights = topk_weights[:, ::-1]
        return layer(number, x, topk_idx, topk_weights)

    losses, calls = char_moe.evaluate(trained.params, trained.batches, moe, SETTINGS)
    row = char_moe.Row("fused layer", 32, losses, calls)
    with pytest.raises(AssertionError, match="fused layer"):
        limits(row, comparison, config)
    good, both = comparison.row("fused layer", 32), comparison.row("both", 32)
    above, _ = char_moe.difference(row, both)
    _, noise = char_moe.difference(good, both)
    assert abs(above) > SIGMAS * noise
    if damage == "weights swapped":
        allowed = comparison.sensitivity[32] @ limits(good, comparison, config)
        assert abs(above) > 2 * allowed


def test_plot(trained, on_cpu, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "losses.png"
    char_moe.plot(on_cpu[0], trained.losses, path)
    assert path.read_bytes()[1:4] == b"PNG"


def test_plot_without_matplotlib_is_refused_before_training(monkeypatch, capsys):
    monkeypatch.setattr(char_moe.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit) as stop:
        char_moe.main(["--plot", "losses.png"])
    assert stop.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu)],
)
def test_layers_on_gpus_meet_the_rule_and_losses_agree(trained, num_ranks):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num_ranks,), ("ep",), auto, devices=jax.devices("gpu")[:num_ranks])
    check_losses(trained.compare(mesh), mesh, on_gpu=True)
