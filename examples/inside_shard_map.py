"""`layer.local` in a shard_map of your own: mesh data x ep, a dense part, a scan over blocks.

The mesh has 2 x 4 devices. Each place on the axis "data" is an expert-parallel group of 4 ranks.
A block is ``x + dense(x)``, then ``x + experts(x)``. The dense part is split over the same axis as
the experts: gather the group's tokens, multiply by this rank's columns, sum and scatter back. Three
blocks with weights of their own run in one `lax.scan` and share the layer's symmetric buffers. A
`lax.psum` over both axes counts what every expert received.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm

BLOCKS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, DENSE = 3, 16, 2, 256, 128, 512
DATA, EP, TOKENS = 2, 4, 16  # TOKENS per device

jmm.use_virtual_cpu_devices(DATA * EP)
mesh = jax.make_mesh((DATA, EP), ("data", "ep"))
config = jmm.MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS)
layer = jmm.MegaMoE(config, mesh, axis="ep")


def normalise(x):
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


def dense(x, w_in, w_out):
    inner = jax.nn.gelu(jnp.dot(x, w_in, preferred_element_type=jnp.float32))
    return jnp.dot(inner.astype(jnp.bfloat16), w_out, preferred_element_type=jnp.float32)


def route(x, w_router):
    logits = jnp.dot(x, w_router, preferred_element_type=jnp.float32)
    topk_logits, topk_idx = lax.top_k(logits, TOP_K)
    return topk_idx, jax.nn.softmax(topk_logits)


def body(x, blocks):
    """One device's part: its tokens, its experts, its columns of the dense part."""

    def block(x, params):
        gathered = lax.all_gather(normalise(x), "ep", tiled=True)
        partial = dense(gathered, params["w_in"], params["w_out"])
        summed = lax.psum_scatter(partial, "ep", scatter_dimension=0, tiled=True)
        x = x + summed
        rows = normalise(x)
        topk_idx, topk_weights = route(rows, params["w_router"])
        y, stats = layer.local(rows, topk_idx, topk_weights, params["experts"], return_stats=True)
        return x + y, lax.psum(jnp.sum(stats.tokens_per_expert), ("data", "ep"))

    return lax.scan(block, x, blocks)


def one_device(x, blocks):
    """The same blocks without a mesh: all tokens, all columns, the reference for the experts."""
    for params in blocks:
        x = x + dense(normalise(x), params["w_in"], params["w_out"])
        rows = normalise(x)
        operands = (rows, *route(rows, params["w_router"]))
        experts = params["experts"]
        x = x + jmm.reference.mega_moe(*(a[None] for a in operands), experts, config)[0]
    return x


def random_block(rng):
    def draw(*shape, fan_in):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * fan_in**-0.5)

    w_gate, w_up = (draw(EXPERTS, INTERMEDIATE, HIDDEN, fan_in=HIDDEN) for _ in range(2))
    w_down = draw(EXPERTS, HIDDEN, INTERMEDIATE, fan_in=INTERMEDIATE)
    return {
        "w_in": draw(HIDDEN, DENSE, fan_in=HIDDEN).astype(jnp.bfloat16),
        "w_out": draw(DENSE, HIDDEN, fan_in=DENSE).astype(jnp.bfloat16),
        "w_router": draw(HIDDEN, EXPERTS, fan_in=HIDDEN).astype(jnp.bfloat16),
        "experts": jax.jit(jmm.quantize_weights)(w_gate, w_up, w_down),
    }


rng = np.random.default_rng(0)
blocks = [random_block(rng) for _ in range(BLOCKS)]
x = rng.standard_normal((DATA * EP * TOKENS, HIDDEN), np.float32)

# Each block's experts in the back end's layout, then all blocks stacked for the scan.
placed = [{**block, "experts": layer.shard(block["experts"])} for block in blocks]
specs = {
    "w_in": P(None, None, "ep"),
    "w_out": P(None, "ep", None),
    "w_router": P(),
    "experts": P(None, "ep"),
}
shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
stacked = {
    name: jax.device_put(
        jax.tree.map(lambda *leaves: np.stack(leaves), *(block[name] for block in placed)), sharding
    )
    for name, sharding in shardings.items()
}
tokens = P(("data", "ep"))
model = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(tokens, specs), out_specs=(tokens, P())))
y, rows = model(jax.device_put(x, NamedSharding(mesh, tokens)), stacked)

expected = jax.jit(one_device)(x, blocks)
# FP32 sums in another order can tip a rounding to FP8, or a router's choice, in a few tokens.
distance = functools.partial(np.linalg.norm, axis=1)
truth = np.asarray(expected)
errors = distance(np.asarray(y) - truth) / distance(truth)
print(f"{BLOCKS} blocks on mesh {dict(mesh.shape)}: median relative error {np.median(errors):.1e}")
print(f"rows that experts received in each block: {rows}")
assert np.median(errors) < 1e-3 and np.mean(errors < 2e-2) > 0.95
assert np.all(np.asarray(rows) == DATA * EP * TOKENS * TOP_K)
layer.close()
