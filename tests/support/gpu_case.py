"""The GPU kernel's workspace as tests read it, and the same workspace written by NumPy.

`Workspace` undoes the layouts of the GPU's ring (cc/gpu/sm90/ring_layout.h). `SimulatedRanks` has
the interface of `gpu_harness.GpuRanks` and fills the regions from the formulas, so that every check
of a kernel's workspace runs, and can be made to fail, on a machine without a GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from jax_megamoe import quantize, reference
from jax_megamoe._ffi import native
from jax_megamoe.devtools.gpu_harness import GpuRanks, Outputs
from jax_megamoe.symmetric import granularity_number, moe_shape, region_array

# The shape of all GPU tests that do not need another one: its kernels are compiled once.
CONFIG = jmm.MegaMoEConfig(
    num_experts=16,
    top_k=3,
    hidden=512,
    intermediate=256,
    max_tokens_per_rank=128,
    activation=jmm.swiglu(limit=10.0),
    timeout_s=10.0,
    checked=False,  # routings with ids out of range are among those of the tests
)


def with_granularity(granularity, config=CONFIG, **changes):
    return dataclasses.replace(config, activation_granularity=granularity, **changes)


def num_tiles(config):
    return len(native.gpu_tiles(granularity_number(config)))


def on_cpu():
    """Where the reference and NumPy's helpers run: GPUs are for the kernels."""
    return jax.default_device(jax.devices("cpu")[0])


def load(ranks, case, num_tokens=None, x=None):
    """Gives `ranks` a case's operands; `x`, if given, replaces its tokens: [R, T, ..] or a pair."""
    with on_cpu():
        layout = "sm90_bf16" if case.config.activation_granularity == 32 else "sm90_fp8"
        ranks.set_all_weights(jmm.to_layout(case.weights, layout))
    load_inputs(ranks, case, num_tokens, x)
    return ranks


def load_inputs(ranks, case, num_tokens=None, x=None):
    x = case.by_rank(case.x) if x is None else x
    idx, weights = (np.asarray(case.by_rank(a)) for a in case.operands[1:])
    for rank in range(case.num_ranks):
        own = tuple(np.asarray(a[rank]) for a in x) if isinstance(x, tuple) else np.asarray(x[rank])
        count = None if num_tokens is None else int(num_tokens[rank])
        ranks.set_inputs(rank, own, idx[rank], weights[rank], num_tokens=count)


def all_y(ranks):
    """[R*T, H] float64 of all ranks."""
    bits = np.concatenate([ranks.outputs(rank).y for rank in range(ranks.num_ranks)])
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check(case, ranks, num_tokens=None):
    """The error rule of docs/numerics.md."""
    with on_cpu():
        case.check(all_y(ranks), num_tokens)


def with_bias_column(rows, factors):
    """[..., K] and [...] -> [..., K + 32]: one more product, whose other factor is the bias."""
    column = np.zeros((*rows.shape[:-1], 32))
    column[..., 0] = factors
    return np.concatenate([rows, column], axis=-1)


# The ring's layout --------------------------------------------------------------------------------


def _swizzled(tiles, block_m):
    """[blocks, columns/128, block_m, 8, 16]: chunks c and c ^ (r % 8) of row r trade places."""
    place = np.arange(8)[None] ^ (np.arange(block_m)[:, None] % 8)
    return np.take_along_axis(tiles, place[None, None, :, :, None], axis=3)


