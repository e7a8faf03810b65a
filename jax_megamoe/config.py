"""The configuration every part of the library shares: layer, buffers, reference, baseline."""

from __future__ import annotations

import dataclasses

from jax_megamoe.errors import check, check_bool, check_positive_int, to_float, to_int

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_PARAMS",
    "BLOCK_N",
    "GRANULARITIES",
    "MAX_RANKS",
    "MAX_ROWS",
    "MAX_SIZE",
    "MAX_TOP_K",
    "SF_GROUP",
    "TIMEOUTS",
    "Activation",
    "MegaMoEConfig",
    "gpt_oss_swiglu",
    "situ",
    "swiglu",
]

#: Elements along K that share one UE8M0 scale factor, in activations and in weights.
SF_GROUP = 32
#: Rows of a weight matrix handled by one tile; back ends compute with whole tiles.
BLOCK_N = 128
#: What `MegaMoEConfig.activation_granularity` may be.
GRANULARITIES = (32, 128, "row")
#: Largest top-k: a slot index has to fit a warp's lanes on the GPU back ends.
MAX_TOP_K = 32
#: Largest number of expert-parallel ranks (one NVLink domain of 72 GPUs).
MAX_RANKS = 72
#: Row numbers travel as 32-bit words; token * top_k + slot has to stay below this.
MAX_ROWS = 2**31 - 1
#: Largest num_experts, hidden and intermediate: blocks of 256 rows an expert, and rows of a weight
#: matrix, have to stay far below 2^31 as well.
MAX_SIZE = 2**20
#: Bounds of timeout_s. A shorter wait fails calls in which nothing is wrong.
TIMEOUTS = (1e-3, 1e6)
#: Bounds of an activation's parameters. They are FP32 numbers: between these neither they nor their
#: reciprocals leave its normal range, multiplied by 1e8 in either direction.
ACTIVATION_PARAMS = (1e-30, 1e30)

#: What `Activation.kind` may be -> the parameters it takes. "limit" of "swiglu" may be None.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "swiglu": ("limit",),
    "gpt_oss_swiglu": ("limit", "alpha"),
    "situ": ("beta", "linear_beta"),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """The function between linear 1 and linear 2. Build it with `swiglu`, `gpt_oss_swiglu`, `situ`.

    Attributes:
      kind: one of `ACTIVATIONS`. Its formula, g the gate, u up, is in the function of that name.
      limit: clamp bound L: ``g <- min(g, L)``, ``u <- clip(u, -L, L)`` before everything else. The
        gate is clamped from above only. None ("swiglu" only): no clamp.
      alpha: factor of the gate in the sigmoid of "gpt_oss_swiglu".
      beta, linear_beta: bounds of the gate's side and of up's side of "situ".

    A parameter that the kind does not have is None. The others are numbers from 1e-30 to 1e30, kept
    as Python floats and rounded to FP32 where they are used.
    """

    kind: str = "swiglu"
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    linear_beta: float | None = None

    def __post_init__(self):
        check(
            isinstance(self.kind, str) and self.kind in ACTIVATIONS,
            "activation.kind",
            got=repr(self.kind),
            want=f"one of {tuple(ACTIVATIONS)}",
            remedy="use jax_megamoe.swiglu, gpt_oss_swiglu or situ; no other activation is "
            "implemented",
        )
        object.__setattr__(self, "kind", str(self.kind))
        low, high = ACTIVATION_PARAMS
        for name in ("limit", "alpha", "beta", "linear_beta"):
            value = getattr(self, name)
            if name not in ACTIVATIONS[self.kind]:
                check(
                    value is None,
                    f"activation.{name}",
                    got=repr(value),
                    want=f"None: {self.kind!r} has the parameters {ACTIVATIONS[self.kind]}",
                    remedy=f"use jax_megamoe.{self.kind}",
                )
                continue
            optional = self.kind == "swiglu"
            if optional and value is None:
                continue
            number = to_float(value)
            check(
                number is not None and low <= number <= high,
                f"activation.{name}",
                got=repr(value),
                want=f"{'None or ' if optional else ''}a number from {low:g} to {high:g}",
                remedy="pass None to leave gate and up unclamped"
                if optional
                else f"see jax_megamoe.{self.kind} for the values of published models",
            )
            object.__setattr__(self, name, number)


