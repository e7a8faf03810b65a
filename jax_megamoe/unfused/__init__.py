"""The layer as plain JAX writes it today: five stages, each one or more XLA operations.

Two uses: the baseline that the fused layer is measured against, and the path gradients take. The
stages and their roundings are those of `reference`: quantise x to E4M3, exchange tokens, grouped
product, SwiGLU times routing weight to E4M3, grouped product to BF16, exchange back, FP32 sum in
slot order. What differs is where buffers are padded and who communicates how:

* transport ``"all_to_all"``: `lax.all_to_all` of buffers padded to the worst case, in which every
  token goes to every rank. Works on every platform and never drops a row.
* transport ``"all_gather"``: the same with `lax.all_gather` on the way out. As many bytes, since in
  the worst case a rank gets the whole of x, but no send buffer to fill.
* transport ``"ragged_all_to_all"``: exact sizes. GPU only, XLA:CPU does not implement it.

* gemm ``"blocked"``: every expert's rows padded to blocks, a loop over blocks, unused blocks
  skipped. Work grows with the rows received; portable; differentiable.
* gemm ``"ragged_dot"``: `lax.ragged_dot`. Differentiable. XLA may lower it to a dense product with
  every expert.
* gemm ``"mosaic"``: the Hopper kernel that ships with JAX in ``pallas.ops.gpu``. It returns the
  dtype of its operands, so gate and up take one more rounding to BF16 than the contract has. It
  walks the padding of the receive buffer, not only the rows.

Products take BF16 operands. `widen_weights` makes BF16 weights once, which is what the baseline is
measured with: four times the memory of FP4, but nothing is widened inside the step. FP4 weights are
accepted as well and widened in every call (gradients do that). E4M3 activations and E2M1 weights
are exact in BF16: four significant bits at most, except where the scale drives a value below 2^-126
(it may be flushed to zero) or, in `WideWeights` made by `widen_weights`, above BF16's range (it
becomes an infinity), which no finite weight quantised by this library does. FP4 weights, and x that
is passed quantised, are widened in units that keep all of them finite.

Names: R ranks, E experts, K = top_k, T tokens per rank, H hidden, I intermediate, P rows of a pool.
"""

from jax_megamoe.unfused._choice import choose
from jax_megamoe.unfused._layer import linear1, linear2, local, mega_moe, swiglu
from jax_megamoe.unfused._products import GEMMS, grouped_product
from jax_megamoe.unfused._transport import TRANSPORTS, Pool, combine, dispatch
from jax_megamoe.unfused._weights import WideWeights, widen_weights

__all__ = [
    "GEMMS",
    "TRANSPORTS",
    "Pool",
    "WideWeights",
    "choose",
    "combine",
    "dispatch",
    "grouped_product",
    "linear1",
    "linear2",
    "local",
    "mega_moe",
    "swiglu",
    "widen_weights",
]