def untile(region, block_m, row_bytes):
    """Bytes of a ring region -> [rows, row_bytes]; see tile_chunk in cc/gpu/sm90/ring_layout.h."""
    flat = np.ascontiguousarray(region).reshape(-1).view(np.uint8)
    blocks = flat.size // (block_m * row_bytes)
    tiles = flat[: blocks * block_m * row_bytes].reshape(blocks, row_bytes // 128, block_m, 8, 16)
    rows = _swizzled(tiles, block_m).transpose(0, 2, 1, 3, 4)
    return rows.reshape(blocks * block_m, row_bytes)


def tile(rows, block_m):
    """The inverse of `untile`: [rows, row_bytes] uint8 -> bytes."""
    blocks, row_bytes = len(rows) // block_m, rows.shape[1]
    tiles = rows.reshape(blocks, block_m, row_bytes // 128, 8, 16).transpose(0, 2, 1, 3, 4)
    return _swizzled(tiles, block_m).reshape(-1)


class Workspace:
    """One rank's regions after a call with a tile of `block_m` tokens."""

    def __init__(self, ranks, rank, block_m):
        self._read = functools.partial(ranks.read, rank)
        self.config, self.block_m = ranks.config, block_m
        self._bf16 = ranks.config.activation_granularity == 32
        self.ring_rows = ranks.shape.ring_blocks * ranks.shape.block_m // block_m * block_m

    def _values(self, region, width):
        """[ring rows, width] float64 operands of the tensor cores, before any scale."""
        if self._bf16:
            bits = untile(self._read(region), self.block_m, 2 * width).view(np.uint16)
            return native.bf16_to_float(bits.reshape(-1)).reshape(-1, width).astype(np.float64)
        codes = untile(self._read(region), self.block_m, width)
        return native.e4m3_to_float(codes.reshape(-1)).reshape(-1, width).astype(np.float64)

    def _scales_per_128(self, region, width):
        """[ring rows, width / 128] float32."""
        words = np.ascontiguousarray(self._read(region)).reshape(-1).view(np.float32)
        blocks, columns = self.ring_rows // self.block_m, width // 128
        words = words[: self.ring_rows * columns].reshape(blocks, columns, self.block_m)
        return words.transpose(0, 2, 1).reshape(self.ring_rows, columns)

    def l1_bytes(self):
        """[ring rows, H] codes, or [ring rows, 2 H] bytes of BF16."""
        width = self.config.hidden * (2 if self._bf16 else 1)
        return untile(self._read("l1_acts"), self.block_m, width)

    def l1_scales(self):
        """[ring rows, H/128] or [ring rows, 1] float32; None: the scale is in the values."""
        if self._bf16:
            return None
        if self.config.activation_granularity == 128:
            return self._scales_per_128("l1_acts_sf", self.config.hidden)
        words = np.ascontiguousarray(self._read("l1_acts_sf")).reshape(-1).view(np.float32)
        return words[: self.ring_rows, None]

    def l1_topk_weights(self):
        return self._read("l1_topk_weights")[: self.ring_rows]

    def l2_values(self):
        """[ring rows, I] float64, scales applied."""
        values = self._values("l2_acts", self.config.intermediate)
        scales = self.l2_scales()
        return values if scales is None else values * np.repeat(scales.astype(np.float64), 128, 1)

    def l2_scales(self):
        """[ring rows, I/128] float32; None: the scale is in the values."""
        return None if self._bf16 else self._scales_per_128("l2_acts_sf", self.config.intermediate)

    def sources(self):
        """[pool rows, 2] uint32: source rank, token * K + k."""
        return self._read("token_src_metadata")


# Which rows stand where ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pool:
    """The rows of one rank, as the contract orders them.

    Attributes:
      position: [N] pool row.
      expert: [N] local expert.
      source: [N] source rank.
      slots: {(local expert, source rank): sorted slots}; their order in the pool is free on GPUs.
    """

    position: np.ndarray
    expert: np.ndarray
    source: np.ndarray
    slots: dict


def routed(case, num_tokens=None):
    """[R, T, K] bool."""
    idx = np.asarray(case.by_rank(case.topk_idx))
    keep = (idx >= 0) & (idx < case.config.num_experts)
    if num_tokens is not None:
        keep &= np.arange(idx.shape[1])[None, :, None] < np.asarray(num_tokens)[:, None, None]
    return keep


def pools(case, block_m, num_tokens=None):
    """A `Pool` for each rank: `native.source_rows` says whose turn it is."""
    config, local = case.config, case.config.num_experts // case.num_ranks
    idx, keep = np.asarray(case.by_rank(case.topk_idx)), routed(case, num_tokens)
    flat = np.where(keep, idx, -1).reshape(case.num_ranks, -1)
    result = []
    for owner in range(case.num_ranks):
        position, experts, source, slots, start = [], [], [], {}, 0
        for e in range(local):
            mine = [np.flatnonzero(row == owner * local + e) for row in flat]
            turns = native.source_rows([len(m) for m in mine])
            position += range(start, start + len(turns))
            experts += [e] * len(turns)
            source += [turn[0] for turn in turns]
            slots |= {(e, rank): m for rank, m in enumerate(mine) if len(m)}
            start += -(-len(turns) // block_m) * block_m
        result.append(Pool(*(np.array(a, int) for a in (position, experts, source)), slots))
    assert config.top_k == idx.shape[2]
    return result


# The kernel in NumPy ------------------------------------------------------------------------------


def _product(rows, matrix):
    """rows [M, K] times float64 matrix [N, K] -> [M, N] float32, whose bits depend on nothing else.

    The order in which a library sums depends on the shape, on a row's place and on the processor;
    slots come in a random order. Products of E4M3 and E2M1 values, scaled, have 6 significant bits.
    In units of the smallest of one group, products are below 2^22 (448 * 6 over 2^-9 * 0.5), and
    4096 of them below 2^34. So sums in float64, which has 53 bits, are exact in any order while the
    scales of a row's groups lie within 2^19. Beyond that an order changes 2^-53 of the largest
    sum, which the rounding to FP32 below, 2^29 times as coarse, hides but for one value in 2^28.
    """
    return (rows.astype(np.float64) @ matrix.T).astype(np.float32)


class SimulatedRanks:
    """`GpuRanks` without a GPU: `launch` fills the regions and outputs from the formulas.

    Slots of one source rank and expert come in a random order, as on a GPU. `damage`, stage ->
    function of an array, changes what a stage writes, for tests of the checks.
    """

    def __init__(self, config, devices, **_):
        self.config, self.num_ranks = config, len(devices)
        self.shape = moe_shape(config, self.num_ranks, "sm_90a")
        self._granularity = granularity_number(config)
        self._inputs, self._dense, self._biases = [None] * self.num_ranks, [], None
        self._rng = np.random.default_rng(0)
        self.damage = {}
        self.poison()

    def set_all_weights(self, weights):
        with on_cpu():
            self._dense = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(weights)]
            biases = jmm.expert_biases(weights)
            self._biases = None if biases is None else [np.asarray(b) for b in biases]

    def set_weights(self, rank, weights):
        assert weights.b13 is None  # biases come with set_all_weights
        with on_cpu():
            own = [np.asarray(w) for w in jmm.dequantize_weights(weights)]
        local = self.config.num_experts // self.num_ranks
        if not self._dense:
            self._dense = [np.zeros((local * self.num_ranks, *w.shape[1:])) for w in own]
        for all_, part in zip(self._dense, own, strict=True):
            all_[rank * local : (rank + 1) * local] = part

    def set_inputs(self, rank, x, topk_idx, topk_weights, *, num_tokens=None):
        self._inputs[rank] = (x, np.asarray(topk_idx), np.asarray(topk_weights), num_tokens)

    def select_tile(self):
        rows = max(len(i[1]) for i in self._inputs)
        return native.gpu_select_tile(self.shape, self._granularity, rows)

    def poison(self):
        regions = native.workspace_regions(self.shape)
        self._regions = [
            {row["name"]: np.full(row["num_bytes"], 0xFF, np.uint8) for row in regions}
            for _ in range(self.num_ranks)
        ]
        self._outputs = [None] * self.num_ranks

    def read(self, rank, region):
        return region_array(self.shape, region, lambda: self._regions[rank][region].tobytes())

    def outputs(self, rank):
        return self._outputs[rank]

    def _damaged(self, stage, array):
        return self.damage.get(stage, lambda a: a)(array)

    def _write(self, rank, region, array, offset=0):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._regions[rank][region][offset : offset + data.size] = data

    def launch(self, tile_index=-1, *, repeats=1, **_):
        number = self.select_tile() if tile_index < 0 else tile_index
        block_m = native.gpu_tiles(self._granularity)[number]["block_m"]
        with on_cpu():
            self._launch(block_m)
        return np.full((repeats, self.num_ranks), 1.0)

    def _launch(self, block_m):
        config, local = self.config, self.config.num_experts // self.num_ranks
        staged = [self._stage(*inputs) for inputs in self._inputs]
        tokens, top_k = self.shape.max_tokens, config.top_k
        combine = np.full((self.num_ranks, top_k, tokens, config.hidden), 0xFFFF, np.uint16)
        for owner in range(self.num_ranks):
            rows, start = [], 0
            for e in range(local):
                mine = [
                    self._rng.permutation(np.flatnonzero(s[2].reshape(-1) == owner * local + e))
                    for s in staged
                ]
                turns = native.source_rows([len(m) for m in mine])
                rows += [(start + i, e, r, mine[r][n]) for i, (r, n) in enumerate(turns)]
                start += -(-len(turns) // block_m) * block_m
            self._owner(owner, np.array(rows, int).reshape(-1, 4), start, staged, block_m, combine)
        for rank, (_, _, idx, _, rows) in enumerate(staged):
            self._write(rank, "combine", combine[rank])
            self._combine(rank, idx, rows, combine[rank])

    def _stage(self, x, idx, weights, num_tokens):
        count = len(idx) if num_tokens is None else num_tokens
        if isinstance(x, tuple):
            codes, sf = (np.asarray(a).view(np.uint8) for a in x)
        elif len(x) == 0:
            codes, sf = np.zeros((0, self.config.hidden), np.uint8), np.zeros((0, 0), np.uint8)
        else:
            pair = quantize.quantize_e4m3(jnp.asarray(x), self.config.x_group)
            codes, sf = (np.asarray(a) for a in pair)
        inside = (idx >= 0) & (idx < self.config.num_experts)
        inside[count:] = False
        return codes, sf, np.where(inside, idx, -1), weights, len(idx)

    def _owner(self, owner, rows, num_rows, staged, block_m, combine):
        config = self.config
        position, expert, source, slot = rows.T
        token = slot // config.top_k
        picked = [(staged[r][0][t], staged[r][1][t]) for r, t in zip(source, token, strict=True)]
        sources = np.full((num_rows, 2), 0xFFFFFFFF, np.uint32)
        sources[position] = np.stack([source, slot], 1)
        self._write(owner, "token_src_metadata", sources)
        local = config.num_experts // self.num_ranks
        received = np.bincount(expert, minlength=local).astype(np.int32)
        blocks = num_rows // block_m
        ring_blocks = self.shape.ring_blocks * self.shape.block_m // block_m
        idx = self._inputs[owner][1][: self._inputs[owner][3]]
        wrong = ((idx < -1) | (idx >= config.num_experts)).sum()
        status = np.array([wrong, len(rows), blocks, -(-blocks // ring_blocks)], np.int32)
        self._outputs[owner] = (received, status)
        if not len(rows):
            return
        codes = self._damaged("dispatch", np.stack([p[0] for p in picked]))
        sf = np.stack([p[1] for p in picked])
        weight = np.array([staged[r][3].reshape(-1)[s] for r, s in zip(source, slot, strict=True)])
        for rank, (c, s, *_) in enumerate(staged):
            self._write(rank, "x", c)
            self._write(rank, "x_sf", s)
        x = np.asarray(quantize.dequantize_e4m3(jnp.asarray(codes), jnp.asarray(sf)))
        gate, up = np.zeros((2, len(rows), config.intermediate), np.float32)
        for e in np.unique(expert):
            here, matrix = expert == e, owner * local + e
            gate[here] = _product(x[here], self._dense[0][matrix])
            up[here] = _product(x[here], self._dense[1][matrix])
            if self._biases is not None:
                gate[here] += self._biases[0][matrix]
                up[here] += self._biases[1][matrix]
        gate_up = jnp.concatenate([gate, up], axis=1)
        acts = reference.activate(gate_up, weight, config.activation)
        acts = self._damaged("swiglu", np.asarray(acts))
        pair = quantize.quantize_e4m3(jnp.asarray(acts), config.act_group)
        acts = np.asarray(quantize.dequantize_e4m3(*pair))
        self._ring(owner, 1, position, codes, sf, x, block_m, ring_blocks)
        self._ring(owner, 2, position, *map(np.asarray, pair), acts, block_m, ring_blocks)
        ring_row = position % (ring_blocks * block_m)
        weights = np.full(ring_blocks * block_m, np.nan, np.float32)
        weights[ring_row] = weight
        self._write(owner, "l1_topk_weights", weights)
        for e in np.unique(expert):
            here = expert == e
            out = _product(acts[here], self._dense[2][owner * local + e])
            if self._biases is not None:
                out += weight[here, None] * self._biases[2][owner * local + e]
            out = self._damaged("linear2", out)
            bits = native.float_to_bf16(out.reshape(-1)).reshape(out.shape)
            combine[source[here], slot[here] % config.top_k, token[here]] = bits

    def _ring(self, owner, linear, position, codes, sf, values, block_m, ring_blocks):
        name, width = f"l{linear}_acts", codes.shape[1]
        bf16 = self.config.activation_granularity == 32
        rows = np.full((ring_blocks * block_m, width * (2 if bf16 else 1)), 0xFF, np.uint8)
        at = position % len(rows)
        if bf16:
            bits = native.float_to_bf16(values.reshape(-1)).reshape(values.shape)
            rows[at] = bits.view(np.uint8)
        else:
            rows[at] = codes
            scales = np.full((len(rows), width // 128), np.nan, np.float32)
            scales[at] = np.ldexp(np.float32(1), sf[:, ::4].astype(int) - 127)
            if linear == 1 and self.config.activation_granularity == "row":
                self._write(owner, f"{name}_sf", scales[:, 0])
            else:
                blocks = scales.reshape(ring_blocks, block_m, -1).transpose(0, 2, 1)
                self._write(owner, f"{name}_sf", blocks)
        self._write(owner, name, tile(rows, block_m))

    def _combine(self, rank, idx, rows, combine):
        total = np.zeros((rows, self.config.hidden), np.float32)
        for k in range(self.config.top_k):
            here = idx[:, k] >= 0
            bits = combine[k, :rows][here]
            total[here] += native.bf16_to_float(bits.reshape(-1)).reshape(bits.shape)
        y = native.float_to_bf16(total.reshape(-1)).reshape(total.shape)
        self._outputs[rank] = Outputs(y, *self._outputs[rank])


#: For parametrize: every check runs on the simulation, and on the kernel where there is a GPU.
BACKENDS = [
    pytest.param(SimulatedRanks, id="simulated"),
    pytest.param(GpuRanks, id="gpu", marks=pytest.mark.gpu),
]