def swiglu(limit: float | None = None) -> Activation:
    """SwiGLU, ``g * sigmoid(g) * u``, with the optional clamp of DeepSeek-V4.

    Args:
      limit: L of `Activation`; DeepSeek-V4 has 10. None: no clamp.
    """
    return Activation("swiglu", limit)


def gpt_oss_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """The activation of gpt-oss, ``g * sigmoid(alpha * g) * (u + 1)`` of clamped g and u.

    Source: `swiglu` in gpt_oss/torch/model.py of the published model's code.

    Args:
      alpha: a constant of that code.
      limit: L of `Activation`, `swiglu_limit` of the published config.json.
    """
    return Activation("gpt_oss_swiglu", limit, alpha)


def situ(beta: float = 4.0, linear_beta: float = 25.0) -> Activation:
    """The activation of Kimi-K3, SiTU, without a clamp::

        beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)

    Source: serving engines that run the model (vLLM, a fork of DeepGEMM), which agree on it and
    cite `SituAndMul` of the published modelling file. That file itself has not been read.

    Args:
      beta: `activation_situ_beta` of the published config.json.
      linear_beta: `activation_situ_linear_beta`. That file allows null, for up without a bound;
        no released model has it, and it is not supported.
    """
    return Activation("situ", beta=beta, linear_beta=linear_beta)


