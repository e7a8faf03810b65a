"""Orbax: experts saved by 8 ranks come back on 2, and compute the same bits.

A back end's layout is its own affair and may change, so checkpoints hold the canonical one.
`to_layout` undoes the layout where the experts are, and Orbax writes each device's part. A restore
says which sharding it wants: here that of another mesh, on which a layer then makes its layout.

Needs orbax-checkpoint: pip install 'jax-megamoe[examples]'.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 16, 4, 256, 128, 64

jmm.use_virtual_cpu_devices(8)
config = jmm.MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS)
meshes = {
    ranks: jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks]) for ranks in (8, 2)
}
rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def experts_of(ranks, tree):
    """The tree's arrays as a restore on so many ranks should make them."""
    sharding = NamedSharding(meshes[ranks], P("ep"))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


dense = (
    draw(EXPERTS, INTERMEDIATE, HIDDEN),
    draw(EXPERTS, INTERMEDIATE, HIDDEN),
    draw(EXPERTS, HIDDEN, INTERMEDIATE),
)
x = draw(TOKENS, HIDDEN).astype(jnp.bfloat16)
topk_idx, topk_weights = jmm.routers.qwen3_moe(top_k=TOP_K)(x, draw(EXPERTS, HIDDEN))
operands = [np.asarray(a) for a in (x, topk_idx, topk_weights)]

with tempfile.TemporaryDirectory() as directory, ocp.StandardCheckpointer() as checkpointer:
    path = Path(directory) / "layer_0"
    with jmm.MegaMoE(config, meshes[8]) as layer:
        placed = layer.shard(jmm.quantize_weights(*dense))
        y_of_8 = np.asarray(layer(*operands, placed))
        canonical = jax.jit(jmm.to_layout, static_argnums=1)(placed, "canonical")
        checkpointer.save(path, canonical)
        checkpointer.wait_until_finished()
    saved_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    restored = checkpointer.restore(path, experts_of(2, canonical))

for name in ("w13", "w13_sf", "w2", "w2_sf"):
    before, after = getattr(canonical, name), getattr(restored, name)
    assert {shard.data.shape[0] for shard in after.addressable_shards} == {EXPERTS // 2}
    np.testing.assert_array_equal(np.asarray(after), np.asarray(before))
with jmm.MegaMoE(config, meshes[2]) as layer:
    y_of_2 = np.asarray(layer(*operands, layer.shard(restored)))
np.testing.assert_array_equal(y_of_2.view(np.uint16), y_of_8.view(np.uint16))
print(f"{EXPERTS} experts, {sum(a.nbytes for a in jax.tree.leaves(canonical))} bytes of arrays")
print(f"{saved_bytes} bytes on disk; 8 ranks and 2 ranks compute the same bits")
