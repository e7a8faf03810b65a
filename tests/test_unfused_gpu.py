"""The unfused layer on real GPUs: the ops that only exist there, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from generators import ROUTINGS
from jax_megamoe import reference, unfused
from moe_case import Case

CONFIG = jmm.MegaMoEConfig(
    num_experts=16,
    top_k=3,
    hidden=512,
    intermediate=256,
    max_tokens_per_rank=128,
    activation=jmm.swiglu(limit=10.0),
)


def on_gpus(case, num_ranks, gemm, transport):
    mesh = jax.make_mesh(
        (num_ranks,), ("ep",), (jax.sharding.AxisType.Auto,), devices=jax.devices("gpu")[:num_ranks]
    )
    place = jax.sharding.NamedSharding(mesh, jax.P("ep"))
    operands = jax.device_put((*case.operands, case.weights), place)
    step = jax.jit(
        lambda *a: unfused.mega_moe(*a, CONFIG, mesh, "ep", gemm=gemm, transport=transport)
    )
    return np.asarray(step(*operands), np.float64)


def check(case, y, gemm):
    """At most twice the error of the reference; mosaic's reference rounds gate and up to BF16 too,
    because that kernel returns its operands' dtype."""
    with jax.default_device(jax.devices("cpu")[0]):
        if gemm == "mosaic":
            x, idx, weights = (case.by_rank(a) for a in case.operands)
            codes, sf = reference.stage_input(x)
            pool = reference.dispatch(codes, sf, idx, weights, CONFIG)
            gate_up = reference.linear1(pool, case.weights).astype(jnp.bfloat16)
            acts = reference.swiglu(
                gate_up.astype(jnp.float32), pool.topk_weights, CONFIG.activation
            )
            rows = reference.linear2(*acts, pool, case.weights)
            plain = reference.combine(rows, pool, x.shape[1], CONFIG).reshape(case.x.shape)
        else:
            plain = case.reference()
        truth = case.truth()
    assert np.isfinite(y).all()
    error = np.linalg.norm(y - truth)
    assert error <= 2 * np.linalg.norm(np.asarray(plain, np.float64) - truth)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("gemm", ["mosaic", "ragged_dot", "blocked"])
def test_one_gpu(rng, gemm, kind):
    case = Case(rng, CONFIG, 1, 100, kind)
    check(case, on_gpus(case, 1, gemm, "all_to_all"), gemm)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("transport", unfused.TRANSPORTS)
def test_two_gpus(rng, transport, kind):
    case = Case(rng, CONFIG, 2, 100, kind)
    check(case, on_gpus(case, 2, "ragged_dot", transport), "ragged_dot")
