"""The layer in twenty lines: 8 virtual CPU devices, FP4 weights, one jitted call, one check."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_megamoe as jmm

jmm.use_virtual_cpu_devices(8)  # before JAX is first used
mesh = jax.make_mesh((8,), ("ep",))

config = jmm.MegaMoEConfig(
    num_experts=32,
    top_k=4,
    hidden=512,
    intermediate=256,
    max_tokens_per_rank=16,
    activation=jmm.swiglu(limit=10.0),
)
rng = np.random.default_rng(0)
w_gate = rng.normal(0, 512**-0.5, (32, 256, 512)).astype(np.float32)  # [experts, out, in]
w_up = rng.normal(0, 512**-0.5, (32, 256, 512)).astype(np.float32)
w_down = rng.normal(0, 256**-0.5, (32, 512, 256)).astype(np.float32)
x = jnp.asarray(rng.normal(size=(128, 512)), jnp.bfloat16)  # 16 tokens on each of 8 ranks
topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(rng.normal(size=(128, 32))), config.top_k)

weights = jax.jit(jmm.quantize_weights)(w_gate, w_up, w_down)  # FP4, two codes a byte
with jmm.MegaMoE(config, mesh, axis="ep") as layer:  # owns the symmetric buffers
    sharded = layer.shard(weights)  # the back end's layout, 4 experts on each rank
    y = jax.jit(layer)(x, topk_idx, topk_weights, sharded)
    y.block_until_ready()  # calls are asynchronous and need the buffers until they are done

# The reference has a leading axis of ranks and no communication.
by_rank = [jnp.reshape(jax.device_get(a), (8, 16, -1)) for a in (x, topk_idx, topk_weights)]
expected = jmm.reference.mega_moe(*by_rank, weights, config).reshape(128, 512)
error = jmm.reference.relative_error(y, np.asarray(expected))
print(f"y {y.dtype}{list(y.shape)}, relative difference from the reference {error:.1e}")
assert error < 2e-3  # FP32 sums in another order now and then round to another code
