"""Checkpoints of every family: bytes, rounding, partial reads, and every way they can be wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import checkpoint_files as files
import jax_megamoe as jmm
from checkpoint_files import EXPERTS, HIDDEN, INTER, TOP_K, VOCAB
from jax_megamoe import checkpoints
from jax_megamoe.checkpoints.files import Shard
from jax_megamoe.errors import MegaMoEError
from moe_case import Case, mesh_of

FIELDS = ("w13", "w13_sf", "w2", "w2_sf")
E8M0, BF16 = ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16

# name -> (maker, family)
EXACT = {
    "V4": (files.deepseek_v4, "deepseek_v4"),
    "V4.1": (lambda rng: files.deepseek_v4(rng, nested=True), "deepseek_v4"),
    "Kimi-K3": (files.kimi_k3, "kimi_k3"),
    "gpt-oss": (files.gpt_oss, "gpt_oss"),
    "gpt-oss original": (lambda rng: files.gpt_oss(rng, original=True), "gpt_oss"),
}
ROUNDED = {
    "V4-Base": (lambda rng: files.deepseek_v4(rng, base_scales=np.float32), "deepseek_v4"),
    "V3": (files.deepseek_v3, "deepseek_v3"),
    "V3 with E8M0": (lambda rng: files.deepseek_v3(rng, scale_dtype=E8M0), "deepseek_v3"),
    "V3 in BF16": (lambda rng: files.deepseek_v3(rng, scale_dtype=None), "deepseek_v3"),
    "Kimi-K2": (lambda rng: files.deepseek_v3(rng, "kimi_k2"), "deepseek_v3"),
    "Qwen3": (files.qwen3_moe, "qwen3_moe"),
    "Qwen3 FP8": (lambda rng: files.qwen3_moe(rng, np.float32), "qwen3_moe"),
    "Qwen3 FP8, BF16 scales": (lambda rng: files.qwen3_moe(rng, BF16), "qwen3_moe"),
    "Qwen2": (lambda rng: files.qwen3_moe(rng, model_type="qwen2_moe"), "qwen3_moe"),
    "Qwen2 FP8": (
        lambda rng: files.qwen3_moe(rng, np.float32, model_type="qwen2_moe"),
        "qwen3_moe",
    ),
}
ALL = EXACT | ROUNDED


def make(name, rng) -> files.Model:
    return ALL[name][0](rng)


def assert_experts(weights: jmm.ExpertWeights, expected, ids) -> None:
    assert weights.layout == "canonical"
    for field in FIELDS:
        got = getattr(weights, field)
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, np.asarray(expected[field])[list(ids)], err_msg=field)


def rounded(expected) -> dict[str, np.ndarray]:
    weights = jmm.quantize_weights(*(expected[f"w_{role}"] for role in ("gate", "up", "down")))
    return {field: np.asarray(getattr(weights, field)) for field in FIELDS}


# What comes out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_mxfp4_loads_bit_for_bit(name, num_shards, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, num_shards))
    assert checkpoint.family == EXACT[name][1]
    assert checkpoint.layers == model.layers
    for layer in model.layers:
        assert_experts(checkpoint.experts(layer), model.expected[layer], range(EXPERTS))
        some = checkpoint.experts(layer, experts=[2, 0], requantize=True)  # there is nothing to do
        assert_experts(some, model.expected[layer], [2, 0])
    assert checkpoint.relative_errors == {}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", ROUNDED)
def test_other_formats_are_rounded_only_on_request(name, num_shards, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, num_shards))
    assert checkpoint.family == ROUNDED[name][1]
    assert checkpoint.layers == model.layers
    layer = model.layers[-1]
    with pytest.raises(MegaMoEError, match=r"got (FP8|unquant).*MXFP4.*requantize=True"):
        checkpoint.experts(layer)
    assert checkpoint.relative_errors == {}

    expected = model.expected[layer]
    assert_experts(checkpoint.experts(layer, requantize=True), rounded(expected), range(EXPERTS))
    errors = checkpoint.relative_errors[layer]
    dense = jmm.dequantize_weights(jmm.ExpertWeights(**rounded(expected)))
    for role, approximation in zip(("gate", "up", "down"), dense, strict=True):
        truth = expected[f"w_{role}"].astype(np.float64)
        error = np.linalg.norm(np.asarray(approximation) - truth) / np.linalg.norm(truth)
        # Sums of squares are taken in FP32: of n addends, each off by at most 2^-24 of the sum.
        assert getattr(errors, role) == pytest.approx(error, rel=truth.size * 2.0**-24)

    some = checkpoint.experts(layer, experts=range(1, 3), requantize=True)
    assert_experts(some, rounded(expected), range(1, 3))


@pytest.mark.parametrize("name", ALL)
def test_config_makes_a_layer(name, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    layer = model.layers[-1]
    activation = {
        "deepseek_v4": jmm.swiglu(limit=10.0),
        "kimi_k3": jmm.situ(4.0, 25.0),
        "gpt_oss": jmm.gpt_oss_swiglu(1.702, 7.0),
    }.get(checkpoint.family, jmm.swiglu())
    fields = checkpoint.config(layer)
    assert jmm.MegaMoEConfig(**fields, max_tokens_per_rank=8) == jmm.MegaMoEConfig(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=INTER,
        max_tokens_per_rank=8,
        activation=activation,
    )
    assert checkpoint.config(layer, activation=jmm.swiglu(3.0))["activation"].limit == 3.0


@pytest.mark.parametrize(
    "name, activation",
    [
        ("V4.1", {"kind": "swiglu", "limit": 10.0}),
        ("V3", {"kind": "swiglu", "limit": None}),
        ("Kimi-K3", {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}),
        ("gpt-oss original", {"kind": "gpt_oss_swiglu", "limit": 7.0, "alpha": 1.702}),
    ],
)
def test_activation(name, activation, rng, tmp_path):
    checkpoint = checkpoints.open(files.write(make(name, rng), tmp_path))
    assert checkpoint.activation == activation


@pytest.mark.parametrize("name", ["Qwen3", "Kimi-K3"])
def test_an_activation_by_another_name_is_refused(name, rng, tmp_path):
    model = make(name, rng)
    model.text_config["hidden_act"] = "gelu"
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    assert checkpoint.activation == {"kind": "gelu"}
    with pytest.raises(MegaMoEError, match=r"got \{'kind': 'gelu'\}"):
        checkpoint.config(1)


def test_situ_without_a_bound_is_refused(rng, tmp_path):
    model = make("Kimi-K3", rng)
    model.text_config["activation_situ_linear_beta"] = None
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    with pytest.raises(MegaMoEError, match=r"activation.linear_beta: got None; expected a number"):
        checkpoint.config(1)


def test_loaded_weights_run(rng, tmp_path):
    checkpoint = checkpoints.open(files.write(make("V4", rng), tmp_path))
    config = jmm.MegaMoEConfig(**checkpoint.config(1), max_tokens_per_rank=8, timeout_s=60.0)
    weights = checkpoint.experts(1)
    # The scale bytes 0 and 254 overflow everything: the file's codes with scales of one size.
    sf = {name: np.full_like(getattr(weights, name), 120) for name in ("w13_sf", "w2_sf")}
    case = Case(rng, config, 2, 8)
    case.weights = dataclasses.replace(weights, **sf)
    with jmm.MegaMoE(config, mesh_of(2)) as layer:
        y = layer(*case.operands, layer.shard(case.weights))
    case.check(y)


@pytest.mark.parametrize("name", ALL)
def test_router_tensors_come_as_stored(name, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, 2))
    parts = {"weight", "bias", "tid2eid", "e_score_correction_bias"}
    for layer in model.layers:
        stored = {
            match[2]: array
            for tensor, array in model.tensors.items()
            if (match := re.search(rf"\.{layer}\.\w+\.(gate|router)\.(\w+)$", tensor))
        }
        assert set(stored) <= parts
        router = checkpoint.router(layer)
        assert set(router) == set(stored)
        for part, array in stored.items():
            assert router[part].dtype == array.dtype
            np.testing.assert_array_equal(router[part], array)
    if name == "V4":
        assert set(checkpoint.router(0)) == {"weight", "tid2eid"}
        assert checkpoint.router(0)["tid2eid"].shape == (VOCAB, TOP_K)
        assert set(checkpoint.router(1)) == {"weight", "bias"}


@pytest.mark.parametrize("name", ALL)
def test_shared_experts(name, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, 3))
    for layer in model.layers:
        shared = checkpoint.shared_expert(layer)
        expected = model.shared.get(layer, {})
        assert set(shared) == set(expected)
        for role, matrix in shared.items():
            assert matrix.dtype == BF16
            np.testing.assert_array_equal(matrix, expected[role].astype(BF16), err_msg=role)
    assert bool(model.shared) == (checkpoint.family != "gpt_oss" and "Qwen3" not in name)


def test_power_of_two_scales_leave_shared_experts_exact(rng, tmp_path):
    model = files.deepseek_v4(rng)
    shared = checkpoints.open(files.write(model, tmp_path)).shared_expert(1)
    for role, matrix in shared.items():
        np.testing.assert_array_equal(matrix.astype(np.float32), model.shared[1][role])


def test_a_shared_expert_in_fp32_comes_as_stored(rng, tmp_path):
    model = files.kimi_k3(rng)
    name = next(t for t in model.tensors if t.endswith("shared_experts.up_proj.weight"))
    model.tensors[name] = files.f32(rng, *model.tensors[name].shape)
    shared = checkpoints.open(files.write(model, tmp_path)).shared_expert(1)
    assert shared["up"].dtype == np.float32 and shared["gate"].dtype == BF16
    np.testing.assert_array_equal(shared["up"], model.tensors[name])


@pytest.mark.parametrize("name", ALL)
def test_biases_as_stored_and_in_the_weights(name, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, 2))
    layer = model.layers[-1]
    biases = checkpoint.biases(layer, experts=[3, 1])
    if checkpoint.family != "gpt_oss":
        assert biases == {}
        return
    assert set(biases) == {"gate", "up", "down"}
    for role, bias in biases.items():
        assert bias.dtype == BF16
        np.testing.assert_array_equal(bias, model.expected[layer][f"{role}_bias"][[3, 1]])
    weights = checkpoint.experts(layer, experts=[3, 1])
    assert weights.b13.dtype == weights.b2.dtype == np.float32
    for got, role in zip(jmm.expert_biases(weights), biases, strict=True):
        np.testing.assert_array_equal(got, np.float32(biases[role]))


def test_a_bias_that_is_no_number(rng, tmp_path):
    model = make("gpt-oss", rng)
    name = next(name for name in model.tensors if name.endswith("down_proj_bias"))
    bad = model.tensors[name].copy()
    bad[1, 3] = np.nan
    model.tensors[name] = bad
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    with pytest.raises(MegaMoEError, match=rf"tensor {re.escape(name)}: got a NaN or an infinity"):
        for layer in model.layers:
            checkpoint.experts(layer)


@pytest.mark.parametrize("name", ["V3", "gpt-oss", "V4"])
def test_any_tensor_by_name(name, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, 2))
    assert set(checkpoint.tensor_names) == set(model.tensors)
    for tensor, array in model.tensors.items():
        got = checkpoint.tensor(tensor)
        assert got.dtype == array.dtype and got.shape == array.shape
        assert got.tobytes() == array.tobytes()
    with pytest.raises(MegaMoEError, match="no such tensor"):
        checkpoint.tensor("lm_head.weight")


def test_a_file_of_the_librarys_own_writer(rng, tmp_path):
    from safetensors.numpy import save_file

    model = make("Qwen3", rng)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    tensors = {name: array.astype(np.float32) for name, array in model.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    weights = checkpoints.open(tmp_path).experts(1, requantize=True)
    assert_experts(weights, rounded(model.expected[1]), range(EXPERTS))


def test_the_package_does_not_import_safetensors():
    code = "import sys, jax_megamoe; sys.exit('safetensors' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_library(rng, tmp_path, monkeypatch):
    files.write(make("V4", rng), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MegaMoEError, match=r"pip install 'jax-megamoe\[checkpoints\]'"):
        checkpoints.open(tmp_path)


def test_relative_error_in_words():
    error = checkpoints.RelativeError(0.1234, 0.1, 0.0)
    assert str(error) == "gate 12.34%, up 10.00%, down 0.00%"


def test_progress(rng, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, "jax_megamoe")
    checkpoint = checkpoints.open(files.write(make("V3", rng), tmp_path))
    calls = []
    checkpoint.experts(1, requantize=True, progress=lambda *call: calls.append(call))
    assert calls == [(i, EXPERTS) for i in range(1, EXPERTS + 1)]
    assert capsys.readouterr().err == ""
    checkpoint.experts(1, [0, 3], requantize=True, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].endswith(f"layer 1 [{'#' * 30}] 2/2 experts")
    assert caplog.messages[-1] == f"layer 1, relative error: {checkpoint.relative_errors[1]}"


# Partial reads -----------------------------------------------------------------------------------


def in_layer(name: str, layer: int) -> bool:
    return re.search(rf"(layers|block)\.{layer}\.", name) is not None


def expert_of(name: str) -> int | None:
    match = re.search(r"\.experts\.(\d+)\.", name)
    return int(match[1]) if match else None


@pytest.mark.parametrize("name", ALL)
def test_bytes_of_other_experts_are_not_looked_at(name, rng, tmp_path, monkeypatch):
    model = make(name, rng)
    layer = model.layers[-1]
    files.write(model, tmp_path)
    ranges = files.write_file(tmp_path / "model.safetensors", model.tensors)
    asked = []
    original = Shard.bytes_of

    def bytes_of(self, tensor, index=None):
        result = original(self, tensor, index)
        start = result.__array_interface__["data"][0] - self.map.__array_interface__["data"][0]
        asked.append((tensor, start, start + result.nbytes))
        return result

    monkeypatch.setattr(Shard, "bytes_of", bytes_of)
    checkpoints.open(tmp_path).experts(layer, experts=[2], requantize=True)
    wanted = set()
    for tensor, (start, stop) in ranges.items():
        if not in_layer(tensor, layer):
            continue
        if expert_of(tensor) == 2:
            wanted.add((tensor, start, stop))
        elif tensor.endswith(("blocks", "scales", "proj_bias", "mlp1_bias", "mlp2_bias")):
            part = (stop - start) // EXPERTS
            wanted.add((tensor, start + 2 * part, start + 3 * part))
    assert wanted and set(asked) == wanted


@pytest.mark.parametrize("name", EXACT)
def test_garbage_in_other_experts_does_not_matter(name, rng, tmp_path):
    model = make(name, rng)
    layer = model.layers[-1]
    damaged = {}
    for tensor, array in model.tensors.items():
        raw = array.copy().view(np.uint8)
        if tensor.endswith(("blocks", "scales")):
            raw[[0, 1, 3]] = 0xFF
        elif expert_of(tensor) not in (None, 2):
            raw[:] = 0xFF
        damaged[tensor] = raw.view(array.dtype)
    model.tensors = damaged
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    assert_experts(checkpoint.experts(layer, experts=[2]), model.expected[layer], [2])
    with pytest.raises(MegaMoEError, match="scale byte 255"):
        checkpoint.experts(layer)


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps, which Linux has"
)
def test_pages_of_other_experts_stay_untouched(rng, tmp_path):
    """One of 8 experts of a file of 12 MiB: the mapping's resident pages are about its part."""
    num, hidden, inter = 8, 1024, 1024
    config = {"model_type": "kimi_k3", "hidden_size": hidden, "moe_intermediate_size": inter}
    config |= {"num_experts": num, "num_experts_per_token": 2}
    tensors = {}
    for expert in range(num):
        for projection in ("w1", "w2", "w3"):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{projection}.weight"
            tensors[f"{name}_packed"], tensors[f"{name}_scale"] = files.fp4(rng, hidden, inter)
    files.write(files.Model(config, tensors, (0,), {}), tmp_path)
    checkpoint = checkpoints.open(tmp_path)

    def resident() -> int:
        maps = Path("/proc/self/smaps").read_text()
        blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.M)
        mine = [block for block in blocks if str(tmp_path / "model.safetensors") in block]
        assert mine
        return sum(1024 * int(re.search(r"^Rss:\s+(\d+)", block, re.M)[1]) for block in mine)

    one = sum(array.nbytes for name, array in tensors.items() if expert_of(name) == 5)
    checkpoint.experts(0, experts=[5])
    # A fault maps up to 64 KiB around it: at both ends of six tensors, and for the header.
    assert one <= resident() <= one + 13 * 2**16
    checkpoint.experts(0)
    assert resident() >= num * one


