"""Routers in float64: one token, lists and floats, no code shared with the package."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

EPS = float(np.finfo(np.float32).eps)


def best(values, count):
    """Indices of the `count` largest values, best first, equal ones by lowest index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def softmax64(values):
    e = np.exp(np.asarray(values) - np.max(values))
    return e / e.sum()


def deepseek_scores(z, family):
    if family == "deepseek_v4":
        return np.sqrt(np.logaddexp(0.0, z))
    return 1.0 / (1.0 + np.exp(-z))


def route64(family, z, bias, top_k, scale=1.0, groups=(1, 1), norm=True, fixed=None):
    """(expert numbers, weights) of one token with logits z [E], all float64."""
    if family == "gpt_oss":
        z = z + bias
        idx = best(z, top_k)
        return idx, softmax64([z[i] for i in idx])
    if family == "qwen3_moe":
        p = softmax64(z)
        idx = best(p, top_k)
        w = np.array([p[i] for i in idx])
        return idx, w / w.sum() if norm else w
    s = deepseek_scores(z, family)
    if fixed is not None:
        idx = list(fixed)
    else:
        c = s + bias
        n_group, topk_group = groups
        size = len(z) // n_group
        rank = [sum(sorted(c[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        allowed = {e for g in best(rank, topk_group) for e in range(g * size, (g + 1) * size)}
        idx = [e for e in best(c, len(z)) if e in allowed][:top_k]
    w = np.array([s[i] for i in idx])
    return idx, scale * (w / w.sum() if norm else w)


def assert_routes(got, want, terms):
    """Same experts, weights within the rounding of `terms` FP32 operations."""
    idx, weights = got
    assert idx.dtype == jnp.int32 and weights.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(idx), np.array([i for i, _ in want]))
    w = np.array([w for _, w in want])
    np.testing.assert_allclose(np.asarray(weights, np.float64), w, rtol=terms * EPS, atol=0)
