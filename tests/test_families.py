"""A family of checkpoints is one record: a made-up one loads, and nobody else knows families."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import checkpoint_files as files
from jax_megamoe import checkpoints
from jax_megamoe.checkpoints.families import FAMILY_OF_NAME, kimi_k3
from jax_megamoe.checkpoints.families.record import block_names

PACKAGE = Path(checkpoints.__file__).parents[1]
SOURCES = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.parent.name != "families" or path.name in ("__init__.py", "record.py")
)


def test_a_made_up_family_loads(rng, tmp_path, monkeypatch):
    experts, router, shared = block_names("made_up", "w[123]", "weight|e_score_correction_bias")
    family = dataclasses.replace(
        kimi_k3.FAMILY,
        name="made_up",
        model_types=("made_up_1",),
        experts=experts,
        router=router,
        shared=shared,
        latent=None,
        activation=lambda model: {"kind": "swiglu", "limit": None},
    )
    monkeypatch.setitem(FAMILY_OF_NAME, family.name, family)
    model = files.kimi_k3(rng)
    model.text_config["model_type"] = model.config["model_type"] = "made_up_1"
    model.tensors = {
        name.replace("block_sparse_moe", "made_up"): tensor
        for name, tensor in model.tensors.items()
        if "routed_expert_" not in name
    }
    checkpoint = checkpoints.open(files.write(model, tmp_path))
    assert checkpoint.family == "made_up"
    assert checkpoint.layers == model.layers
    assert checkpoint.activation == {"kind": "swiglu", "limit": None}
    weights = checkpoint.experts(model.layers[0])
    for field in ("w13", "w13_sf", "w2", "w2_sf"):
        np.testing.assert_array_equal(
            getattr(weights, field), model.expected[model.layers[0]][field]
        )


def comparisons(source: str) -> list[str]:
    """Comparisons with the name of a family, and returns of one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Compare, ast.MatchValue, ast.Return)):
            strings = [one for one in ast.walk(node) if isinstance(one, ast.Constant)]
            if any(isinstance(one.value, str) and one.value in FAMILY_OF_NAME for one in strings):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_no_module_asks_for_the_name_of_a_family(source):
    assert comparisons((PACKAGE / source).read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["checkpoint.family == 'kimi_k3'", "f in ('gpt_oss', x)", "def f():\n    return 'gpt_oss'"],
)
def test_names_of_families_are_found(source):
    assert len(comparisons(source)) == 1
