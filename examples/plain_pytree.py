"""Two MoE blocks of a residual network as a plain pytree: floats are trained, FP4 experts are not.

JAX differentiates floating-point arrays only, so what is trained and what is frozen are two trees.
The trained one has the norms, the routers and the shared experts; the frozen one has the experts.
One `MoEBlock` computes both layers, since their weights are operands. A teacher with other routers
and shared experts, but the same experts, makes the targets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_megamoe as jmm

LAYERS, TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 2, 128, 8, 2, 128, 128
STEPS, RATE = 20, 0.3

jmm.use_virtual_cpu_devices(4)
mesh = jax.make_mesh((2, 2), ("data", "ep"))  # tokens over both axes, experts over "ep"
config = jmm.MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS // 4)
router = jmm.routers.qwen3_moe(top_k=TOP_K)
block = jmm.blocks.MoEBlock(config, router, mesh, axis="ep")
rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def random_layer():
    shared = {
        "gate": draw(INTERMEDIATE, HIDDEN),
        "up": draw(INTERMEDIATE, HIDDEN),
        "down": draw(HIDDEN, INTERMEDIATE),
    }
    return {"norm": jnp.ones(HIDDEN), "router": {"weight": draw(EXPERTS, HIDDEN)}, "shared": shared}


def random_experts():
    shapes = ((EXPERTS, INTERMEDIATE, HIDDEN),) * 2 + ((EXPERTS, HIDDEN, INTERMEDIATE),)
    return block.layer.shard(jmm.quantize_weights(*(draw(*shape) for shape in shapes)))


def model(trained, experts, x):
    for layer, frozen in zip(trained, experts, strict=True):
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
        weights = jmm.blocks.BlockWeights(frozen, layer["router"], layer["shared"])
        x = x + block((x * scale * layer["norm"]).astype(jnp.bfloat16), weights)
    return x


@functools.partial(jax.jit, donate_argnums=0)
def step(trained, experts, x, target):
    def loss(trained):
        return jnp.mean((model(trained, experts, x) - target) ** 2)

    value, gradient = jax.value_and_grad(loss)(trained)
    return value, jax.tree.map(lambda p, g: p - RATE * g, trained, gradient)


experts = [random_experts() for _ in range(LAYERS)]
x = draw(TOKENS, HIDDEN) * HIDDEN**0.5
teacher = [random_layer() for _ in range(LAYERS)]
target = jax.jit(model)(teacher, experts, x)
trained = jax.tree.map(lambda p: p + 0.5 * draw(*p.shape), teacher)
losses = []
for number in range(STEPS):
    value, trained = step(trained, experts, x, target)
    losses.append(float(value))
    print(f"step {number:2d}: loss {losses[-1]:.5f}")
assert losses[-1] < 0.5 * losses[0], "the loss did not fall by half"
block.close()
