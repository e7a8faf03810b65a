"""The programs in benchmarks/ that measure and stress GPUs, run on the simulation."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest

from gpu_case import SimulatedRanks, on_cpu
from jax_megamoe.cli import bench
from jax_megamoe.devtools import gpu_measure
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.devtools.gpu_measure import Model

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
MODEL = Model(hidden=256, intermediate=128, local_experts=4, top_k=2)


def program(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _reference_on_cpu():
    with on_cpu():
        yield


# soak --------------------------------------------------------------------------------------------

SOAK = ("--tokens", "12", "--hidden", "128", "--intermediate", "128", "--experts", "8")
SOAK += ("--pool", "6", "--calls", "20", "--granularity", "128", "--top-k", "2")


def test_soak_accepts_a_right_kernel(capsys):
    assert program("soak").main(SOAK, SimulatedRanks) == 0
    assert "56 calls, 0 errors" in capsys.readouterr().out  # 6 calls with 6 tiles, then 20


class Changing(SimulatedRanks):
    """Every 7th call gets one code of SwiGLU's output of the last row wrong."""

    calls = 0

    def launch(self, *args, **kwargs):
        type(self).calls += 1
        wrong = self.calls > 40 and self.calls % 7 == 0
        self.damage = {"swiglu": self.change} if wrong else {}
        return super().launch(*args, **kwargs)

    @staticmethod
    def change(acts):
        acts = acts.copy()
        acts[-1] *= 1.25
        return acts


class Wrong(SimulatedRanks):
    def launch(self, *args, **kwargs):
        self.damage = {"linear2": lambda rows: rows * 1.02}
        return super().launch(*args, **kwargs)


def test_soak_notices_other_bits_and_wrong_results(capsys):
    soak = program("soak")
    assert soak.main(SOAK, Changing) == 1
    text = capsys.readouterr().out
    assert "(0 wrong, " in text and "(0 wrong, 0 changed" not in text
    assert soak.main(SOAK, Wrong) == 1
    assert "(0 wrong" not in capsys.readouterr().out


def test_soak_reports_failures(capsys):
    import jax_megamoe as jmm

    class Failing(SimulatedRanks):
        def launch(self, *args, **kwargs):
            raise jmm.MegaMoERuntimeError("jax_megamoe: timed out after 5 s: rank 1")

    assert program("soak").main(SOAK, Failing) == 1
    output = capsys.readouterr()
    assert "timed out after 5 s" in output.err and "36 failed" in output.out


@pytest.mark.gpu
def test_soak_on_a_gpu(capsys):
    assert program("soak").main(("--calls", "300", "--pool", "6"), GpuRanks) == 0
    assert "0 errors" in capsys.readouterr().out


# tiles -------------------------------------------------------------------------------------------


class ByTile(SimulatedRanks):
    def launch(self, tile=-1, *, repeats=1, **_):
        super().launch(tile)
        return np.full((repeats, self.num_ranks), 100.0 + 10 * abs(tile - 1))


def test_tiles_marks_the_chosen_and_the_fastest():
    tiles = program("tiles")
    results = tiles.measure(MODEL, 128, 2, [4, 90], 3, make_ranks=ByTile)
    assert len(results) == 2 * 6 and all(row["finite"] for row in results)
    lines = tiles.table(results).splitlines()
    assert lines[0].split()[-2:] == ["chosen", "loses"]
    few, many = lines[2].split(), lines[3].split()
    assert few[:4] == ["128", "4", "110.0*", "100.0<"] and few[-1] == "10.0%"
    assert many[3] == "100.0<" and many[5] == "120.0*" and many[-1] == "20.0%"


# hopper ------------------------------------------------------------------------------------------


def test_hopper_writes_its_files(monkeypatch, tmp_path, capsys):
    hopper = program("hopper")
    ranks = min(2, len(jax.devices()))
    monkeypatch.setattr(gpu_measure, "MODELS", {"flash": MODEL, "pro": MODEL})
    monkeypatch.setattr(gpu_measure, "gpu_names", lambda: ["NVIDIA Test"] * ranks)
    compiled = []
    monkeypatch.setattr(gpu_measure, "compile_ahead", compiled.extend)
    measure = bench.measure_gpu
    monkeypatch.setattr(bench, "measure_gpu", lambda *a: measure(*a, make_ranks=SimulatedRanks))
    out = tmp_path / "results"
    command = ["--out", str(out), "--tokens", "4", "16", "--granularity", "row", "128"]
    assert hopper.main([*command, "--preset", "flash", "--repeats", "2"]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert [(run["model"], run["ranks"]) for run in content["runs"]] == [
        ("flash", n) for n in range(1, ranks + 1)
    ]
    assert len(content["runs"][0]["results"]) == 8
    # The kernels that the measurements use were compiled before.
    used = {
        (row["granularity"], row["ranks"], row["tile"])
        for run in content["runs"]
        for row in run["results"]
    }
    assert used <= {(config.activation_granularity, n, tile) for config, n, tile in compiled}
    text = out.with_suffix(".md").read_text()
    assert text.count("\n## flash") == ranks and text.count("| row | uniform |") == 2 * ranks
    assert "4.6 TB/s" in text and "host wall time" in text
    with pytest.raises(SystemExit, match="--ranks 9"):
        hopper.main([*command, "--ranks", "9"])


def test_hopper_covers_the_batches():
    hopper = program("hopper")
    assert hopper.ALL_TOKENS[0] == 1 and hopper.ALL_TOKENS[-1] == 8192
    assert set(hopper.QUICK_TOKENS) <= set(hopper.ALL_TOKENS)
