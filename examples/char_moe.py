"""What FP4 experts cost a model: train a small language model, quantise, compare held-out losses.

A character-level model of two blocks, each a causal convolution and a mixture of experts, learns
Python's own language reference in FP32: the texts behind ``help("topics")``, which come with every
Python as `pydoc_data.topics`. Then its experts are computed in one way after the other, and with
each the model reads the same held-out characters:

* plain JAX in FP32, and with everything rounded to BF16: the model as it was trained;
* plain JAX in FP32 with the roundings of the layer, one at a time: FP4 weights only, FP8
  activations only, both;
* the layer: the staged reference, the unfused one, the fused one. These should cost what "both"
  costs, and nothing else.

A table shows losses in nats and in bits per character. Its last columns compare a loss with "both":
by how much they differ, and by how much they may. If the experts' outputs y_l of block l have the
errors D_l, the loss moves by sum_l <dL/dy_l, D_l> to first order, at most sum_l |dL/dy_l| |D_l|.
D_l is measured in float64, against `jmm.reference.staged_float64`. What stands behind ± is the
standard error over windows of text.

    python examples/char_moe.py [--quick] [--plot FILE]

On GPUs, if JAX finds any, otherwise on virtual CPU devices. See docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from jax_megamoe import quantize, reference

VOCABULARY = 128  # ASCII
BF16 = "experts in BF16"
WEIGHTS_ONLY = "FP4 weights only"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes. A batch is `batch` windows of `context` characters, in training and evaluation."""

    num_blocks: int = 2
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
    taps: int = 8  # characters that a block's convolution sees
    context: int = 64
    batch: int = 16
    steps: int = 400
    eval_batches: int = 32
    learning_rate: float = 4e-3
    balance: float = 0.01  # weight of the loss that keeps all experts in use
    granularities: tuple[int | str, ...] = (32, 128, "row")

    def config(self, granularity, num_ranks) -> jmm.MegaMoEConfig:
        return jmm.MegaMoEConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            max_tokens_per_rank=self.batch * self.context // num_ranks,
            activation_granularity=granularity,
        )


NORMAL = Settings()
QUICK = Settings(
    hidden=128,
    intermediate=64,
    batch=32,
    context=32,
    steps=80,
    eval_batches=4,
    granularities=(32, "row"),
)


# Text ---------------------------------------------------------------------------------------------


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """(training, held out): uint8 ASCII. Paragraphs by topic, each once, the last tenth held out.

    Topics quote each other: without removing repetitions the model would have seen held-out text.
    """
    from pydoc_data.topics import topics

    everything = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = list(dict.fromkeys(everything.split("\n\n")))
    cut = len(paragraphs) * 9 // 10
    parts = ("\n\n".join(part) for part in (paragraphs[:cut], paragraphs[cut:]))
    train, held_out = (np.frombuffer(p.encode("ascii", "replace"), np.uint8) for p in parts)
    return train, held_out


def random_windows(text, settings, rng):
    """[batch, context + 1] int32."""
    start = rng.integers(0, len(text) - settings.context, (settings.batch, 1))
    return text[start + np.arange(settings.context + 1)].astype(np.int32)


def held_out_windows(text, settings):
    """[eval_batches, batch, context + 1] int32, evenly spread over the text."""
    count = settings.eval_batches * settings.batch
    start = np.linspace(0, len(text) - settings.context - 1, count).astype(int)[:, None]
    windows = text[start + np.arange(settings.context + 1)].astype(np.int32)
    return windows.reshape(settings.eval_batches, settings.batch, -1)


# The model ----------------------------------------------------------------------------------------


def init_params(settings, rng):
    def draw(*shape, fan_in):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * fan_in**-0.5)

    h, i, e = settings.hidden, settings.intermediate, settings.num_experts
    residual = 2 * settings.num_blocks  # so many branches add to the residual stream

    def block():
        return {
            "taps": draw(settings.taps, h, fan_in=1),
            "mix": draw(h, h, fan_in=h * settings.taps * residual),
            "router": draw(h, e, fan_in=h),
            "w_gate": draw(e, i, h, fan_in=h),
            "w_up": draw(e, i, h, fan_in=h),
            "w_down": draw(e, h, i, fan_in=i * residual),
        }

    return {
        "characters": draw(VOCABULARY, h, fan_in=1),
        "blocks": [block() for _ in range(settings.num_blocks)],
        "head": draw(h, VOCABULARY, fan_in=h),
    }


