"""The command line as users start it: exit codes, tables, JSON files, messages."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from jax_megamoe import _headers, symmetric
from jax_megamoe._ffi import native
from jax_megamoe.cli import bench, build_parser, compile, demo, info, main, shared
from jax_megamoe.config import ACTIVATIONS, MegaMoEConfig, swiglu

COMMANDS = ("demo", "info", "bench", "timeline", "compile")
SMALL = ("--devices", "2", "--hidden", "256", "--intermediate", "128", "--experts", "8")
SMALL += ("--top-k", "2")


def start(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jax_megamoe", *arguments]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def table(text: str) -> dict[str, list[str]]:
    """First column -> the other columns, for columns at least two spaces apart."""
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.split("\n")
    ]
    return {row[0]: row[1:] for row in rows if row}


# Help and mistakes -------------------------------------------------------------------------------


def test_help_of_the_program():
    result = start("--help")
    assert result.returncode == 0, result.stderr
    assert "example:\n  python -m jax_megamoe " in result.stdout
    assert all(f"\n    {command} " in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    example = text.partition("example:\n  python -m jax_megamoe ")[2].partition("\n")[0]
    assert example.startswith(command)
    build_parser().parse_args(example.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--devices", "3"), "num_experts: got 64 on 3 ranks"),
        (("demo", "--hidden", "100"), "hidden: got 100"),
        (("demo", "--steps", "0"), "--steps: got 0"),
        (("demo", "--seed", "-1"), "--seed: got -1"),
        (("info", "--ring-tokens", "0"), "ring_tokens: got 0"),
        (("info", "--ranks", "7"), "num_experts: got 256 on 7 ranks"),
        (("info", "--json", "/no/such/folder/info.json"), "--json: got"),
        (("info", "--backend", "sm_90a", "--ranks", "7"), "num_experts: got 256 on 7 ranks"),
        (("compile", "--arch", "sm_90a", "--tile", "6"), "--tile: got 6"),
        (("compile", "--arch", "sm_90a", "--tile", "5", "--granularity", "32"), "from 0 to 4"),
        (("compile", "--arch", "sm_90a", "--jobs", "0"), "--jobs: got 0"),
        (("compile", "--arch", "sm_90a", "--max-spill", "-1"), "--max-spill: got -1"),
        (("compile", "--arch", "sm_90a", "--hidden", "100"), "hidden: got 100"),
        (("bench", "--tokens", "8,0"), "--tokens: got [8, 0]"),
        (("bench", "--repeats", "0"), "--repeats: got 0"),
        (("bench", "--backend", "cpu", "--granularity", "32,row"), "expected one value"),
        (("bench", "--backend", "cpu", "--hidden", "100"), "hidden: got 100"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1 and words in output.err


def test_wrong_arguments_leave_no_trace_in_a_process():
    result = start("demo", "--experts", "12")
    assert result.returncode == 2
    assert result.stderr.startswith("jax_megamoe: num_experts: got 12 on 8 ranks")
    assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [(), ("nonsense",), ("bench", "--tokens", "many"), ("bench", "--granularity", "64")],
)
def test_unknown_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: python -m jax_megamoe" in capsys.readouterr().err


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "times.png")]) == 2
    assert "pip install jax-megamoe[plot]" in capsys.readouterr().err


# info --------------------------------------------------------------------------------------------


def test_info_table_and_json_agree(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError("info allocates a buffer")

    monkeypatch.setattr(native, "create_buffer", refuse)
    path, before = tmp_path / "info.json", native.buffer_keys()
    shape = ("--experts", "32", "--tokens", "64", "--ranks", "4")
    shape += ("--ring-tokens", "512", "--backend", "cpu", "--granularity", "row")
    assert main(["info", *shape, "--json", str(path)]) == 0
    assert native.buffer_keys() == before

    rows, content = table(capsys.readouterr().out), json.loads(path.read_text())
    config = MegaMoEConfig(
        32,
        6,
        4096,
        2048,
        64,
        activation=swiglu(10.0),
        activation_granularity="row",
        ring_tokens=512,
    )
    assert content["config"] == dataclasses.asdict(config)
    assert content["ranks"] == 4 and content["backend"] == "cpu"
    regions = symmetric.buffer_regions(config, 4)
    assert [region["name"] for region in content["regions"]] == [region.name for region in regions]
    for region in content["regions"]:
        cells = rows[region["name"]]
        assert cells[0] == region["dtype"]
        assert cells[1] == "x".join(map(str, region["shape"]))
        assert cells[2:4] == [region["writer"], region["reader"]]
        assert [int(cell) for cell in cells[4:6]] == [region["offset"], region["num_bytes"]]
    last = content["regions"][-1]
    total = symmetric.buffer_bytes(config, 4)
    assert content["total_bytes"] == int(rows["total"][0]) == total
    assert last["offset"] + last["num_bytes"] <= total
    assert sum(region["num_bytes"] for region in content["regions"]) <= total
    assert rows["back end cpu"] == ["available"]
    assert rows["back end sm_100a"] == ["not part of this version"]
    assert content["backends"] == {
        name: rows[f"back end {name}"][0] for name in content["backends"]
    }
    assert {"python", "jax", "jaxlib", "jax-megamoe", "devices"} <= rows.keys()


def test_info_of_the_gpu_back_end(tmp_path, capsys):
    path = tmp_path / "info.json"
    options = ("--backend", "sm_90a", "--granularity", "128", "--tokens", "512", "--ranks", "4")
    assert main(["info", *options, "--json", str(path)]) == 0
    output, content = capsys.readouterr().out, json.loads(path.read_text())
    sizes = {
        (size["shape"], size["backend"], size["granularity"]): size["bytes"]
        for size in content["buffer_bytes"]
    }
    assert len(sizes) == 3 * 2 * 3
    assert content["total_bytes"] == sizes["given", "sm_90a", 128]
    # What differs from the tables: BF16 tensor cores take operands of two bytes.
    for name in ("given", "flash", "pro"):
        assert (
            sizes[name, "sm_90a", 32] > sizes[name, "sm_90a", 128] == sizes[name, "sm_90a", "row"]
        )
        assert sizes[name, "cpu", 32] == sizes[name, "cpu", 128]
    flash = native.gpu_shape(8, 256, 6, 4096, 2048, 512, 32)
    pro = native.gpu_shape(8, 384, 6, 7168, 3072, 512, 32)
    assert sizes["flash", "sm_90a", 32] == flash.num_bytes
    assert sizes["pro", "sm_90a", 32] == pro.num_bytes
    shown = f"{pro.num_bytes / 2**20:.2f} MiB"
    row = next(
        line.split() for line in output.split("\n") if line.startswith("pro    8      sm_90a")
    )
    assert " ".join(row[3:5]) == shown
    assert "its regions on sm_90a: 256 experts" in output and "granularity 128" in output


def test_info_names_gpus(monkeypatch, capsys):
    import jax

    class Gpu:
        platform, compute_capability = "gpu", "9.0"

        def __init__(self, id):
            self.id, self.device_kind = id, "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Gpu(0), Gpu(1)])
    assert main(["info", "--tokens", "64"]) == 0
    output = capsys.readouterr().out
    rows = table(output)
    assert rows["GPU 1"] == ["NVIDIA H200, compute 9.0"]
    assert rows["back end sm_90a"] == ["available on 2 of the devices"]
    assert "its regions on sm_90a" in output


def test_a_preset_has_one_name_in_all_commands():
    (commands,) = (a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    names = {
        option
        for parser in commands.values()
        for action in parser._actions
        if action.choices and set(action.choices) == set(info.PRESETS)
        for option in action.option_strings
    }
    assert names == {"--preset"}


@pytest.mark.parametrize("preset", info.PRESETS)
def test_info_presets(preset, capsys):
    assert main(["info", "--preset", preset]) == 0
    shape = info.PRESETS[preset]
    expected = f"{shape['experts']} experts, top-6, hidden {shape['hidden']}, intermediate "
    assert f"{expected}{shape['intermediate']}, 8 ranks, at most 8192" in capsys.readouterr().out


def test_info_in_a_process():
    result = start("info", "--tokens", "64")
    assert result.returncode == 0, result.stderr
    assert "combine" in table(result.stdout)


# compile -----------------------------------------------------------------------------------------


def test_compile_for_the_cpu(capsys):
    assert main(["compile", "--arch", "cpu"]) == 0
    assert "nothing to compile" in capsys.readouterr().out


def test_compile_refuses_blackwell(capsys):
    assert main(["compile", "--arch", "sm_100a"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "got sm_100a" in output.err and "sm_90a" in output.err


def test_compile_one_kernel(nvrtc, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_MEGAMOE_CACHE_DIR", str(tmp_path))
    shape = ("--preset", "flash", "--tokens", "1024", "--granularity", "128", "--tile", "0")
    command = ["compile", "--arch", "sm_90a", *shape]
    assert main(command) == 0
    row = table(capsys.readouterr().out)["128"]
    assert row[:3] == ["swiglu", "0", "8"] and row[-1] == "written"
    registers, shared_bytes, local, stores, loads = map(int, row[3:8])
    assert 32 <= registers <= 255
    # From two sources, the machine code and the compiler's log.
    assert local <= compile.ACCEPTED_LOCAL_BYTES
    assert (stores > 0) == (loads > 0) == (local > 0)
    assert 100_000 < shared_bytes <= 232_448  # bytes of a block on sm_90
    assert len(list(tmp_path.glob("*.cubin"))) == 1
    # In a process of its own, the kernel comes from the cache.
    again = start(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert table(again.stdout)["128"][:-2] == row[:-2]
    assert table(again.stdout)["128"][-1] == "read"


def test_compile_in_several_processes(nvrtc, monkeypatch, tmp_path, capsys):
    """Three kernels that do not compile: the command fails, with the compiler's words."""
    (tmp_path / "gpu" / "sm90").mkdir(parents=True)
    (tmp_path / "gpu" / "sm90" / "kernel.h").write_text("#error no kernel here")
    monkeypatch.setattr(_headers, "include_dir", lambda: tmp_path)
    assert main(["compile", "--arch", "sm_90a", "--tile", "0", "--jobs", "3"]) == 1
    output = capsys.readouterr().out
    for granularity in ("32", "128", "row"):
        assert f"FAIL: granularity {granularity}, tile 0 does not compile" in output
    assert output.count("#error directive: no kernel here") == 3


