"""What a type checker says about programs that use the package."""

import importlib.resources
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USER = """
from typing import assert_type

import jax
import numpy as np

import jax_megamoe as jmm
from jax_megamoe import quantize


class Param:  # stands for an array, as those of Flax do
    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError


def layer(layer: jmm.MegaMoE, x: jax.Array, host: np.ndarray, flag: bool) -> None:
    weights = layer.shard(jmm.quantize_weights(x, host, x, b_gate=x, b_up=x, b_down=host))
    assert_type(weights, jmm.ExpertWeights)
    assert_type(layer(x, x, x, weights), jax.Array)
    assert_type(layer((x, host), host, Param(), weights, num_tokens=x), jax.Array)
    assert_type(layer(x, x, x, weights, return_stats=False), jax.Array)
    y, stats = layer(x, x, x, weights, return_stats=True)
    assert_type(y, jax.Array)
    assert_type(stats, jmm.MoEStats)
    assert_type(stats.tokens_per_expert, jax.Array)
    either = layer(x, x, x, weights, return_stats=flag)
    assert_type(either, jax.Array | tuple[jax.Array, jmm.MoEStats])
    assert_type(layer.local(x, x, x, weights, num_tokens=3), jax.Array)
    assert_type(
        layer.local(x, x, x, weights, return_stats=True), tuple[jax.Array, jmm.MoEStats]
    )
    with layer as opened:
        assert_type(opened, jmm.MegaMoE)


def block(block: jmm.blocks.MoEBlock, x: jax.Array, weights: jmm.blocks.BlockWeights) -> None:
    assert_type(block.shard(weights), jmm.blocks.BlockWeights)
    assert_type(block(x, weights), jax.Array)
    assert_type(block.local(x, weights, mask=x, token_ids=Param()), jax.Array)
    assert_type(block(x, weights, return_stats=True), tuple[jax.Array, jmm.MoEStats])
    assert_type(block.local(x, weights, return_stats=True)[1], jmm.MoEStats)


def parts(x: jax.Array, host: np.ndarray, weights: jmm.ExpertWeights) -> None:
    codes, sf = quantize.quantize_e4m3(x, "row")
    assert_type(codes, jax.Array)
    assert_type(quantize.dequantize_e4m3(codes, sf), jax.Array)
    assert_type(quantize.quantize_e2m1(host), tuple[jax.Array, jax.Array])
    assert_type(quantize.dequantize_e2m1(codes, sf), jax.Array)
    assert_type(quantize.unpack_e2m1(quantize.pack_e2m1(codes)), jax.Array)
    assert_type(jmm.ExpertWeights.from_arrays(x, x, host, x, x, x), jmm.ExpertWeights)
    assert_type(jmm.dequantize_weights(weights), tuple[jax.Array, jax.Array, jax.Array])
    router = jmm.routers.deepseek_v3(top_k=4)
    assert_type(router(x, Param(), x), tuple[jax.Array, jax.Array])
    assert_type(jmm.unfused.mega_moe(x, x, host, weights, CONFIG, MESH, "ep"), jax.Array)
    assert_type(jmm.reference.mega_moe((x, host), x, x, weights, CONFIG), jax.Array)


CONFIG = jmm.MegaMoEConfig(8, 2, 128, 128, 16)
MESH = jax.make_mesh((1,), ("ep",))
"""
#: Line that a checker has to complain about -> how.
WRONG = {
    "layer(x, x, x, weights).ring_laps": "attr-defined",
    "layer(x, x, x, weights, return_stats=True).shape": "attr-defined",
    "layer(x, x, x, weights, stats=True)": "call-overload",
    "layer([1.0], x, x, weights)": "call-overload",
    "layer(x, x, x, (x, x))": "call-overload",
}


def errors(tmp_path: Path, text: str) -> list[str]:
    """What mypy finds in a user's file, "line: error: message"."""
    file = tmp_path / "user.py"
    file.write_text(text)
    # mypy's cache is the one of this checkout: JAX is large.
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache'}"]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [line.partition("user.py:")[2] for line in done.stdout.splitlines()]
    return [line for line in found if "error:" in line]


@pytest.fixture
def mypy():
    return pytest.importorskip("mypy", reason="needs pip install '.[dev]'")


def test_calls_have_precise_types(tmp_path, mypy):
    assert errors(tmp_path, USER) == []


def test_mistakes_are_found(tmp_path, mypy):
    head = "import jax\nimport jax_megamoe as jmm\n"
    arguments = "(layer: jmm.MegaMoE, x: jax.Array, weights: jmm.ExpertWeights) -> None:\n    "
    functions = [f"def f{i}{arguments}{line}\n" for i, line in enumerate(WRONG)]
    found = errors(tmp_path, head + "".join(functions))
    for i, kind in enumerate(WRONG.values()):
        mine = [error for error in found if error.startswith(f"{4 + 2 * i}: ")]
        assert mine and mine[0].endswith(f"[{kind}]"), found


def test_the_package_says_that_it_is_typed():
    files = importlib.resources.files("jax_megamoe")
    assert (files / "py.typed").is_file() and (files / "_native.pyi").is_file()
