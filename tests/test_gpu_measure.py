"""What `bench` and benchmarks/ measure on GPUs: counts, operands, tables; run on the simulation."""

import ctypes
import importlib.util
import json

import jax
import numpy as np
import pytest

import jax_megamoe as jmm
from gpu_case import SimulatedRanks
from jax_megamoe._ffi import native
from jax_megamoe.cli import bench, info, main
from jax_megamoe.config import GRANULARITIES
from jax_megamoe.devtools import gpu_measure
from jax_megamoe.devtools.gpu_measure import FLOP_PER_S, HBM_BYTES_PER_S, Model
from jax_megamoe.weights import check_weights, to_layout

MODEL = Model(hidden=256, intermediate=128, local_experts=4, top_k=2)


def config_of(granularity=128, num_ranks=2, max_tokens=16):
    return gpu_measure.make_config(MODEL, num_ranks, max_tokens, granularity)


def test_models_are_the_presets_on_eight_gpus():
    assert gpu_measure.MODELS.keys() == info.PRESETS.keys()
    for name, model in gpu_measure.MODELS.items():
        preset = info.PRESETS[name]
        assert (model.hidden, model.intermediate) == (preset["hidden"], preset["intermediate"])
        assert (model.local_experts * 8, model.top_k) == (preset["experts"], preset["top_k"])


