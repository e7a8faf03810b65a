"""Gradients through the layer: train a router and its input while the FP4 experts stay frozen.

A hidden "teacher" router makes the targets. A student starts from other router weights and from
disturbed inputs, and follows the gradient of the squared error through the layer's output: to the
routing weights, and from there to the router, and to x. Quantisation counts as the identity in the
backward pass, and weights in FP4 have no gradient at all.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_megamoe as jmm

DEVICES, TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 64, 8, 4, 256, 128
STEPS, ROUTER_RATE, INPUT_RATE = 20, 0.1, 20.0

jmm.use_virtual_cpu_devices(DEVICES)
mesh = jax.make_mesh((DEVICES,), ("ep",))
config = jmm.MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS // DEVICES)
layer = jmm.MegaMoE(config, mesh, axis="ep")

rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


weights = jax.jit(jmm.quantize_weights)(
    draw(EXPERTS, INTERMEDIATE, HIDDEN) * 2,
    draw(EXPERTS, INTERMEDIATE, HIDDEN) * 2,
    draw(EXPERTS, HIDDEN, INTERMEDIATE),
)
weights = layer.shard(weights)


def model(params, weights):
    logits = params["x"] @ params["router"].T
    topk_logits, topk_idx = jax.lax.top_k(logits, TOP_K)
    topk_weights = jax.nn.softmax(topk_logits)  # the indices have no gradient, their weights do
    x = params["x"].astype(jnp.bfloat16)
    return layer(x, topk_idx, topk_weights, weights).astype(jnp.float32)


@jax.jit
def step(params, target, weights):
    def loss(params):
        return jnp.mean((model(params, weights) - target) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    rates = {"router": ROUTER_RATE, "x": INPUT_RATE}
    return value, jax.tree.map(lambda p, g, rate: p - rate * g, params, gradient, rates)


x = draw(TOKENS, HIDDEN) * HIDDEN**0.5
teacher = {"router": draw(EXPERTS, HIDDEN), "x": x}
target = jax.jit(model)(teacher, weights)
params = {
    "router": teacher["router"] + 0.5 * draw(EXPERTS, HIDDEN),
    "x": x + 0.1 * draw(TOKENS, HIDDEN) * HIDDEN**0.5,
}
losses = []
for number in range(STEPS):
    value, params = step(params, target, weights)
    losses.append(float(value))
    print(f"step {number:2d}: loss {losses[-1]:.5f}")
assert losses[-1] < 0.5 * losses[0], "the loss did not fall by half"
layer.close()
