"""One random layer with its operands, and the project's error rule. Shared by the layer's tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_megamoe as jmm
from generators import dense_weights, routing, tokens


@functools.cache
def experts(num_experts, intermediate, hidden, seed=7):
    rng = np.random.default_rng(seed)
    dense = dense_weights(rng, num_experts, intermediate, hidden)
    return jmm.quantize_weights(*(jnp.asarray(w) for w in dense))


def mesh_of(num_ranks, axis="ep"):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_ranks,), (axis,), auto, devices=jax.devices("cpu")[:num_ranks])


class Case:
    """Operands of `num_ranks` ranks with `num_tokens` rows each, and what they should give."""

    def __init__(self, rng, config, num_ranks, num_tokens, kind="uniform"):
        self.config, self.num_ranks = config, num_ranks
        rows = num_ranks * num_tokens
        self.x = jnp.asarray(tokens(rng, rows, config.hidden))
        idx, weights = routing(rng, rows, config.top_k, config.num_experts, kind, num_ranks)
        self.topk_idx, self.topk_weights = jnp.asarray(idx), jnp.asarray(weights)
        self.weights = experts(config.num_experts, config.intermediate, config.hidden)

    def add_biases(self, rng):
        """Random biases of the sums' size, which no result can do without."""
        e, i, h = self.config.num_experts, self.config.intermediate, self.config.hidden
        b13, b2 = (jnp.asarray(rng.standard_normal((e, n), np.float32)) for n in (2 * i, h))
        self.weights = dataclasses.replace(self.weights, b13=b13, b2=b2)

    def add_outliers(self):
        """Makes the granularity of x's scales decide y.

        The first 32 channels of x grow by 2^14, and no expert reads them. A scale that they share
        with other channels leaves those a few bits.
        """
        self.x = self.x.at[:, :32].multiply(2.0**14)
        w = self.weights
        self.weights = dataclasses.replace(w, w13=w.w13.at[:, :, :16].set(0))

    @property
    def operands(self):
        return self.x, self.topk_idx, self.topk_weights

    def by_rank(self, array):
        return array.reshape(self.num_ranks, -1, *array.shape[1:])

    def reference(self, num_tokens=None, bf16_sums=False):
        x, idx, weights = (self.by_rank(a) for a in self.operands)
        y = jmm.reference.mega_moe(
            x, idx, weights, self.weights, self.config, num_tokens, bf16_sums=bf16_sums
        )
        return np.asarray(y.reshape(self.x.shape), np.float64)

    def truth(self, num_tokens=None):
        """Quantised operands and FP8 rounding of the contract, everything else float64."""
        codes, sf = jmm.quantize.quantize_e4m3(self.by_rank(self.x), self.config.x_group)
        dense = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(self.weights)]
        idx, weights = (np.asarray(self.by_rank(a)) for a in self.operands[1:])
        biases = jmm.expert_biases(self.weights)
        y = jmm.reference.staged_float64(
            codes, sf, idx, weights, *dense, self.config, num_tokens, biases=biases
        )
        return y.reshape(self.x.shape)

    def check(self, y, num_tokens=None, fp8_sums=False):
        """The rule: at most twice the error of the plain computation in the same formats.

        fp8_sums: y comes from FP8 tensor cores, which keep fewer bits of a sum than FP32. A
        perturbation before SwiGLU's rounding to E4M3 flips some of its roundings, so the plain
        computation is the one that rounds linear 1's sums too, to BF16 (docs/numerics.md).
        """
        truth = self.truth(num_tokens)
        y = np.asarray(y, np.float64)
        assert np.isfinite(y).all()
        self.check_error(y, truth, ..., num_tokens, fp8_sums)
        assert (y[~truth.any(axis=1)] == 0).all()

    def check_error(self, y, truth, rows, num_tokens=None, fp8_sums=False):
        """The rule for some rows of [R*T, H]."""
        plain = self.reference(num_tokens, bf16_sums=fp8_sums)
        assert np.linalg.norm((y - truth)[rows]) <= 2 * np.linalg.norm((plain - truth)[rows])


class GpuCase(Case):
    """A case for kernels on FP8 tensor cores, except at granularity 32."""

    @property
    def fp8_sums(self):
        return self.config.activation_granularity != 32

    def check(self, y, num_tokens=None):
        super().check(y, num_tokens, self.fp8_sums)