def test_traffic_of_a_routing_by_hand():
    """Rank 0 sends token 0 to experts 0 and 5, token 1 to 5 only; rank 1 sends one to 0."""
    idx = np.full((2, 2, 2), -1, np.int32)
    idx[0, 0], idx[0, 1, 0], idx[1, 0, 0], idx[1, 1] = (0, 5), 5, 0, (99, -7)
    config = config_of()
    asked = gpu_measure.traffic(config, idx)
    np.testing.assert_array_equal(asked.rows, [2, 2])
    np.testing.assert_array_equal(asked.experts, [1, 1])
    shapes = (2 * 128 * 256 + 256 * 128) // 128**2
    weight_bytes = shapes * (128 * 128 // 2 + 128 * 4 // 2) + 2 * 128 + 256
    np.testing.assert_array_equal(asked.weight_bytes, [weight_bytes] * 2)
    np.testing.assert_array_equal(asked.flops, [2 * 2 * 3 * 256 * 128] * 2)
    pulled, pushed = 256 + 2 + 8, 512
    # Into rank 0: one row of rank 1, and two results of its own tokens; into rank 1 the reverse.
    np.testing.assert_array_equal(asked.link_bytes, [pulled + 2 * pushed, 2 * pulled + pushed])
    floor = max(weight_bytes / HBM_BYTES_PER_S, asked.flops[0] / FLOP_PER_S)
    assert asked.floor_us == pytest.approx(1e6 * floor)
    nothing = gpu_measure.traffic(config, np.full((2, 1, 2), -1))
    assert nothing.floor_us == 0 and not nothing.link_bytes.any()


def test_the_floor_of_a_model_changes_from_memory_to_compute():
    """Flash: 32 experts of 12.98 MB at 4.6 TB/s are 90 us; 8192 tokens are 1.85 ms of products."""
    config = gpu_measure.make_config(gpu_measure.MODELS["flash"], 1, 8192, "row")
    for tokens, floor_us in ((6, 90.3), (8192, 1846)):
        idx = np.arange(tokens * 6).reshape(1, tokens, 6) % 32
        assert gpu_measure.traffic(config, idx).floor_us == pytest.approx(floor_us, rel=0.01)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_random_weights_are_valid_and_of_order_one(rng, granularity):
    config = config_of(granularity)
    weights = gpu_measure.random_weights(config, 2, rng)
    check_weights(weights, config, MODEL.local_experts)
    total = sum(np.asarray(a).nbytes for a in jax.tree.leaves(weights))
    assert total == MODEL.local_experts * gpu_measure.expert_bytes(config)
    w_gate, _, w_down = (np.asarray(w) for w in jmm.dequantize_weights(weights))
    for dense in (w_gate, w_down):
        assert 0.5 < np.sqrt((dense**2).mean() * dense.shape[-1]) < 2
    # They survive a conversion: no byte of them is one that the layout does not have.
    again = to_layout(to_layout(weights, "canonical"), weights.layout)
    np.testing.assert_array_equal(jmm.dequantize_weights(again)[0], w_gate)


def test_random_operands(rng):
    config = config_of(max_tokens=200)
    for routing in gpu_measure.ROUTINGS:
        x, idx, weights = gpu_measure.random_operands(config, 2, 200, rng, routing)
        assert x.shape == (2, 200, 256) and idx.shape == weights.shape == (2, 200, 2)
        assert len(np.unique(x.view(np.uint16))) > 1000  # no constant input
        if routing == "none":
            assert (idx == -1).all()
            continue
        assert (idx[..., 0] != idx[..., 1]).all() and idx.min() == 0 and idx.max() == 7
        counts = np.sort(np.bincount(idx.ravel()))
        assert (counts[-1] > 3 * counts[0]) == (routing == "zipf")
    with pytest.raises(jmm.MegaMoEError, match="routing: got 'even'"):
        gpu_measure.random_operands(config, 2, 4, rng, "even")


def test_zipf_with_the_rows_of_uniform_routing(rng):
    config = config_of(max_tokens=400)
    operands = gpu_measure.same_busiest_rank(config, 2, 400, rng)
    rows = gpu_measure.traffic(config, operands.topk_idx).rows
    assert rows.max() == pytest.approx(800, rel=0.15) and rows.min() < rows.max()
    alone = gpu_measure.same_busiest_rank(config_of(num_ranks=1, max_tokens=400), 1, 400, rng)
    assert alone.topk_idx.shape[1] == 400


class TimedRanks(SimulatedRanks):
    """Calls that take as long as the test says, on the slowest rank."""

    launches = ()

    def launch(self, tile=-1, *, repeats=1, flush_l2=False, **_):
        super().launch(tile)
        self.launches += ((tile, repeats, flush_l2),)
        times = np.full((repeats, self.num_ranks), 50.0)
        times[:, -1] = 100.0 + np.arange(repeats)
        return times


def test_a_measurement(rng):
    config = config_of()
    fused = gpu_measure.Fused(config, [0, 1], rng, TimedRanks)
    operands = gpu_measure.random_operands(config, 2, 16, rng)
    row = fused.measure(operands, repeats=5)
    assert fused.ranks.launches == ((row["tile"], 2, False), (row["tile"], 5, True))
    assert row["fused_us_all"] == [100, 101, 102, 103, 104] and row["fused_us"] == 102
    asked = gpu_measure.traffic(config, operands.topk_idx)
    assert row["tflops"] == pytest.approx(asked.flops.max() / 102e-6 / 1e12)
    assert row["hbm_gb_s"] == pytest.approx(asked.weight_bytes.max() / 102e-6 / 1e9)
    assert row["link_gb_s"] == pytest.approx(asked.link_bytes.max() / 102e-6 / 1e9)
    assert row["of_floor"] == pytest.approx(asked.floor_us / 102)
    assert row["finite"] and row["selected"] and row["rows"] == asked.rows.max()
    other = fused.measure(operands, tile=4, repeats=1)
    assert other["tile"] == 4 and not other["selected"]
    fused.ranks.damage = {"linear2": lambda rows: rows * np.nan}
    assert not fused.measure(operands, repeats=1)["finite"]


def test_the_gpu_bench_on_the_simulation(tmp_path, capsys):
    """Both layers, from the same bytes of weights, agree; the table and the plot hold all rows."""
    ranks = min(2, len(jax.devices()))
    configs = [config_of(granularity, ranks) for granularity in (128, 32)]
    results = bench.measure_gpu(configs, ranks, [4, 16], 3, make_ranks=TimedRanks)
    routings = [(row["granularity"], row["routing"]) for row in results]
    each = ("uniform", "uniform", "none", "zipf")
    assert routings == [(g, routing) for g in (128, 32) for routing in each]
    compared = [row for row in results if "relative_difference" in row]
    assert [row["tokens_per_rank"] for row in compared] == [4, 16]
    for row in compared:
        assert row["granularity"] == 128 and 0 <= row["relative_difference"] < 1e-2
    for row in results:
        assert ("ratio" in row) == (row["routing"] == "uniform")
        if "ratio" in row:
            assert row["ratio"] == row["unfused_us"] / row["fused_us"]
            assert row["call_ratio"] == row["unfused_us"] / row["call_us"]
            assert row["call_us"] == np.median(row["call_us_all"]) and row["call_us"] > 0
    assert results[2]["rows"] == 0 and results[2]["tflops"] == 0
    json.dumps(results)
    assert bench.gpu_faults(results) == []
    lines = bench.gpu_table(results).splitlines()
    assert len(lines) == 2 + len(results) and "101.0" in lines[2]
    if importlib.util.find_spec("matplotlib"):
        bench.plot_gpu(tmp_path / "times.png", results, "title")
        assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")

    results[0]["finite"] = False
    results[1]["relative_difference"] = float("nan")
    faults = bench.gpu_faults(results)
    assert len(faults) == 2 and "not finite" in faults[0] and "differ by nan" in faults[1]


def test_the_command_prints_and_writes_what_was_measured(monkeypatch, tmp_path, capsys):
    seen = {}

    def measure_gpu(configs, devices, tokens, repeats, seed, with_unfused):
        seen.update(configs=configs, devices=devices, tokens=tokens, repeats=repeats)
        seen.update(with_unfused=with_unfused)
        row = {
            **{"granularity": 32, "routing": "uniform", "ranks": 2, "tokens_per_rank": 8},
            **{"tile": 1, "rows": 48, "fused_us": 200.0, "floor_us": 100.0, "of_floor": 0.5},
            **{"tflops": 1.0, "hbm_gb_s": 2.0, "link_gb_s": 3.0, "finite": True},
        }
        return [row]

    monkeypatch.setattr(bench, "measure_gpu", measure_gpu)
    monkeypatch.setattr(gpu_measure, "gpu_names", lambda: ["NVIDIA Test", "NVIDIA Test"])
    path = tmp_path / "gpu.json"
    command = ["bench", "--preset", "pro", "--devices", "2", "--granularity", "32,row"]
    command += ["--tokens", "8", "--top-k", "4", "--no-unfused", "--json", str(path)]
    assert main(command) == 0  # the back end is chosen
    output = capsys.readouterr().out
    assert "2 x NVIDIA Test" in output and "4.6 TB/s" in output and "host wall time" in output
    assert [c.activation_granularity for c in seen["configs"]] == [32, "row"]
    config = seen["configs"][0]
    assert (config.num_experts, config.top_k, config.hidden) == (96, 4, 7168)
    assert (seen["devices"], seen["tokens"], seen["repeats"]) == (2, [8], 15)
    assert not seen["with_unfused"]
    content = json.loads(path.read_text())
    assert content["backend"] == "sm_90a" and content["results"][0]["fused_us"] == 200
    assert content["hardware"]["gpus"] == ["NVIDIA Test"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "3"), "--devices: got 3; expected at most 2"),
        (("--devices", "2", "--experts", "9"), "--experts: got 9 on 2 ranks"),
        (("--devices", "0"), "--devices: got 0"),
    ],
)
def test_mistakes_on_gpus_are_one_line(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(gpu_measure, "num_gpus", lambda: 2)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu_measure.num_gpus() == 0 and gpu_measure.gpu_names() == []


@pytest.mark.gpu
def test_a_measurement_on_a_gpu(rng):
    config = config_of("row", 1, 64)
    fused = gpu_measure.Fused(config, [0], rng)
    for routing in gpu_measure.ROUTINGS:
        row = fused.measure(gpu_measure.random_operands(config, 1, 64, rng, routing), repeats=3)
        assert row["finite"] and 1 < row["fused_us"] < 1e5
    assert gpu_measure.num_gpus() >= 1 and native.gpu_tiles(0)