def normalise(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def convolution(x, block):
    """Each position's weighted sum of the characters up to it, channel by channel: [B, T, H]."""
    x, taps = normalise(x), block["taps"]
    padded = jnp.pad(x, ((0, 0), (len(taps) - 1, 0), (0, 0)))
    mixed = sum(tap * padded[:, n : n + x.shape[1]] for n, tap in enumerate(taps))
    return mixed @ block["mix"]


def embed(params, characters):
    return params["characters"][characters]


def before_experts(x, block, top_k):
    """Convolution and router.

    Returns:
      x [B, T, H] float32; what the experts get: rows [B * T, H] bfloat16, topk_idx [B * T, K]
      int32, topk_weights [B * T, K] float32; and the router's probabilities [B * T, E].
    """
    x = x + convolution(x, block)
    # reduce_precision rounds for certain; XLA may drop a cast to BF16 that a cast back follows.
    rows = lax.reduce_precision(normalise(x), 8, 7).reshape(-1, x.shape[-1])
    logits = rows @ block["router"]
    topk_logits, topk_idx = lax.top_k(logits, top_k)
    routing = rows.astype(jnp.bfloat16), topk_idx, jax.nn.softmax(topk_logits)
    return x, routing, jax.nn.softmax(logits)


def character_losses(params, x, targets):
    """Cross entropy in nats, [B, T]."""
    log_p = jax.nn.log_softmax(normalise(x) @ params["head"])
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


def exact(values):
    return values


def experts(x, topk_idx, topk_weights, weights, round_x=exact, round_acts=exact):
    """The mixture of experts in FP32, every expert for every token: simple, and differentiable.

    An expert that a token does not choose has the routing weight 0 and adds nothing. The roundings
    are where the layer has its own: before the gate and up products, and before the down product.

    Args:
      x: [N, H] bfloat16.
      topk_idx, topk_weights: [N, K] int32 and float32.
      weights: (w_gate [E, I, H], w_up [E, I, H], w_down [E, H, I]) float32.
      round_x, round_acts: functions of a float32 array.

    Returns:
      [N, H] float32.
    """
    w_gate, w_up, w_down = weights
    x = round_x(x.astype(jnp.float32))
    chosen = jax.nn.one_hot(topk_idx, len(w_gate))
    p = jnp.sum(chosen * topk_weights[..., None], axis=1)  # [N, E]
    gate, up = (jnp.einsum("nh,eih->nei", x, w) for w in (w_gate, w_up))
    acts = round_acts(jax.nn.silu(gate) * up * p[..., None])
    return jnp.einsum("nei,ehi->nh", acts, w_down)


def dense_weights(block):
    return block["w_gate"], block["w_up"], block["w_down"]


# Training -----------------------------------------------------------------------------------------


def training_loss(params, windows, settings):
    """Mean cross entropy, plus a loss that is smallest when all experts get as many tokens."""
    x, unbalanced = embed(params, windows[:, :-1]), 0.0
    for block in params["blocks"]:
        x, routing, probability = before_experts(x, block, settings.top_k)
        share = jnp.mean(jax.nn.one_hot(routing[1], settings.num_experts), axis=(0, 1))
        unbalanced += settings.num_experts * jnp.dot(share, jnp.mean(probability, axis=0))
        x = x + experts(*routing, dense_weights(block)).reshape(x.shape)
    loss = jnp.mean(character_losses(params, x, windows[:, 1:]))
    return loss + settings.balance * unbalanced, loss


def learning_rate(step, settings):
    """Rises over the first tenth of the steps, then falls to zero along half a cosine."""
    done = (step + 1) / settings.steps
    rise = jnp.minimum(1, 10 * done)
    return settings.learning_rate * rise * 0.5 * (1 + jnp.cos(jnp.pi * done))


@functools.partial(jax.jit, static_argnames="settings", donate_argnums=(0, 1))
def train_step(params, moments, step, windows, settings):
    """One step of Adam. moments: running means of the gradient and of its square."""
    gradient_of = jax.grad(training_loss, has_aux=True)
    gradient, loss = gradient_of(params, windows, settings)
    b1, b2 = 0.9, 0.98
    mean, square = moments
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mean, gradient)
    square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, square, gradient)
    rate = learning_rate(step, settings)

    def update(p, m, v):
        m, v = m / (1 - b1 ** (step + 1)), v / (1 - b2 ** (step + 1))  # they started at zero
        return p - rate * m / (jnp.sqrt(v) + 1e-8)

    return jax.tree.map(update, params, mean, square), (mean, square), loss