def test_shards_of_other_experts_need_not_be_there(rng, tmp_path):
    model = make("V4", rng)
    files.write(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    parts: dict[str, dict] = {"a.safetensors": {}, "b.safetensors": {}}
    for tensor, array in model.tensors.items():
        file = "b.safetensors" if expert_of(tensor) in (2, 3) else "a.safetensors"
        parts[file][tensor] = array
    files.write_file(tmp_path / "b.safetensors", parts["b.safetensors"])
    files.write_index(tmp_path, {t: file for file, part in parts.items() for t in part})
    checkpoint = checkpoints.open(tmp_path)
    assert checkpoint.config(1)["hidden"] == HIDDEN
    assert_experts(checkpoint.experts(1, range(2, 4)), model.expected[1], range(2, 4))
    for use in (checkpoint.experts, checkpoint.router):
        with pytest.raises(MegaMoEError, match=r"a\.safetensors: got no such file.*this shard"):
            use(1)


# Mistakes ----------------------------------------------------------------------------------------


def load(path, **options):
    checkpoint = checkpoints.open(path, **options)
    return checkpoint.experts(checkpoint.layers[-1], requantize=True)


def replaced(model, suffix, change):
    """`model` with `change` applied to the tensor of its last layer that ends in `suffix`."""
    layer = model.layers[-1]
    (name,) = (t for t in model.tensors if in_layer(t, layer) and t.endswith(suffix))
    result = change(model.tensors[name])
    if result is None:
        del model.tensors[name]
    else:
        model.tensors[name] = result
    return model


def nan_scale(sf):
    sf = sf.copy()
    sf.view(np.uint8)[2, 1] = 255
    return sf


def stacked_nan_scale(sf):
    sf = sf.copy()
    sf[2, 5, 1] = 255
    return sf


SHARED_MISTAKES = {
    "no up projection": (
        lambda model: replaced(model, "shared_experts.up_proj.weight", lambda a: None),
        r"shared expert of layer 1: got no up; expected gate and up and down",
    ),
    "none at all": (
        lambda model: drop(model, "shared_experts"),
        r"shared expert of layer 1: got no gate",
    ),
    "one that config.json does not know": (
        lambda model: set_config(model, n_shared_experts=0),
        r"shared expert of layer 1: got .*shared_experts\..*; expected none, as config.json says",
    ),
    "no word about it": (
        lambda model: set_config(model, n_shared_experts=None),
        r"n_shared_experts or num_shared_experts: got no such entry",
    ),
    "more of them than config.json says": (
        lambda model: set_config(model, n_shared_experts=1),
        r"shared_experts.gate_proj.weight: got F8_E4M3\[192, 192\]; expected F8_E4M3 \[96, 192\]",
    ),
    "a gate that this family has not": (
        lambda model: model.tensors.update(
            {"model.layers.1.mlp.shared_expert_gate.weight": np.ones((1, HIDDEN), BF16)}
        ),
        r"shared expert of layer 1: got a token_gate",
    ),
    "scales of other blocks": (
        lambda model: replaced(
            model, "shared_experts.up_proj.weight_scale_inv", lambda a: a[:1].copy()
        ),
        r"up_proj.weight_scale_inv: got F32\[1, 2\]; expected F32 \[2, 2\]",
    ),
    "no scales": (
        lambda model: replaced(model, "shared_experts.up_proj.weight_scale_inv", lambda a: None),
        r"up_proj.weight: got F8_E4M3 without scales; expected FP8 .* or unquantised",
    ),
    "a NaN": (
        lambda model: replaced(model, "shared_experts.down_proj.weight", nan_code),
        r"shared_experts.down_proj.weight: got a NaN or an infinity",
    ),
}


def set_config(model, **entries):
    for name, value in entries.items():
        model.text_config.pop(name)
        if value is not None:
            model.text_config[name] = value


def drop(model, part):
    model.tensors = {name: array for name, array in model.tensors.items() if part not in name}


def nan_code(values):
    values = values.copy()
    values.view(np.uint8)[3, 5] = 0x7F
    return values


@pytest.mark.parametrize("name", SHARED_MISTAKES)
def test_mistakes_in_shared_experts(name, rng, tmp_path):
    change, message = SHARED_MISTAKES[name]
    model = files.deepseek_v3(rng)
    change(model)
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    with pytest.raises(MegaMoEError, match=message):
        checkpoint.shared_expert(1)


@pytest.mark.parametrize("name", ALL)
def test_latents(name, rng, tmp_path):
    model = make(name, rng)
    checkpoint = checkpoints.open(files.write(model, tmp_path, 2))
    latent = checkpoint.latent(model.layers[-1])
    assert set(latent) == (set() if name != "Kimi-K3" else {"down", "norm", "up"})
    for role, array in latent.items():
        (stored,) = (a for t, a in model.tensors.items() if f"routed_expert_{role}" in t)
        assert array.dtype == stored.dtype
        np.testing.assert_array_equal(array, stored)


LATENT_MISTAKES = {
    "no norm": (
        lambda model: replaced(model, "routed_expert_norm.weight", lambda a: None),
        r"latent of layer 1: got down and up; expected down and norm and up",
    ),
    "a norm that config.json does not know": (
        lambda model: set_config(model, latent_moe_use_norm=False),
        r"latent of layer 1: got down and norm and up; expected down and up",
    ),
    "up of another width": (
        lambda model: replaced(model, "routed_expert_up_proj.weight", lambda a: a[:7].copy()),
        r"routed_expert_up_proj.weight: got BF16\[7, 192\]; expected BF16 \[384, 192\]",
    ),
    "an infinity": (
        lambda model: replaced(model, "routed_expert_down_proj.weight", with_infinity),
        r"routed_expert_down_proj.weight: got a NaN or an infinity",
    ),
}


@pytest.mark.parametrize("name", LATENT_MISTAKES)
def test_mistakes_in_latents(name, rng, tmp_path):
    change, message = LATENT_MISTAKES[name]
    model = files.kimi_k3(rng)
    change(model)
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    with pytest.raises(MegaMoEError, match=message):
        checkpoint.latent(1)


def test_a_latent_without_norm(rng, tmp_path):
    model = files.kimi_k3(rng)
    set_config(model, latent_moe_use_norm=False)
    replaced(model, "routed_expert_norm.weight", lambda a: None)
    latent = checkpoints.open(files.write(model, tmp_path)).latent(1)
    assert set(latent) == {"down", "up"}


def test_a_nan_scale_of_a_shared_expert(rng, tmp_path):
    model = replaced(files.deepseek_v4(rng, nested=True), "shared_experts.w3.scale", nan_scale)
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    message = r"tensor layers.1.ffn.shared_experts.w3.scale, row 2, block 1: got scale byte 255"
    with pytest.raises(MegaMoEError, match=message):
        checkpoint.shared_expert(1)
    with pytest.raises(MegaMoEError, match="one of the layers with experts, 0-1"):
        checkpoint.shared_expert(7)


def with_infinity(values):
    values = values.copy()
    values[3, 4] = np.inf
    return values


def remove(_):
    return None


# case -> (model, suffix of a tensor, change, what the message says)
DAMAGED = {
    "missing expert tensor": (
        "V4", "experts.2.w3.weight", remove, ["no values of up of expert 2", "1 tensors"],
    ),
    "missing scales": ("V4", "experts.2.w3.scale", remove, ["got no scales", "F8_E8M0"]),
    "missing first scales": (
        "V3", "experts.0.gate_proj.weight_scale_inv", remove, ["F8_E4M3 without scales"],
    ),
    "missing bias": ("gpt-oss", "down_proj_bias", remove, ["no bias of down"]),
    "missing stacked tensor": ("gpt-oss", "down_proj_blocks", remove, ["no values of down"]),
    "missing stacked scales": ("gpt-oss", "down_proj_scales", remove, ["got no scales"]),
    "dtype of one expert": (
        "V4", "experts.1.w2.weight", lambda a: a.view(np.uint8), ["U8[192, 48]", "I8 [192, 48]"],
    ),
    "dtype of all": (
        "gpt-oss", "gate_up_proj_blocks", lambda a: a.astype(BF16), ["BF16 with U8 scales"],
    ),
    "NVFP4's scales": (
        "Kimi-K3",
        "experts.0.w1.weight_scale",
        lambda a: a.view(ml_dtypes.float8_e4m3fn),
        ["U8 with F8_E4M3 scales"],
    ),
    "INT4": (
        "V3",
        "experts.0.gate_proj.weight",
        lambda a: a.view(np.int32),
        ["I32 with F32 scales", "INT4 has no exact FP4 form"],
    ),
    "shape": (
        "Qwen3", "experts.3.down_proj.weight", lambda a: a.T.copy(), ["[96, 192]", "[192, 96]"],
    ),
    "scale shape": (
        "V3",
        "experts.3.down_proj.weight_scale_inv",
        lambda a: a.repeat(2, axis=1),
        ["F32[2, 2]", "F32 [2, 1]"],
    ),
    "NaN scale in V4": (
        "V4", "experts.2.w1.scale", nan_scale,
        ["experts.2.w1.scale, expert 2, row 2, block 1", "scale byte 255", "1 of 576"],
    ),
    "NaN scale in Kimi-K3": (
        "Kimi-K3", "experts.1.w2.weight_scale", nan_scale, ["expert 1, row 2, block 1"],
    ),
    "NaN scale in gpt-oss": (
        "gpt-oss", "gate_up_proj_scales", stacked_nan_scale, ["expert 2, row 5, block 1"],
    ),
    "NaN scale in V3": (
        "V3 with E8M0",
        "experts.2.down_proj.weight_scale_inv",
        lambda a: np.full_like(a, np.nan),
        ["scale byte 255"],
    ),
    "infinity in BF16": (
        "Qwen3", "experts.0.up_proj.weight", with_infinity, ["up_proj.weight: got a NaN or"],
    ),
    "NaN in FP8": (
        "V3",
        "experts.0.up_proj.weight",
        lambda a: np.full_like(a, np.nan),
        ["up_proj.weight: got a NaN or"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_damaged_tensors_are_named(case, num_shards, rng, tmp_path):
    name, suffix, change, texts = DAMAGED[case]
    load(files.write(make(name, rng), tmp_path / "good", num_shards))
    model = replaced(make(name, rng), suffix, change)
    with pytest.raises(MegaMoEError) as error:
        load(files.write(model, tmp_path / "bad", num_shards))
    for text in texts:
        assert text in str(error.value)


def test_experts_that_are_missing_or_too_many(rng, tmp_path):
    model = make("V3", rng)
    some = {t: a for t, a in model.tensors.items() if expert_of(t) != 3}
    gone = files.Model(model.config, some, model.layers, {})
    with pytest.raises(MegaMoEError, match=r"no values of gate of expert 3 \(3 tensors"):
        load(files.write(gone, tmp_path / "gone"))
    model.config["n_routed_experts"] = 3
    with pytest.raises(MegaMoEError, match="got expert 3; expected 3 experts, as config"):
        load(files.write(model, tmp_path / "more"))


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("name", ["V4", "V3", "Qwen3", "Kimi-K3", "gpt-oss"])
def test_config_that_disagrees_with_shapes(name, key, rng, tmp_path):
    model = make(name, rng)
    if name == "Kimi-K3" and key == "hidden_size":
        key = "routed_expert_hidden_size"
    if name == "gpt-oss" and key == "moe_intermediate_size":
        key = "intermediate_size"
    model.text_config[key] *= 2
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    layer = model.layers[-1]
    for use in (
        lambda: checkpoint.experts(layer, requantize=True),
        lambda: checkpoint.config(layer, activation=jmm.swiglu()),
    ):
        with pytest.raises(MegaMoEError, match=r"in config\.json.*different models or revisions"):
            use()


def test_config_that_disagrees_with_stacked_experts_and_router(rng, tmp_path):
    model = make("gpt-oss", rng)
    model.config["num_local_experts"] = 8
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    for use in (checkpoint.experts, checkpoint.biases, checkpoint.router):
        with pytest.raises(MegaMoEError, match="8"):
            use(1)


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("hidden_size", None, "got no such entry"),
        ("hidden_size", "192", "got '192'; expected a positive int"),
        ("num_experts_per_tok", None, "num_experts_per_tok or num_experts_per_token"),
        ("swiglu_limit", None, "config.json: swiglu_limit: got no such entry"),
        ("moe_intermediate_size", 80, "multiples of 32"),
        ("model_type", "llama", "got llama; expected deepseek_v4 or"),
        ("model_type", None, "got none; expected deepseek_v4 or"),
    ],
)
def test_entries_of_config(key, value, text, rng, tmp_path):
    model = make("V4", rng)
    if value is None:
        del model.config[key]
    else:
        model.config[key] = value
    with pytest.raises(MegaMoEError, match=re.escape(text)):
        checkpoints.open(files.write(model, tmp_path)).config(1)


def test_block_size(rng, tmp_path):
    model = make("V3", rng)
    model.config["quantization_config"] = {"weight_block_size": None}
    with pytest.raises(MegaMoEError, match="scale per tensor or channel is not supported"):
        load(files.write(model, tmp_path))


def test_family(rng, tmp_path):
    model = make("V3", rng)
    model.config["model_type"] = "a_model_of_its_own"
    files.write(model, tmp_path)
    with pytest.raises(MegaMoEError, match="pass family="):
        checkpoints.open(tmp_path)
    weights = load(tmp_path, family="deepseek_v3")
    assert_experts(weights, rounded(model.expected[1]), range(EXPERTS))
    with pytest.raises(MegaMoEError, match="no tensor that is named like an expert"):
        checkpoints.open(tmp_path, family="kimi_k3")
    with pytest.raises(MegaMoEError, match="family: got 'mixtral'"):
        checkpoints.open(tmp_path, family="mixtral")


def test_layers_and_ids(rng, tmp_path):
    checkpoint = checkpoints.open(files.write(make("V3", rng), tmp_path))
    for use in (checkpoint.config, checkpoint.experts, checkpoint.router, checkpoint.biases):
        with pytest.raises(MegaMoEError, match="got 0; expected one of the layers with experts, 1"):
            use(0)
    for ids in ([], [4], [-1], [1, 1]):
        with pytest.raises(MegaMoEError, match="expected different ids from 0 to 3"):
            checkpoint.experts(1, experts=ids)


def test_router_that_is_missing(rng, tmp_path):
    model = replaced(make("V3", rng), "mlp.gate.weight", remove)
    with pytest.raises(MegaMoEError, match="router of layer 1: got no weight"):
        checkpoints.open(files.write(model, tmp_path)).router(1)


# Directories and files


def test_directories(rng, tmp_path):
    with pytest.raises(MegaMoEError, match="no such directory"):
        checkpoints.open(tmp_path / "nowhere")
    with pytest.raises(MegaMoEError, match=r"no config\.json"):
        checkpoints.open(tmp_path)
    files.write(make("V4", rng), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MegaMoEError, match=r"no \*\.safetensors"):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', b"\xff"])
def test_config_that_is_no_object(text, rng, tmp_path):
    files.write(make("V4", rng), tmp_path)
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MegaMoEError, match=r"config\.json: got"):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../b.safetensors"}])
def test_index_that_is_no_index(weight_map, rng, tmp_path):
    files.write(make("V4", rng), tmp_path, 2)
    files.write_index(tmp_path, weight_map)
    with pytest.raises(MegaMoEError, match="no usable weight_map"):
        checkpoints.open(tmp_path)


def test_index_that_does_not_fit(rng, tmp_path):
    model = files.write(make("V4", rng), tmp_path, 2)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    other = {
        "model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors",
        "model-00002-of-00002.safetensors": "model-00001-of-00002.safetensors",
    }
    files.write_index(tmp_path, {name: other[file] for name, file in index.items()})
    with pytest.raises(MegaMoEError, match=r"no such tensor in model-0000\d-of-00002"):
        load(tmp_path)


def test_several_indices(rng, tmp_path):
    files.write(make("V4", rng), tmp_path, 2)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    load(tmp_path)
    index.rename(tmp_path / "third.safetensors.index.json")
    with pytest.raises(MegaMoEError, match="several"):
        checkpoints.open(tmp_path)


def test_tensors_that_are_there_twice(rng, tmp_path):
    model = make("V4", rng)
    files.write(model, tmp_path)
    part = {"layers.1.ffn.experts.0.w1.weight": model.tensors["layers.1.ffn.experts.0.w1.weight"]}
    files.write_file(tmp_path / "more.safetensors", part)
    with pytest.raises(MegaMoEError, match=r"it in model\.safetensors and in more\.safetensors"):
        checkpoints.open(tmp_path)
    # The same expert under another name.
    files.write_file(tmp_path / "more.safetensors", {"model." + t: a for t, a in part.items()})
    with pytest.raises(MegaMoEError, match=r"the same part of the same layer"):
        checkpoints.open(tmp_path)
    (tmp_path / "more.safetensors").unlink()
    text = '{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(MegaMoEError, match="got 'a' twice"):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_files_that_were_cut_off(keep, rng, tmp_path):
    files.write(make("V4", rng), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MegaMoEError, match=r"model\.safetensors: got .* a whole safetensors file"):
        checkpoints.open(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4000000000\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_git_lfs_pointers(name, rng, tmp_path):
    files.write(make("V4", rng), tmp_path)
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(MegaMoEError, match=rf"{name}: got a git-lfs pointer.*`git lfs pull`"):
        checkpoints.open(tmp_path)


def test_files_in_other_formats(rng, tmp_path):
    files.write(make("V4", rng), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.gguf")
    message = r"no \*\.safetensors, but model\.gguf \(GGUF\); .*Download the safetensors"
    with pytest.raises(MegaMoEError, match=message):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize(
    "method, more, kind",
    [
        ("awq", "qzeros", "AWQ"),
        (None, "qzeros", "AWQ"),
        (None, "g_idx", "GPTQ"),
        ("gptq", "", "GPTQ"),
    ],
)
def test_integers_with_zero_points(method, more, kind, rng, tmp_path):
    model = make("Qwen3", rng)
    tensors = {}
    for name, array in model.tensors.items():
        if ".experts." in name:
            start = name.removesuffix("weight")
            tensors[f"{start}qweight"] = np.zeros((4, 4), np.int32)
            tensors[f"{start}{more or 'scales'}"] = np.zeros((4, 4), np.int32)
        else:
            tensors[name] = array
    model.config["quantization_config"] = {"quant_method": method} if method else {}
    model = dataclasses.replace(model, tensors=tensors)
    message = rf"got experts in {kind}, such as model.*\.qweight; expected FP8 .*no exact FP4 form"
    with pytest.raises(MegaMoEError, match=message):
        checkpoints.open(files.write(model, tmp_path))


def test_other_names_are_shown(rng, tmp_path):
    files.write(make("V3", rng), tmp_path)
    message = r"named like an expert, but model\.layers\.1\.mlp\..*expert.*; expected names as in"
    with pytest.raises(MegaMoEError, match=message):
        checkpoints.open(tmp_path, family="kimi_k3")


@pytest.mark.parametrize("part", [".experts.2.up_proj", ".shared_experts.up_proj"])
@pytest.mark.parametrize(
    "shape, per",
    [((), "tensor"), ((1,), "tensor"), ((-1,), "channel"), ((-1, 1), "channel")],
)
def test_fp8_with_larger_blocks(part, shape, per, rng, tmp_path):
    model = make("V3", rng)
    name = next(name for name in model.tensors if f"{part}.weight_scale_inv" in name)
    rows = model.tensors[name.removesuffix("_scale_inv")].shape[0]
    shape = tuple(rows if n < 0 else n for n in shape)
    model.tensors[name] = np.ones(shape, np.float32)
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    message = (
        rf"tensor {re.escape(name)}: got F32{re.escape(str(list(shape)))}: a scale per {per}; "
        r"expected a scale per block of 128 x 128.*BF16.*quantize_weights"
    )
    with pytest.raises(MegaMoEError, match=message):
        if "shared" in part:
            checkpoint.shared_expert(1)
        else:
            checkpoint.experts(1, requantize=True)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_scales_that_are_not_numbers_are_named(dtype, rng, tmp_path):
    model = files.deepseek_v3(rng, scale_dtype=dtype)
    name = next(name for name in model.tensors if ".experts.3.down_proj.weight_scale_inv" in name)
    model.tensors[name].flat[1] = np.nan
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    message = rf"tensor {re.escape(name)}: got a NaN or an infinity \(1 of 2\); expected finite sc"
    with pytest.raises(MegaMoEError, match=message):
        checkpoint.experts(1, requantize=True)


def test_nvfp4_is_named(rng, tmp_path):
    model = make("V3", rng)
    for name in list(model.tensors):
        if ".experts." in name and name.endswith("weight"):
            model.tensors[name] = np.zeros((4, 4), np.uint8)
            model.tensors[f"{name}_scale_inv"] = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    with pytest.raises(MegaMoEError, match=r"got U8 with F8_E4M3 scales; .*This is NVFP4"):
        checkpoint.experts(1, requantize=True)


def test_arguments_of_other_types(rng, tmp_path):
    checkpoint = checkpoints.open(files.write(make("V4", rng), tmp_path))
    ids = "expected different ids from 0 to 3. Pass range.*"
    for call, message in (
        (lambda: checkpoint.experts(1, experts=2), rf"experts: got 2, an int; {ids}\[0\]"),
        (lambda: checkpoint.experts(1, experts=[1.5]), rf"experts: got list of 1; {ids}"),
        (lambda: checkpoint.experts(1, experts=[True]), rf"experts: got list of 1; {ids}"),
        (lambda: checkpoint.experts(1, experts="01"), rf"experts: got '01', a str; {ids}"),
        (lambda: checkpoint.experts("1"), r"layer: got '1', a str; expected one of the layers"),
        (lambda: checkpoint.router([1]), r"layer: got list of 1; expected one of the layers"),
        (lambda: checkpoint.experts(1, progress="yes"), r"progress: got 'yes', a str; .*stderr"),
        (lambda: checkpoint.tensor(3), r"name: got 3, an int; expected the full name of a tensor"),
        (lambda: checkpoints.open(None), r"path: got None; expected a str or a pathlib.Path"),
        (
            lambda: checkpoints.open(tmp_path / "config.json"),
            r"config\.json: got a file; expected a directory.*Pass the directory of the file",
        ),
    ):
        with pytest.raises(MegaMoEError, match=message):
            call()
    same = checkpoint.experts(np.int64(1), experts=np.arange(2))
    np.testing.assert_array_equal(same.w13, checkpoint.experts(1, experts=range(2)).w13)
