"""What becomes of reports of failed calls, and kernels ahead of calls: all without a GPU."""

from __future__ import annotations

import functools
import logging
import queue
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jax_megamoe as jmm
from jax_megamoe import failures
from jax_megamoe._ffi import native
from moe_case import Case, mesh_of

CONFIG = jmm.MegaMoEConfig(4, 2, 128, 128, 16)


@pytest.fixture
def report(monkeypatch):
    """Has a report told as the thread tells those of GPUs, and waits for that."""
    texts = queue.Queue()
    monkeypatch.setattr(native, "wait_gpu_report", texts.get)
    thread = threading.Thread(target=failures._listen)
    thread.start()

    def tell(*reports):
        for text in reports:
            texts.put(text)
        texts.put(None)  # the process ends
        thread.join()

    yield tell
    texts.put(None)
    thread.join()


def test_a_report_is_logged_by_default(report, caplog):
    assert jmm.on_failure("log") == "log"
    report("first", "second")
    assert caplog.record_tuples == [
        ("jax_megamoe", logging.ERROR, "first"),
        ("jax_megamoe", logging.ERROR, "second"),
    ]


def test_a_function_is_told(report, caplog, on_failure):
    told = []
    assert on_failure(lambda error: told.append((error, threading.current_thread()))) == "log"
    report("first", "second")
    assert [str(error) for error, _ in told] == ["first", "second"]
    assert all(isinstance(error, jmm.MegaMoERuntimeError) for error, _ in told)
    assert all(thread is not threading.main_thread() for _, thread in told)
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)], ids=str)
def test_a_function_that_fails_is_logged_and_told_again(report, caplog, on_failure, error):
    def broken(_):
        raise error

    on_failure(broken)
    report("first", "second")
    assert [record.exc_info[1] for record in caplog.records] == [error, error]
    assert "first" in caplog.messages[0] and "second" in caplog.messages[1]


def test_logging_that_fails_does_not_end_the_thread(report, monkeypatch, capsys):
    def broken(record):
        raise ValueError("broken filter")

    monkeypatch.setattr(failures.logger, "filters", [broken])
    report("first", "second")
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("ValueError: broken filter") == 2
    assert [line for line in lines if line in ("first", "second")] == ["first", "second"]


def test_raise_interrupts_the_main_thread(report, caplog, on_failure, monkeypatch):
    monkeypatch.setattr(native, "take_gpu_failures", lambda: ["told"])
    on_failure("raise")
    with pytest.raises(jmm.MegaMoERuntimeError, match="told"):
        report("told")
        time.sleep(60)
    assert caplog.messages == ["told"]


def test_raise_is_silent_if_the_failure_has_been_raised(report, on_failure, monkeypatch):
    asked = []
    monkeypatch.setattr(native, "take_gpu_failures", lambda: asked.append(1) or [])
    on_failure("raise")
    report("told")
    for _ in range(1200):
        if asked:
            break
        time.sleep(0.05)
    assert asked


@pytest.mark.parametrize("how", ["Log", "callback", None, 3, ["log"]])
def test_other_choices_are_refused(how):
    with pytest.raises(jmm.MegaMoEError, match=r"how: got .*; expected 'log', 'raise' or a func"):
        jmm.on_failure(how)
    assert jmm.on_failure("log") == "log"


def test_without_logging_configured_a_report_goes_to_stderr():
    code = "from jax_megamoe import failures; failures._tell('the report')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.splitlines()[-1] == "the report" and run.stdout == ""


def test_the_thread_ends_with_the_process():
    code = "from jax_megamoe import failures; failures.listen(); print('end')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


def test_on_cpu_the_results_fail(rng, caplog, on_failure):
    told = []
    on_failure(told.append)
    config = jmm.MegaMoEConfig(4, 2, 128, 128, 16, timeout_s=1.0)
    case = Case(rng, config, 2, 16)
    with jmm.MegaMoE(config, mesh_of(2)) as layer:
        weights = layer.shard(case.weights)
        layer.buffer.lose_next_signal("rank_barrier", 1)
        with pytest.raises(jax.errors.JaxRuntimeError, match="timed out after 1 s"):
            jax.block_until_ready(jax.jit(layer)(*case.operands, weights))
        layer.check_failures()
    assert not told and not caplog.records


# Warming up --------------------------------------------------------------------------------------


def test_warm_up_on_cpu_compiles_nothing():
    with jmm.MegaMoE(CONFIG, mesh_of(2)) as layer:
        assert layer.warm_up() == layer.warm_up(3) == layer.warm_up([0, 16], bias=True) == 0


@pytest.mark.parametrize("tokens", [-1, 17, [1, 17], 1.0, "all", True, [None], [1, [2]], {1}])
def test_warm_up_refuses_other_numbers(tokens):
    with (
        jmm.MegaMoE(CONFIG, mesh_of(1)) as layer,
        pytest.raises(jmm.MegaMoEError, match=r"tokens: got .*; expected ints from 0 to .* 16"),
    ):
        layer.warm_up(tokens)


@pytest.mark.parametrize("tokens", [np.int32(3), np.arange(4), (3, np.int64(4)), []])
def test_warm_up_takes_whole_numbers_of_any_kind(tokens):
    with jmm.MegaMoE(CONFIG, mesh_of(1)) as layer:
        assert layer.warm_up(tokens) == 0
        with pytest.raises(jmm.MegaMoEError, match="bias: got 1, an int"):
            layer.warm_up(tokens, bias=1)


def test_warm_up_of_a_closed_layer_is_refused():
    layer = jmm.MegaMoE(CONFIG, mesh_of(1))
    layer.close()
    with pytest.raises(jmm.MegaMoEError, match="has been closed"):
        layer.warm_up()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("bias", [False, True])
def test_warm_up_without_a_gpu_fills_the_cache(tmp_path, monkeypatch, bias):
    monkeypatch.setenv("JAX_MEGAMOE_CACHE_DIR", str(tmp_path))
    layer = jmm.MegaMoE(CONFIG, AbstractMesh((2,), ("ep",)), backend="sm_90a")
    compile_ = native.compile_kernel
    read = []

    def spy(*operands):
        cubin, log, cache = compile_(*operands)
        read.append(cache)
        return cubin, log, cache

    monkeypatch.setattr(native, "compile_kernel", spy)
    warm_up = functools.partial(layer.warm_up, bias=bias)
    assert warm_up([1, 2, 3]) == 1 and read == ["written"]
    assert len(list(tmp_path.iterdir())) == 1
    assert warm_up(np.int32(1)) == 1 and read == ["written", "read"]


def test_warm_up_says_why_a_kernel_cannot_be_compiled(monkeypatch):
    def fail(*_):
        raise RuntimeError("jax_megamoe: no")

    monkeypatch.setattr(native, "compile_kernel", fail)
    layer = jmm.MegaMoE(CONFIG, AbstractMesh((2,), ("ep",)), backend="sm_90a")
    with pytest.raises(jmm.MegaMoEError, match="jax_megamoe: no"):
        layer.warm_up(1)
