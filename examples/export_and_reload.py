"""Export a program that calls the layer, load it in another process, get the same bits.

`jax.export` refuses custom calls unless told that their contract is stable, which
`jax_megamoe.export_checks` does. The exported program holds no addresses: it names its symmetric
buffer by shape, mesh and axis. The loading process creates a layer with the same configuration and
mesh, which owns that buffer, and calls the program. Weights are not in
the program: they are arguments like the tokens.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm

DEVICES, TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 32, 8, 2, 256, 128


def create_layer():
    """What both processes have to agree on."""
    jmm.use_virtual_cpu_devices(DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("ep",))
    config = jmm.MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS // DEVICES)
    return jmm.MegaMoE(config, mesh, axis="ep")


def operands(layer):
    """x, topk_idx, topk_weights and the sharded weights, the same in every process."""
    rng = np.random.default_rng(0)
    shape13, shape2 = (EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    dense = [rng.standard_normal(shape, np.float32) / 16 for shape in (shape13, shape13, shape2)]
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN), np.float32), jnp.bfloat16)
    logits = rng.standard_normal((TOKENS, EXPERTS), np.float32)
    topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(logits), TOP_K)
    by_rank = NamedSharding(layer.mesh, P("ep"))
    weights = layer.shard(jax.jit(jmm.quantize_weights)(*dense))
    return (*jax.device_put((x, topk_idx, topk_weights), by_rank), weights)


def save(program: Path, result: Path) -> None:
    with create_layer() as layer:
        args = operands(layer)

        @jax.jit
        def step(x, topk_idx, topk_weights, weights):
            y = layer(x, topk_idx, topk_weights, weights)
            return x + jax.nn.silu(y)

        exported = jax.export.export(step, disabled_checks=jmm.export_checks())(*args)
        program.write_bytes(exported.serialize())
        np.save(result, np.asarray(step(*args)).view(np.uint16))


def load(program: Path, result: Path) -> None:
    with create_layer() as layer:
        exported = jax.export.deserialize(bytearray(program.read_bytes()))
        y = jax.jit(exported.call)(*operands(layer))
        assert np.array_equal(np.asarray(y).view(np.uint16), np.load(result)), "other bits"
        print(f"loaded {program.stat().st_size} bytes; {y.dtype}{list(y.shape)} has the same bits")


if len(sys.argv) == 3:
    load(Path(sys.argv[1]), Path(sys.argv[2]))
else:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("program.bin", "result.npy")]
        save(*files)
        subprocess.run([sys.executable, __file__, *map(str, files)], check=True)