def train(text, settings, log=print):
    """(params, training losses)."""
    rng = np.random.default_rng(0)
    params = init_params(settings, rng)
    moments = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    losses = []
    for step in range(settings.steps):
        windows = random_windows(text, settings, rng)
        params, moments, loss = train_step(params, moments, jnp.float32(step), windows, settings)
        losses.append(float(loss))
        if (step + 1) % (settings.steps // 4) == 0:
            recent = np.mean(losses[-20:])
            log(f"step {step + 1}: loss {recent:.3f}, {recent / np.log(2):.3f} bits per character")
    return params, losses


# Evaluation ---------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What the experts of one block got for one batch, and what they made of it."""

    block: int
    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    y: np.ndarray


_embed = jax.jit(embed)
_before_experts = jax.jit(before_experts, static_argnames="top_k")
_character_losses = jax.jit(character_losses)


def evaluate(params, batches, moe, settings):
    """Runs the model with `moe(number of the block, x, topk_idx, topk_weights)` as its experts.

    Returns:
      losses of all characters [batches, B, T] float64, and a `Call` for each batch and block.
    """
    losses, calls = [], []
    for windows in batches:
        x = _embed(params, windows[:, :-1])
        for number, block in enumerate(params["blocks"]):
            x, routing, _ = _before_experts(x, block, settings.top_k)
            y = np.asarray(moe(number, *routing))
            calls.append(Call(number, *map(np.asarray, routing), y))
            x = x + y.astype(np.float32).reshape(x.shape)
        losses.append(np.asarray(_character_losses(params, x, windows[:, 1:]), np.float64))
    return np.stack(losses), calls


def round_to_bf16(values):
    return lax.reduce_precision(values, 8, 7)


def round_to_e4m3(group, values):
    """E4M3 with one scale per `group`; the derivative is that of the identity."""
    rounded = quantize.dequantize_e4m3(*quantize.quantize_e4m3(values, group))
    return lax.stop_gradient(rounded) + (values - lax.stop_gradient(values))


@functools.partial(jax.jit, static_argnames=("round_x", "round_acts", "round_y"))
def _experts(routing, weights, round_x, round_acts, round_y):
    return round_y(experts(*routing, weights, round_x, round_acts))


def plain_moe(weights, round_x=exact, round_acts=exact, round_y=exact):
    """Experts in plain JAX, for `evaluate`. weights: dense ones of every block."""

    def run(number, *routing):
        return _experts(routing, weights[number], round_x, round_acts, round_y)

    return run


def fp8_roundings(config):
    """What the layer does to activations: round_x and round_acts of `experts`."""
    groups = config.x_group, config.act_group
    return tuple(functools.partial(round_to_e4m3, group) for group in groups)


def reference_moe(quantised, config):
    """The staged reference on one rank."""

    def run(number, *routing):
        return reference.mega_moe(*(a[None] for a in routing), quantised[number], config)[0]

    return run


def unfused_moe(quantised, config, mesh):
    experts_of_rank, tokens_of_rank = (NamedSharding(mesh, P("ep")) for _ in range(2))
    weights = [jax.device_put(jmm.unfused.widen_weights(q), experts_of_rank) for q in quantised]

    @jax.jit
    def run(x, topk_idx, topk_weights, weights):
        # "blocked" makes exactly the layer's roundings on every platform.
        operands = (x, topk_idx, topk_weights, weights, config)
        return jmm.unfused.mega_moe(*operands, mesh, "ep", gemm="blocked")

    return lambda number, *routing: run(*jax.device_put(routing, tokens_of_rank), weights[number])


def fused_moe(quantised, layer):
    tokens_of_rank = NamedSharding(layer.mesh, P("ep"))
    weights = [layer.shard(q) for q in quantised]
    run = jax.jit(layer)
    return lambda number, *routing: run(*jax.device_put(routing, tokens_of_rank), weights[number])


# Errors and what they may do to the loss ----------------------------------------------------------


def true_output(call, dequantised, config):
    """The layer's output for a call with FP8 roundings and float64 for everything else."""
    x, topk_idx, topk_weights = (jnp.asarray(a)[None] for a in call[1:4])
    codes, sf = quantize.quantize_e4m3(x, config.x_group)
    weights = dequantised[call.block]
    return reference.staged_float64(codes, sf, topk_idx, topk_weights, *weights, config)[0]


def output_errors(calls, dequantised, config):
    """|D_l| of each block l, [blocks], and all of it relative to the norm of the outputs.

    A call is compared with the true output for its own operands. What an earlier block's error does
    to a later one is in dL/dy.
    """
    error, size = np.zeros((2, len(dequantised)))
    for call in calls:
        truth = true_output(call, dequantised, config)
        error[call.block] += np.sum((call.y.astype(np.float64) - truth) ** 2)
        size[call.block] += np.sum(truth**2)
    return np.sqrt(error), np.sqrt(error.sum() / size.sum())


def sensitivity(params, batches, dequantised, config, settings):
    """|dL/dy_l| of each block l, [blocks]: L the mean loss, y_l the experts' outputs in "both"."""
    roundings = fp8_roundings(config)

    def loss(nudges, windows):
        x = embed(params, windows[:, :-1])
        for block, weights, nudge in zip(params["blocks"], dequantised, nudges, strict=True):
            x, routing, _ = before_experts(x, block, settings.top_k)
            y = experts(*routing, weights, *roundings) + nudge
            x = x + y.reshape(x.shape)
        return jnp.mean(character_losses(params, x, windows[:, 1:]))

    gradient = jax.jit(jax.grad(loss))
    rows = settings.batch * settings.context
    nudges = [jnp.zeros((rows, settings.hidden))] * settings.num_blocks
    squares = [[float(jnp.sum(g * g)) for g in gradient(nudges, windows)] for windows in batches]
    return np.sqrt(np.sum(squares, axis=0)) / len(batches)


# The comparison -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One line of the table.

    Attributes:
      name, group: which computation; the granularity, or "" where activations are not quantised.
      losses: [batches, B, T] nats of every character.
      calls: what its experts computed, if kept.
      error: relative error of the experts' outputs, or None where the layer promises nothing.
      allowed: sum_l |dL/dy_l| |D_l|, or None.
    """

    name: str
    group: int | str
    losses: np.ndarray
    calls: list[Call]
    error: float | None = None
    allowed: float | None = None

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


@dataclasses.dataclass
class Comparison:
    """All rows, what the layer was given, and what a block's outputs mean to the loss."""

    rows: list[Row]
    quantised: list[jmm.ExpertWeights]
    dequantised: list[tuple[np.ndarray, ...]]
    sensitivity: dict[int | str, np.ndarray]

    def row(self, name, group="") -> Row:
        return next(row for row in self.rows if (row.name, row.group) == (name, group))


def compare(params, batches, settings, mesh, keep_calls=False, inspect=None) -> Comparison:
    """Evaluates the model with every computation of its experts.

    Args:
      params, settings: the trained model.
      batches: held-out windows.
      mesh: devices of the unfused and the fused layer.
      keep_calls: keep the operands and outputs of all experts; they are large.
      inspect: called with each fused layer and its last call before its buffers are given up.
    """
    quantised = [jmm.quantize_weights(*dense_weights(block)) for block in params["blocks"]]
    dequantised = [tuple(map(np.asarray, jmm.dequantize_weights(q))) for q in quantised]
    dense = [dense_weights(block) for block in params["blocks"]]
    dense_bf16 = jax.tree.map(round_to_bf16, dense)
    result = Comparison([], quantised, dequantised, {})

    def add(name, group, moe, config=None):
        losses, calls = evaluate(params, batches, moe, settings)
        row = Row(name, group, losses, calls if keep_calls else [])
        if config is not None:
            norms, row.error = output_errors(calls, dequantised, config)
            row.allowed = float(result.sensitivity[group] @ norms)
        result.rows.append(row)
        return calls

    add("experts in FP32", "", plain_moe(dense))
    add(BF16, "", plain_moe(dense_bf16, exact, round_to_bf16, round_to_bf16))
    add(WEIGHTS_ONLY, "", plain_moe(dequantised))
    for group in settings.granularities:
        config = settings.config(group, mesh.size)
        roundings = fp8_roundings(config)
        measured = sensitivity(params, batches, dequantised, config, settings)
        result.sensitivity[group] = measured
        add("FP8 activations only", group, plain_moe(dense, *roundings))
        add("both", group, plain_moe(dequantised, *roundings), config)
        add("reference", group, reference_moe(quantised, config), config)
        add("unfused layer", group, unfused_moe(quantised, config, mesh), config)
        with jmm.MegaMoE(config, mesh, axis="ep") as layer:
            calls = add("fused layer", group, fused_moe(quantised, layer), config)
            if inspect is not None:
                inspect(layer, calls[-1])
    return result


def difference(row, base):
    """Loss above that of `base`, and the standard error of that over windows of text; in nats."""
    by_window = np.mean(row.losses - base.losses, axis=-1).reshape(-1)
    return by_window.mean(), by_window.std(ddof=1) / np.sqrt(by_window.size)


def table(comparison) -> str:
    lines = [
        f"{'experts':22}{'scales':>7}{'loss':>9}{'bits':>9}{'bits above BF16':>20}"
        f"{'error of y':>12}{'loss above both':>23}{'allowed':>9}"
    ]
    base = comparison.row(BF16)
    for row in comparison.rows:
        above, deviation = np.array(difference(row, base)) / np.log(2)
        line = f"{row.name:22}{row.group:>7}{row.loss:9.5f}{row.loss / np.log(2):9.5f}"
        line += f"{above:+10.5f} ± {deviation:.5f}" if row is not base else ""
        if row.error is not None:
            line += f"{row.error:12.1e}"
            if row.name != "both":
                both = comparison.row("both", row.group)
                above, deviation = difference(row, both)
                line += f"{above:+13.1e} ± {deviation:.1e}{row.allowed + both.allowed:9.1e}"
        lines.append(line)
    return "\n".join(lines)


def check(comparison) -> None:
    """Asserts that the layer costs what its roundings cost."""
    for row in comparison.rows:
        if row.allowed is not None:
            both = comparison.row("both", row.group)
            above, _ = difference(row, both)
            assert abs(above) <= row.allowed + both.allowed, (row.name, row.group, above)


def plot(comparison, training_losses, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    left.plot(np.asarray(training_losses) / np.log(2), lw=0.8, label="training")
    base = comparison.row(BF16)
    left.axhline(base.loss / np.log(2), color="k", ls="--", lw=0.8, label="held out, BF16")
    left.set(xlabel="step", ylabel="bits per character")
    left.legend()
    rows = [row for row in comparison.rows if row is not base][::-1]
    above, deviation = np.transpose([difference(row, base) for row in rows]) / np.log(2)
    names = [f"{row.name} {row.group}".strip() for row in rows]
    right.barh(names, 1000 * above, xerr=1000 * deviation, color="tab:blue")
    right.set(xlabel="thousandths of a bit per character above BF16 experts")
    figure.savefig(path, dpi=120)


def make_mesh(settings):
    """Of the accelerators if there are any, otherwise of virtual CPU devices."""
    devices = jax.devices()
    count = next(n for n in range(len(devices), 0, -1) if settings.num_experts % n == 0)
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("ep",), auto, devices=devices[:count])


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description="Held-out loss with FP4 experts.")
    parser.add_argument("--quick", action="store_true", help="less training, less text")
    parser.add_argument("--plot", metavar="FILE", help="draw the table (needs matplotlib)")
    arguments = parser.parse_args(argv)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    settings = QUICK if arguments.quick else NORMAL

    jmm.use_virtual_cpu_devices(4)  # before JAX is first used; GPUs come first where there are any
    jax.config.update("jax_default_matmul_precision", "highest")  # FP32 means FP32 on GPUs, too
    mesh = make_mesh(settings)
    text, held_out = load_text()
    batches = held_out_windows(held_out, settings)
    count = batches[..., 1:].size
    print(f"Python {sys.version.split()[0]}'s language reference: {len(text)} characters to learn")
    start = time.perf_counter()
    params, losses = train(text, settings)
    print(f"trained in {time.perf_counter() - start:.0f} s on {jax.devices()[0].platform}")
    print(f"\n{count} held-out characters, layers on {mesh.size} devices:\n")
    comparison = compare(params, batches, settings, mesh)
    print(table(comparison))
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    check(comparison)
    if arguments.plot:
        plot(comparison, losses, arguments.plot)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