@dataclasses.dataclass(frozen=True)
class MegaMoEConfig:
    """Shapes and limits of one expert-parallel MoE layer.

    Attributes:
      num_experts: E, experts over all ranks; the number of ranks has to divide it.
      top_k: K, expert slots per token, 1 to 32 and at most E.
      hidden: width of a token, a multiple of 32.
      intermediate: width of an expert, a multiple of 32. Back ends compute with multiples of 128:
        the layer pads with zeros what is not one.
      max_tokens_per_rank: T, the largest number of tokens one rank passes in one call. It sizes the
        symmetric buffers; calls with fewer tokens use the same buffers.
      activation: `swiglu`, `gpt_oss_swiglu` or `situ`, with their parameters.
      activation_granularity: elements of x, and of SwiGLU's output, that share one UE8M0 scale: 32
        (exactly MXFP8), 128 (what DeepSeek-V4 uses), or "row": one scale for a whole row of x, one
        per 128 of SwiGLU's output. 128 and "row" are what FP8 tensor cores of Hopper need. See
        docs/numerics.md for what each costs in accuracy.
      ring_tokens: rows of the ring that holds dispatched tokens between the stages, rounded up to
        blocks. None picks a size from T and K; more rows cost memory, fewer rows cost waiting.
      timeout_s: seconds after which a wait inside the layer gives up and the call raises, from 1e-3
        to 1e6. It has to be longer than the largest difference in arrival time between two ranks.
      checked: if True, the default, an expert id outside [-1, E) makes the call fail: on CPU it
        raises, on GPUs the rank's result is NaN and `MegaMoERuntimeError` follows, without a wait
        on the host. If False such a slot is dropped like -1, and only `MoEStats.out_of_range`
        tells.

    Numbers may be NumPy's, too; they are kept as Python's.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    max_tokens_per_rank: int
    activation: Activation = Activation()
    activation_granularity: int | str = 32
    ring_tokens: int | None = None
    timeout_s: float = 300.0
    checked: bool = True

    def __post_init__(self):
        for name in ("num_experts", "top_k", "hidden", "intermediate", "max_tokens_per_rank"):
            most = MAX_SIZE if name in ("num_experts", "hidden", "intermediate") else None
            self._set(name, check_positive_int(getattr(self, name), name, "MegaMoEConfig", most))
        check(
            self.top_k <= min(MAX_TOP_K, self.num_experts),
            "top_k",
            got=self.top_k,
            want=f"at most min({MAX_TOP_K}, num_experts={self.num_experts})",
            remedy="a token cannot use more expert slots than that",
        )
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            check(
                value % SF_GROUP == 0,
                name,
                got=value,
                want=f"a multiple of {SF_GROUP}",
                remedy=f"pad weights and activations with zeros to "
                f"{-(-value // SF_GROUP) * SF_GROUP}",
            )
        check(
            isinstance(self.activation, Activation),
            "activation",
            got=type(self.activation).__name__,
            want="a jax_megamoe.Activation",
            remedy="use jax_megamoe.swiglu, gpt_oss_swiglu or situ",
        )
        granularity = self.activation_granularity
        granularity = str(granularity) if isinstance(granularity, str) else to_int(granularity)
        check(
            granularity in GRANULARITIES,
            "activation_granularity",
            got=repr(self.activation_granularity),
            want=f"one of {GRANULARITIES}",
            remedy="32 is exactly MXFP8; 128 and 'row' run on FP8 tensor cores",
        )
        self._set("activation_granularity", granularity)
        check(
            self.max_tokens_per_rank * self.top_k <= MAX_ROWS,
            "max_tokens_per_rank * top_k",
            got=self.max_tokens_per_rank * self.top_k,
            want=f"at most {MAX_ROWS}",
            remedy="split the batch into several calls",
        )
        if self.ring_tokens is not None:
            self._set(
                "ring_tokens",
                check_positive_int(self.ring_tokens, "ring_tokens", "MegaMoEConfig", MAX_ROWS),
            )
        timeout, (low, high) = to_float(self.timeout_s), TIMEOUTS
        check(
            timeout is not None and low <= timeout <= high,
            "timeout_s",
            got=repr(self.timeout_s),
            want=f"seconds from {low:g} to {high:g}",
            remedy="a wait without an end is not offered, and a shorter one fails calls in which "
            "nothing is wrong",
        )
        self._set("timeout_s", timeout)
        self._set("checked", check_bool(self.checked, "checked"))

    def _set(self, name: str, value: object) -> None:
        """A field in Python's own type: what compares equal is then the same to every cache."""
        object.__setattr__(self, name, value)

    @property
    def x_group(self) -> int | str:
        """Elements of x that share one scale: 32, 128 or "row"."""
        return self.activation_granularity

    @property
    def act_group(self) -> int:
        """Elements of SwiGLU's output that share one scale: 32 or 128."""
        return SF_GROUP if self.activation_granularity == SF_GROUP else 128

    @property
    def padded_hidden(self) -> int:
        """`hidden` rounded up to whole tiles of 128: what back ends compute with."""
        return -(-self.hidden // BLOCK_N) * BLOCK_N

    @property
    def padded_intermediate(self) -> int:
        """`intermediate` rounded up to whole tiles of 128: what back ends compute with."""
        return -(-self.intermediate // BLOCK_N) * BLOCK_N

    def local_experts(self, num_ranks: int) -> int:
        """E/R, after checking that this number of ranks fits the configuration."""
        check(
            1 <= num_ranks <= MAX_RANKS,
            "number of expert-parallel ranks",
            got=num_ranks,
            want=f"1 to {MAX_RANKS}",
            remedy="use a shorter mesh axis for expert parallelism",
        )
        check(
            self.num_experts % num_ranks == 0,
            "num_experts",
            got=f"{self.num_experts} on {num_ranks} ranks",
            want="a multiple of the size of the expert-parallel axis",
            remedy="choose an axis size that divides num_experts, or pad with unused experts",
        )
        check(
            num_ranks * self.max_tokens_per_rank * self.top_k <= MAX_ROWS,
            "ranks * max_tokens_per_rank * top_k",
            got=num_ranks * self.max_tokens_per_rank * self.top_k,
            want=f"at most {MAX_ROWS}",
            remedy="split the batch into several calls",
        )
        return self.num_experts // num_ranks