def outcome(**fields) -> compile._Outcome:
    job = compile._Job("128", "swiglu", 4, 128, (), "", "")
    needs = {"cache": "read", "registers": 168, "shared_bytes": 200_000}
    return compile._Outcome(job, 2.0, **(needs | fields))


# NVRTC's words, for kernels that do what they should not.
CLEAN_LOG = """ptxas info    : Compiling entry function 'jmm_mega_moe' for 'sm_90a'
ptxas         .     48 bytes stack frame, 40 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
SERIALISED = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the function 'jmm_mega_moe'"
)
IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum "
    "register requirements."
)


def test_compile_lists_variants(monkeypatch, capsys):
    """Three activations for every kernel, all with biases, and the compiler is told."""
    seen = []

    def outcomes(jobs, _):
        seen.extend(jobs)
        return [compile._Outcome(job, 1.0) for job in jobs]

    monkeypatch.setattr(compile, "_outcomes", outcomes)
    options = ("--granularity", "row", "--tile", "2", "--activation", "all", "--bias")
    assert main(["compile", "--arch", "sm_90a", *options]) == 0
    assert [job.activation for job in seen] == [f"{name}+bias" for name in ACTIVATIONS]
    for number, job in enumerate(seen):
        assert f"-DJMM_ACTIVATION={number}" in job.options and "-DJMM_BIAS=1" in job.options
        assert job.name == f"granularity row, tile 2, {job.activation}"
    assert "situ+bias" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "options", "fault"),
    [
        ({}, (), ""),
        ({"log": CLEAN_LOG}, (), ""),
        ({"log": CLEAN_LOG + SERIALISED}, (), "(C7512) Potential Performance Loss: wgmma"),
        ({"log": IGNORED + CLEAN_LOG}, (), "(C7508) Potential Performance Loss: 'setmaxnreg'"),
        ({"local_bytes": 96}, (), ""),
        ({"local_bytes": 104}, (), "104 bytes of local memory per thread, accepted 96"),
        (
            {"local_bytes": 8},
            ("--max-spill", "0"),
            "8 bytes of local memory per thread, accepted 0",
        ),
        ({"local_bytes": 48}, ("--max-spill", "48"), ""),
        ({"local_bytes": 48}, ("--max-spill", "40"), "48 bytes of local memory per thread, acc"),
        ({"error": "jax_megamoe: NVRTC 13.0: no"}, (), "does not compile: jax_megamoe: NVRTC"),
    ],
)
def test_compile_fails_for(monkeypatch, capsys, fields, options, fault):
    monkeypatch.setattr(compile, "_outcomes", lambda *_: [outcome(), outcome(**fields)])
    assert main(["compile", "--arch", "sm_90a", *options]) == bool(fault)
    output = capsys.readouterr().out
    assert output.count("FAIL: granularity 128, tile 4") == bool(fault) and fault in output
    if fields.get("log"):
        assert table(output)["128"][6:8] == ["40", "56"]


# demo --------------------------------------------------------------------------------------------


def test_demo():
    result = start("demo", *SMALL, "--tokens", "16", "--steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = table(result.stdout)
    checks = [cells for name, cells in rows.items() if name.startswith("check: ")]
    assert checks == [["PASS"]] * 3
    assert rows["back end"] == [f"cpu, instruction set {native.cpu_isa()}"]
    rates = [rows[name][0].split()[-2] for name in ("fused", "unfused (plain JAX)")]
    assert f"fused layer does {rates[0]} tokens/s" in result.stdout
    assert min(map(int, rates)) > 0
    # w13 [8, 256, 256] and w2 [8, 256, 128]: two codes a byte and a scale for 32, or BF16.
    elements = 8 * 256 * (256 + 128)
    fp4, bf16 = elements / 2 + elements / 32, elements * 2
    assert rows["expert weights"][0].split(" for")[0] == f"{fp4 / 2**20:.2f} MiB in FP4"
    assert f"{bf16 / 2**20:.2f} MiB in BF16" in rows["expert weights"][0]
    assert rows["devices"][0].startswith("2 virtual CPU devices")
    config = MegaMoEConfig(8, 2, 256, 128, 16)
    kibibytes = symmetric.buffer_bytes(config, 2) / 2**10
    assert rows["symmetric buffer"] in (
        [f"{kibibytes:.2f} KiB per rank"],
        [f"{kibibytes / 2**10:.2f} MiB per rank"],
    )
    for name in ("fused", "reference", "unfused"):
        assert 0 < float(rows[f"error of {name}"][0].split()[0]) < 0.01
    steps = [line for line in result.stderr.split("\n") if "step " in line]
    assert len(steps) == 2 and all(line.startswith("[") and " s] " in line for line in steps)


def test_demo_of_one_token_on_one_rank():
    shape = ("--devices", "1", "--tokens", "1", "--experts", "1", "--top-k", "1")
    result = start("demo", *shape, "--hidden", "128", "--intermediate", "128", "--steps", "1")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_long_step_is_repeated(capsys):
    with shared.Progress(silence_s=0.01) as progress:
        progress("a step")
        deadline = time.monotonic() + 60
        while "still at it: a step" not in (text := capsys.readouterr().err):
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
    assert not progress._thread.is_alive()


def test_every_instruction_set_gives_the_same_result():
    seen = set()
    for isa in native.cpu_isas():
        environment = {"JAX_MEGAMOE_CPU_ISA": isa}
        result = start("demo", *SMALL, "--tokens", "4", "--steps", "1", environment=environment)
        assert result.returncode == 0, result.stdout + result.stderr
        rows = table(result.stdout)
        assert rows["back end"] == [f"cpu, instruction set {isa}"]
        seen.add((*rows["error of fused"], *rows["fused vs unfused"]))
    assert len(seen) == 1


def test_demo_fails_when_a_check_fails(monkeypatch, capsys):
    errors = {"fused": 2.1e-3, "unfused": 1e-3, "reference": 1e-3}
    monkeypatch.setattr(demo, "_errors", lambda *_: errors)
    # In this process JAX runs already, with enough devices.
    monkeypatch.setattr(demo.shared, "cpu_mesh", _running_mesh)
    assert main(["demo", *SMALL, "--tokens", "4", "--steps", "1"]) == 1
    rows = table(capsys.readouterr().out)
    assert rows["check: fused error at most 2x the reference's"] == ["FAIL"]
    assert rows["check: same bits in 2 runs"] == ["PASS"]


def _running_mesh(num_devices):
    import jax

    return jax.make_mesh((num_devices,), ("ep",), devices=jax.devices("cpu")[:num_devices])


# bench -------------------------------------------------------------------------------------------


def test_bench(tmp_path):
    path = tmp_path / "bench.json"
    options = ("--backend", "cpu", "--tokens", "4,8", "--repeats", "2", "--json", str(path))
    result = start("bench", *SMALL, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(path.read_text())
    assert content["schema"] == 1 and content["benchmark"] == "layer"
    assert (content["backend"], content["devices"], content["repeats"]) == ("cpu", 2, 2)
    hardware = {"cpu", "cores", "system", "python", "jax", "jaxlib", "jax_megamoe"}
    assert content["hardware"].keys() == hardware and all(content["hardware"].values())
    assert content["config"]["max_tokens_per_rank"] == 8
    assert [row["tokens_per_rank"] for row in content["results"]] == [4, 8]
    rows = table(result.stdout)
    for row in content["results"]:
        assert row["routed_rows"] == 2 * row["tokens_per_rank"] * 2
        flops = 2 * row["routed_rows"] * 3 * 256 * 128
        for name in ("fused", "unfused"):
            times = row[f"{name}_ms_all"]
            assert len(times) == 2 and row[f"{name}_ms"] == np.median(times)
            assert row[f"{name}_tflops"] == pytest.approx(flops / row[f"{name}_ms"] / 1e9)
        assert row["ratio"] == row["unfused_ms"] / row["fused_ms"]
        assert row["relative_difference"] < 1e-2
        shown = rows[str(row["tokens_per_rank"])]
        assert shown[:2] == [f"{row['fused_ms']:.2f}", f"{row['unfused_ms']:.2f}"]


def test_bench_fails_when_the_results_differ(monkeypatch, capsys):
    row = {"tokens_per_rank": 4, "relative_difference": float("nan")}
    row |= dict.fromkeys(("fused_ms", "unfused_ms", "ratio", "fused_tflops", "unfused_tflops"), 1.0)
    monkeypatch.setattr(bench, "measure", lambda *_: ([row], "cpu"))
    assert main(["bench", "--backend", "cpu", *SMALL]) == 1
    assert "FAIL: 4 tokens per rank" in capsys.readouterr().out


def test_bench_takes_a_model_and_a_granularity(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(bench, "measure", lambda *a: seen.append(a) or ([], "cpu"))
    command = ["bench", "--backend", "cpu", "--granularity", "row"]
    assert main([*command, "--preset", "flash", "--devices", "4", "--hidden", "512"]) == 0
    assert main([*command, "--experts", "16"]) == 0
    configs = [(a[0].num_experts, a[0].top_k, a[0].hidden, a[0].intermediate) for a in seen]
    assert configs == [(128, 6, 512, 2048), (16, 6, 1024, 512)]
    assert [a[1] for a in seen] == [4, 8] and seen[0][0].activation_granularity == "row"
    assert [a[3] for a in seen] == [3, 3]


def test_numbers_of_a_plot_are_written_away_from_the_other_curve():
    curves = {"fused": [4.0, 40.0, 64.0], "unfused": [8.0, 32.0, 64.0]}
    assert bench.labels_above(curves) == [[False, True, False], [True, False, True]]
    assert bench.labels_above({"fused": [4.0, 40.0]}) == [[True, True]]


def test_plot_is_a_png(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    curves = {"fused": [4.0, 16.0, 64.0], "unfused": [8.0, 32.0, 128.0]}
    bench._plot(tmp_path / "times.png", [8, 32, 128], curves, "ms per call", "title")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
