"""A Flax NNX module that holds a block's weights: the router and the shared expert are trained.

`nnx.Param` marks what the optimiser changes. The FP4 experts are a variable of another type: they
are part of the module's state, so they are saved, counted and passed through `nnx.jit` with it, but
`nnx.grad` does not see them. The `MoEBlock` itself holds no arrays and is a static attribute.

Needs flax, which brings optax: pip install 'jax-megamoe[examples]'.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_megamoe as jmm

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2, 128, 128
STEPS, RATE = 20, 0.03

jmm.use_virtual_cpu_devices(4)
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((4,), ("ep",), auto)
config = jmm.MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS // 4)
block = jmm.blocks.MoEBlock(config, jmm.routers.qwen3_moe(top_k=TOP_K), mesh, axis="ep")
rng = np.random.default_rng(0)


class Frozen(nnx.Variable):
    """An array of a module's state that is not trained."""


class MoE(nnx.Module):
    """Router, FP4 experts and shared expert of one `MoEBlock`."""

    def __init__(self, block: jmm.blocks.MoEBlock, weights: jmm.blocks.BlockWeights):
        self.block = block
        self.router = nnx.Param(weights.router["weight"])
        self.shared = nnx.Dict({name: nnx.Param(a) for name, a in weights.shared.items()})
        leaves, self.layout = jax.tree.flatten(weights.experts)
        self.experts = nnx.List([Frozen(leaf) for leaf in leaves])

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jmm.blocks.BlockWeights(
            jax.tree.unflatten(self.layout, [leaf[...] for leaf in self.experts]),
            {"weight": self.router[...]},
            {name: param[...] for name, param in self.shared.items()},
        )
        return self.block(x, weights)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def random_floats():
    gate, up = draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN)
    shared = {"gate": gate, "up": up, "down": draw(HIDDEN, INTERMEDIATE)}
    return {"weight": draw(EXPERTS, HIDDEN)}, shared


shapes = ((EXPERTS, INTERMEDIATE, HIDDEN),) * 2 + ((EXPERTS, HIDDEN, INTERMEDIATE),)
experts = jmm.quantize_weights(*(draw(*shape) for shape in shapes))
teacher = MoE(block, block.shard(jmm.blocks.BlockWeights(experts, *random_floats())))
student = MoE(block, block.shard(jmm.blocks.BlockWeights(experts, *random_floats())))
optimizer = nnx.Optimizer(student, optax.adam(RATE), wrt=nnx.Param)
x = (draw(TOKENS, HIDDEN) * HIDDEN**0.5).astype(jnp.bfloat16)
target = teacher(x).astype(jnp.float32)


@nnx.jit
def step(model, optimizer, x, target):
    def loss(model):
        return jnp.mean((model(x).astype(jnp.float32) - target) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


before = [np.asarray(leaf[...]) for leaf in student.experts]
losses = []
for number in range(STEPS):
    losses.append(float(step(student, optimizer, x, target)))
    print(f"step {number:2d}: loss {losses[-1]:.5f}")
trained = sum(a.size for a in jax.tree.leaves(nnx.state(student, nnx.Param)))
print(f"{trained} trained numbers, {sum(a.nbytes for a in before)} bytes of frozen experts")
assert losses[-1] < 0.5 * losses[0], "the loss did not fall by half"
for leaf, array in zip(student.experts, before, strict=True):
    np.testing.assert_array_equal(np.asarray(leaf[...]), array)
block.close()
