"""Expert weights: one canonical layout, one layout per back end, an exact inverse for each.

Canonical is what checkpoints hold: K (the contracted axis) is contiguous and packed two E2M1 codes
a byte, linear 1's rows are all gate rows, then all up rows. A back end's layout is a permutation of
the same bytes, so `to_layout` loses nothing and ``to_layout(w, "canonical")`` undoes it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import quantize
from jax_megamoe.config import SF_GROUP, MegaMoEConfig
from jax_megamoe.errors import check, check_array

#: Gate and up rows alternate in groups of this many, so that one tile holds both halves of a pair.
INTERLEAVE = 8
#: Rows of one CPU panel: 8 gate and 8 up rows of linear 1, 16 rows of linear 2.
CPU_PANEL = 16

_BYTES = ("uint8",)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w13", "w13_sf", "w2", "w2_sf"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """FP4 weights of E experts: a pytree of four uint8 arrays, sharded over experts (axis 0).

    Attributes (canonical layout, E experts, H hidden, I intermediate):
      w13: [E, 2I, H/2] packed E2M1; rows 0..I-1 are gate rows, I..2I-1 up rows.
      w13_sf: [E, 2I, H/32] UE8M0 bytes.
      w2: [E, H, I/2] packed E2M1.
      w2_sf: [E, H, I/32] UE8M0 bytes.
      layout: "canonical" or the name of a back end's layout ("cpu"). Static: part of the treedef.
    """

    w13: jax.Array
    w13_sf: jax.Array
    w2: jax.Array
    w2_sf: jax.Array
    layout: str = "canonical"

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]


# Programs exported with jax.export carry the tree of their arguments.
jax.export.register_pytree_node_serialization(
    ExpertWeights,
    serialized_name="jax_megamoe.ExpertWeights",
    serialize_auxdata=lambda aux: aux[0].encode(),
    deserialize_auxdata=lambda text: (text.decode(),),
)


def quantize_weights(w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> ExpertWeights:
    """Quantises dense expert weights to E2M1 with UE8M0 scales per 32 along K.

    Args:
      w_gate, w_up: [E, I, H] float32, bfloat16 or float16; row i produces intermediate channel i.
      w_down: [E, H, I], same dtypes.

    Returns:
      `ExpertWeights` in canonical layout. See `quantize.quantize_e2m1` for the rounding.

    Raises:
      MegaMoEError: shapes that do not agree, an unsupported dtype, or (outside jit) a weight that
        is not finite, which E2M1 cannot represent.
    """
    floats = ("float32", "bfloat16", "float16")
    remedy = "weights are [experts, out, in]; transpose [in, out] matrices first"
    check_array(w_gate, "w_gate", ("E", "I", "H"), floats, remedy)
    num_experts, intermediate, hidden = w_gate.shape
    check_array(w_up, "w_up", (num_experts, intermediate, hidden), floats, remedy)
    check_array(w_down, "w_down", (num_experts, hidden, intermediate), floats, remedy)
    w13, w13_sf = quantize.quantize_e2m1(jnp.concatenate([w_gate, w_up], axis=1))
    w2, w2_sf = quantize.quantize_e2m1(w_down)
    for name, sf in (("w_gate or w_up", w13_sf), ("w_down", w2_sf)):
        if not isinstance(sf, jax.core.Tracer):
            check(
                not np.any(np.asarray(sf) == quantize.UE8M0_NAN),
                name,
                got="a NaN or an infinity",
                want="finite weights",
                remedy="E2M1 has neither; look at the source of these weights",
            )
    return ExpertWeights(quantize.pack_e2m1(w13), w13_sf, quantize.pack_e2m1(w2), w2_sf)


def dequantize_weights(weights: ExpertWeights, dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """(w_gate [E, I, H], w_up [E, I, H], w_down [E, H, I]) of `dtype`, from any layout."""
    w13, w2 = dequantize_stacked(weights, dtype)
    intermediate = w13.shape[1] // 2
    return w13[:, :intermediate], w13[:, intermediate:], w2


def dequantize_stacked(weights: ExpertWeights, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """(w13 [E, 2I, H] with gate rows first, w2 [E, H, I]) of `dtype`, from any layout."""
    weights = to_layout(weights, "canonical")
    w13 = quantize.dequantize_e2m1(quantize.unpack_e2m1(weights.w13), weights.w13_sf, dtype)
    w2 = quantize.dequantize_e2m1(quantize.unpack_e2m1(weights.w2), weights.w2_sf, dtype)
    return w13, w2


def interleave_gate_up(rows: jax.Array) -> jax.Array:
    """[E, 2I, ...] with gate rows first -> 8 gate rows, 8 up rows, 8 gate rows, ..."""
    num_experts, two_i, *rest = rows.shape
    halves = rows.reshape(num_experts, 2, two_i // (2 * INTERLEAVE), INTERLEAVE, *rest)
    return jnp.swapaxes(halves, 1, 2).reshape(rows.shape)


def deinterleave_gate_up(rows: jax.Array) -> jax.Array:
    """The inverse of `interleave_gate_up`."""
    num_experts, two_i, *rest = rows.shape
    pairs = rows.reshape(num_experts, two_i // (2 * INTERLEAVE), 2, INTERLEAVE, *rest)
    return jnp.swapaxes(pairs, 1, 2).reshape(rows.shape)


def _to_panels(rows):  # [E, N, C] -> [E, N/16, C, 16]: one column of 16 rows is one SIMD load
    num_experts, num_rows, columns = rows.shape
    return jnp.swapaxes(rows.reshape(num_experts, num_rows // CPU_PANEL, CPU_PANEL, columns), 2, 3)


def _from_panels(panels):
    num_experts, num_panels, columns, _ = panels.shape
    return jnp.swapaxes(panels, 2, 3).reshape(num_experts, num_panels * CPU_PANEL, columns)


def _canonical_to_cpu(w: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        w13=_to_panels(interleave_gate_up(w.w13)),
        w13_sf=_to_panels(interleave_gate_up(w.w13_sf)),
        w2=_to_panels(w.w2),
        w2_sf=_to_panels(w.w2_sf),
        layout="cpu",
    )


def _cpu_to_canonical(w: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        w13=deinterleave_gate_up(_from_panels(w.w13)),
        w13_sf=deinterleave_gate_up(_from_panels(w.w13_sf)),
        w2=_from_panels(w.w2),
        w2_sf=_from_panels(w.w2_sf),
        layout="canonical",
    )


# layout -> (from canonical, to canonical). A back end adds one row here and its shapes below.
_LAYOUTS = {
    "canonical": (lambda w: w, lambda w: w),
    "cpu": (_canonical_to_cpu, _cpu_to_canonical),
}
LAYOUTS = tuple(_LAYOUTS)


def to_layout(weights: ExpertWeights, layout: str) -> ExpertWeights:
    """Permutes the bytes of `weights` into another layout; exact, jit-able, any layout to any."""
    for name in (weights.layout, layout):
        check(
            name in _LAYOUTS,
            "weights layout",
            got=repr(name),
            want=f"one of {LAYOUTS}",
            remedy="layouts belong to back ends; layer.shard(weights) picks the right one",
        )
    if weights.layout == layout:
        return weights
    return _convert(weights, layout)


@functools.partial(jax.jit, static_argnames="layout")
def _convert(weights: ExpertWeights, layout: str) -> ExpertWeights:
    return _LAYOUTS[layout][0](_LAYOUTS[weights.layout][1](weights))


def check_weights(weights: ExpertWeights, config: MegaMoEConfig, num_experts: int) -> None:
    """Checks type, layout, shapes and dtypes of `num_experts` experts against `config`."""
    check(
        isinstance(weights, ExpertWeights),
        "weights",
        got=type(weights).__name__,
        want="jax_megamoe.ExpertWeights",
        remedy="build them with jax_megamoe.quantize_weights and place them with layer.shard",
    )
    h, i = config.hidden, config.intermediate
    shapes = {
        "w13": (2 * i, h // 2),
        "w13_sf": (2 * i, h // SF_GROUP),
        "w2": (h, i // 2),
        "w2_sf": (h, i // SF_GROUP),
    }
    for name, (rows, columns) in shapes.items():
        shape: tuple[int, ...] = (num_experts, rows, columns)
        if weights.layout == "cpu":
            shape = (num_experts, rows // CPU_PANEL, columns, CPU_PANEL)
        check_array(
            getattr(weights, name),
            f"weights.{name} ({weights.layout} layout)",
            shape,
            _BYTES,
            "compare num_experts, hidden and intermediate of the config with the weights; inside "
            "shard_map each rank holds num_experts / ranks experts",
        )
