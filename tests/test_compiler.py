"""Run-time compilation of GPU kernels, and its cache, on a machine without a GPU."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from jax_megamoe._ffi import native
from jax_megamoe._nvrtc import nvrtc_path

ROOT = pathlib.Path(__file__).parent.parent
OPTIONS = ["--gpu-architecture=sm_90a", "-std=c++20", "-DVALUE=7"]
KERNEL = """
#include "protocol/platform.h"
extern "C" __global__ void jmm_mega_moe(uint32_t* out) { *out = VALUE; }
"""
# Compiles below argv[1] twice; prints the cubin's length and what the cache did the first time.
SCRIPT = """
import sys
from jax_megamoe._ffi import native
from jax_megamoe._nvrtc import nvrtc_path
cubin, log, cache = native.compile_kernel(sys.argv[1], sys.argv[2:], nvrtc_path())
assert cubin[:4] == b"\\x7fELF" and b"jmm_mega_moe" in cubin
assert native.compile_kernel(sys.argv[1], sys.argv[2:], nvrtc_path()) == (cubin, log, "read")
print(len(cubin), cache)
"""


@pytest.fixture
def headers(tmp_path):
    for folder in ("gpu/sm90", "protocol"):
        (tmp_path / "cc" / folder).mkdir(parents=True)
    (tmp_path / "cc/gpu/sm90/kernel.h").write_text(KERNEL)
    platform = (ROOT / "cc/protocol/platform.h").read_text()
    (tmp_path / "cc/protocol/platform.h").write_text(platform)
    return tmp_path / "cc"


def start(headers, cache, **environment):
    environment = {**os.environ, "JAX_MEGAMOE_CACHE_DIR": str(cache), **environment}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", SCRIPT, str(headers), *OPTIONS]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def compile_in_process(headers, cache, **environment):
    process = start(headers, cache, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    size, cache_use = out.split()
    return int(size), cache_use


@pytest.mark.usefixtures("nvrtc")
def test_cache_entries_are_reused_and_broken_ones_are_not(headers, tmp_path):
    cache = tmp_path / "deep" / "cache"
    size, cache_use = compile_in_process(headers, cache)
    assert cache_use == "written"
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    assert len(whole) > size
    before = entry.stat().st_ino
    assert compile_in_process(headers, cache) == (size, "read")
    assert entry.stat().st_ino == before  # read, not written again

    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for broken in (whole[:-1], whole[:100], b"", b"something else", bytes(flipped)):
        entry.write_bytes(broken)
        assert compile_in_process(headers, cache) == (size, "written")
        assert entry.read_bytes() == whole
    assert list(cache.iterdir()) == [entry]  # no temporary files are left


@pytest.mark.usefixtures("nvrtc")
def test_a_changed_header_or_option_is_another_entry(headers, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    compile_in_process(headers, cache)
    (headers / "protocol" / "platform.h").open("a").write("// changed\n")
    compile_in_process(headers, cache)
    monkeypatch.setitem(globals(), "OPTIONS", [*OPTIONS[:-1], "-DVALUE=8"])
    compile_in_process(headers, cache)
    assert len(list(cache.iterdir())) == 3
    # Where the headers are does not matter.
    moved = headers.rename(tmp_path / "moved")
    compile_in_process(moved, cache)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.usefixtures("nvrtc")
def test_processes_that_compile_the_same_kernel_at_once(headers, tmp_path):
    cache = tmp_path / "cache"
    processes = [start(headers, cache) for _ in range(4)]
    for process in processes:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("nvrtc")
def test_without_a_place_for_the_cache(headers, tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    assert compile_in_process(headers, occupied / "cache")[1] == "none"
    assert compile_in_process(headers, "")[1] == "none"  # no cache at all
    environment = {"HOME": str(tmp_path / "home")}
    process = start(headers, tmp_path / "chosen", **environment)
    process.communicate(timeout=120)
    assert not (tmp_path / "home").exists() and len(list((tmp_path / "chosen").iterdir())) == 1


@pytest.mark.usefixtures("nvrtc")
def test_errors_carry_the_log_and_threads_may_compile(headers):
    (headers / "gpu" / "sm90" / "kernel.h").write_text("this is not a kernel\n")
    with pytest.raises(
        RuntimeError, match=r"(?s)NVRTC_ERROR_COMPILATION.*-DVALUE=7.*kernel.h\(1\)"
    ):
        native.compile_kernel(str(headers), OPTIONS, nvrtc_path())
    (headers / "gpu" / "sm90" / "kernel.h").write_text(KERNEL)
    virtual = ["--gpu-architecture=compute_90a", *OPTIONS[1:]]
    with pytest.raises(RuntimeError, match=r"got no machine code"):
        native.compile_kernel(str(headers), virtual, nvrtc_path())

    cubins = {}

    def compile_value(value):
        options = [*OPTIONS[:-1], f"-DVALUE={value}"]
        cubins[value], *_ = native.compile_kernel(str(headers), options, nvrtc_path())

    threads = [threading.Thread(target=compile_value, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(cubins.values())) == 4


@pytest.mark.usefixtures("nvrtc")
def test_missing_headers_are_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"got no headers below .*; expected gpu/ and protocol/"):
        native.compile_kernel(str(tmp_path), OPTIONS, nvrtc_path())


def test_missing_nvrtc_says_what_to_install(headers, tmp_path):
    process = start(headers, tmp_path / "cache", JAX_MEGAMOE_NVRTC=str(tmp_path / "none.so"))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"JAX_MEGAMOE_NVRTC: got {tmp_path}/none.so, which cannot be opened" in err
    script = SCRIPT.replace("nvrtc_path()", "''")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(headers), *OPTIONS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:  # a system with a CUDA toolkit has one in its library path
        assert "pip install nvidia-cuda-nvrtc" in result.stderr


def test_kernel_options_say_everything_the_kernel_is_specialised_on():
    sizes = {"num_ranks": 4, "num_experts": 64, "top_k": 6, "hidden": 1024, "intermediate": 512}
    shape = native.gpu_shape(**sizes, max_tokens=256, granularity=128)
    options = native.gpu_kernel_options(shape, 128, 3, 1, activation=2, bias=True)
    for name, value in (*sizes.items(), ("max_tokens", 256), ("ring_blocks", shape.ring_blocks)):
        assert f"-DJMM_{name.upper()}={value}" in options
    for text in ("-DJMM_GRANULARITY=128", "-DJMM_TILE=3", "-DJMM_TRACE=1", "--ptxas-options=-v"):
        assert text in options
    assert "-DJMM_ACTIVATION=2" in options and "-DJMM_BIAS=1" in options
    plain = native.gpu_kernel_options(shape, 128, 3)
    for text in ("-DJMM_ACTIVATION=0", "-DJMM_BIAS=0", "-DJMM_TRACE=0", "-DJMM_RACECHECK=0"):
        assert text in plain
    assert "-DJMM_RACECHECK=1" in native.gpu_kernel_options(shape, 128, 3, build=2)
    with pytest.raises(ValueError, match=r"build: got 3; expected 0 \(plain\), 1 .trace. or 2"):
        native.gpu_kernel_options(shape, 128, 3, build=3)
    with pytest.raises(ValueError, match=r"activation: got 3; expected one of 0 \(swiglu\)"):
        native.gpu_kernel_options(shape, 128, 3, activation=3)
    assert "-DJMM_GRANULARITY=0" in native.gpu_kernel_options(shape, 0, 0)
    with pytest.raises(ValueError, match="no such tile"):
        native.gpu_kernel_options(shape, 128, len(native.gpu_tiles(128)))
    with pytest.raises(ValueError, match="granularity: got 64"):
        native.gpu_tiles(64)


def test_tile_selection_covers_the_rows_of_most_experts():
    sizes = {"num_ranks": 8, "num_experts": 256, "top_k": 6, "hidden": 1024, "intermediate": 512}
    for granularity in (0, 32, 128):
        shape = native.gpu_shape(**sizes, max_tokens=8192, granularity=granularity)
        tiles = native.gpu_tiles(granularity)
        chosen = [native.gpu_select_tile(shape, granularity, 2**n) for n in range(14)]
        assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] == len(tiles) - 1
        for n, tile in enumerate(chosen):
            mean = 2**n * 8 * 6 / 256
            assert tile == len(tiles) - 1 or tiles[tile]["block_m"] > mean
