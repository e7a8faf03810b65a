"""Runs the GPU kernels without JAX: R ranks on G GPUs, NumPy arrays in and out.

For tests and measurements. R may exceed G: ranks on one GPU share its SMs, so a machine with one
GPU can run the whole protocol. All operands are on the GPUs before a launch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_megamoe._backends import SM_90A
from jax_megamoe._ffi import activation_number, activation_params, granularity_number, native
from jax_megamoe._headers import include_dir
from jax_megamoe._nvrtc import nvrtc_path
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import check
from jax_megamoe.failures import MegaMoERuntimeError
from jax_megamoe.symmetric import moe_shape, region_array
from jax_megamoe.weights import ExpertWeights

__all__ = ["TRACE_DTYPE", "GpuRanks", "Outputs"]

#: One interval of one role of one block; begin and end in nanoseconds of the GPU's global timer.
TRACE_DTYPE = np.dtype([("begin", "<u8"), ("end", "<u8"), ("name", "<u4"), ("block", "<u4")])


class Outputs(NamedTuple):
    """What one rank wrote.

    Attributes:
      y: [T, H] uint16, BF16 bits.
      received: [E/R] int32 rows of each local expert.
      status: int32 words in the order of `MoEStats` after its first field.
    """

    y: np.ndarray
    received: np.ndarray
    status: np.ndarray


class GpuRanks:
    """R ranks of one expert-parallel group.

    Args:
      config: shapes and limits; widths are rounded up to multiples of 128, and arrays have to be
        padded by the caller.
      devices: the GPU of every rank, by its ordinal in this process, for instance ``[0, 0, 0, 0]``.
      ctas_per_rank: blocks of a launch, at most the SMs of a GPU divided by its ranks; 0: all.
      trace: compile kernels that record a timeline, see `trace`.
      racecheck: compile kernels for compute-sanitizer's racecheck. It follows neither bulk copies
        nor an arrival at a barrier on behalf of other threads, so these kernels copy by loads
        and stores, and every thread arrives. All else is the same.

    Raises:
      MegaMoEError: trace and racecheck together.
      RuntimeError: no driver, no NVRTC, no link between two GPUs, or not enough memory.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        devices: Sequence[int],
        *,
        ctas_per_rank: int = 0,
        trace: bool = False,
        racecheck: bool = False,
    ):
        check(
            not (trace and racecheck),
            "racecheck",
            got="trace=True as well",
            want="one of them",
            remedy="create ranks for each",
        )
        # Streams of one GPU share this many hardware queues, and ranks in one queue would wait for
        # each other's turn. The driver reads it when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self.config = config
        self.devices = tuple(devices)
        self.num_ranks = len(devices)
        self.granularity = granularity_number(config)
        self.shape = moe_shape(config, self.num_ranks, SM_90A.name)
        self._rows = [0] * self.num_ranks
        self._native = native.GpuRanks(
            self.shape,
            self.granularity,
            list(devices),
            ctas_per_rank,
            str(include_dir()),
            nvrtc_path(),
            2 if racecheck else int(trace),
        )

    def num_ctas(self, rank: int) -> int:
        return self._native.num_ctas(rank)

    def set_weights(self, rank: int, weights: ExpertWeights) -> None:
        """Copies the E/R experts of `rank`, in the GPU layout of the config's granularity."""
        codes = (weights.w13, weights.w13_sf, weights.w2, weights.w2_sf)
        biases = (weights.b13, weights.b2)
        self._native.set_weights(
            rank,
            *(_bytes(array) for array in codes),
            *(None if array is None else _bytes(array) for array in biases),
        )

    def set_all_weights(self, weights: ExpertWeights) -> None:
        """Copies all E experts, in the GPU layout, to their ranks."""
        local = self.config.local_experts(self.num_ranks)
        for rank in range(self.num_ranks):
            first = rank * local
            own = jax.tree.map(lambda array, first=first: array[first : first + local], weights)
            self.set_weights(rank, own)

    def set_inputs(
        self,
        rank: int,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """Copies one rank's operands.

        Args:
          rank: 0 to R - 1.
          x: [T, H] bfloat16 (or uint16 bits), or a pair (codes [T, H], sf [T, H/32]) of bytes.
          topk_idx: [T, K] int32 or int64.
          topk_weights: [T, K] float32.
          num_tokens: leading rows that hold tokens; None: all, and the kernel is not told.
        """
        codes, sf = x if isinstance(x, tuple) else (x, None)
        rows = codes.shape[0]
        topk_idx = np.ascontiguousarray(topk_idx)
        check(
            topk_idx.dtype in (np.int32, np.int64),
            "topk_idx",
            got=topk_idx.dtype,
            want="int32 or int64",
            remedy="cast it",
        )
        self._native.set_inputs(
            rank,
            rows,
            _bytes(codes),
            None if sf is None else _bytes(sf),
            topk_idx,
            np.ascontiguousarray(topk_weights, np.float32),
            num_tokens,
        )
        self._rows[rank] = rows

    def select_tile(self) -> int:
        """The tile that the layer uses for the operands that are set."""
        return self._native.select_tile()

    def prepare(self, tile: int = -1) -> None:
        """Compiles and loads the kernel of a tile, which `launch` does too."""
        self._native.prepare(tile, activation_number(self.config.activation))

    def launch(
        self,
        tile: int = -1,
        *,
        repeats: int = 1,
        flush_l2: bool = False,
        timeout_s: float | None = None,
        skip_rank: int | None = None,
        fault: tuple[int, str] | None = None,
        gate: bool = True,
        hold: tuple[int, int] | None = None,
        expect_failure: bool = False,
    ) -> np.ndarray:
        """Runs the call, `repeats` times one after the other.

        Args:
          tile: index in `native.gpu_tiles`; -1: `select_tile`.
          repeats: number of calls; a call that fails is the last one.
          flush_l2: replace the contents of the L2 before every call.
          timeout_s: limit of every wait in the kernels; default config.timeout_s.
          skip_rank: this rank's kernel is not launched, as if it never arrived.
          fault: (rank, region): that rank's next signal to a counter of the region is lost.
          gate: all ranks' streams wait for one word in memory before each call, so that ranks
            start together; without it they start as they are launched.
          hold: (GPU, number): so many of its SMs run another kernel from before each call until all
            ranks' kernels have ended, as if a collective waited there for another GPU.
          expect_failure: return when a rank reports a failure, instead of raising; see `failure`.

        Returns:
          [calls, R] float64, microseconds between events before and after each rank's kernel; NaN
          for a rank that was skipped.

        Raises:
          MegaMoERuntimeError: a rank reported a failure, and expect_failure is False.
          RuntimeError: a kernel did not end; the process cannot use that GPU any more.
        """
        fault_rank, region = (-1, "") if fault is None else fault
        times = self._native.launch(
            tile,
            repeats,
            flush_l2,
            self.config.timeout_s if timeout_s is None else timeout_s,
            self.config.checked,
            *self._activation(),
            -1 if skip_rank is None else skip_rank,
            fault_rank,
            region,
            gate,
            (-1, 0) if hold is None else hold,
        )
        if not expect_failure:
            self._raise_failures()
        return np.array(times).reshape(-1, self.num_ranks)

    def launch_burst(self, calls: int, tile: int = -1, *, timeout_s: float | None = None) -> float:
        """Launches `calls` calls without waiting in between; seconds until the last one's end."""
        seconds = self._native.launch_burst(
            tile,
            calls,
            self.config.timeout_s if timeout_s is None else timeout_s,
            self.config.checked,
            *self._activation(),
        )
        self._raise_failures()
        return seconds

    def outputs(self, rank: int) -> Outputs:
        """Copies of what the last call wrote on `rank`; 0xFF bytes where nothing was written."""
        y = np.frombuffer(self._native.y(rank), np.uint16)
        return Outputs(
            y.reshape(self._rows[rank], self.shape.hidden),
            np.frombuffer(self._native.received(rank), np.int32),
            np.frombuffer(self._native.status(rank), np.int32),
        )

    def read(self, rank: int, region: str) -> np.ndarray:
        """A copy of one region of a rank's symmetric buffer, as `SymmetricBuffer.read`."""
        return region_array(self.shape, region, lambda: self._native.read(rank, region))

    def poison(self) -> None:
        """Overwrites data regions and outputs with 0xFF bytes; no result may depend on them."""
        self._native.poison()

    def failure(self, rank: int) -> str | None:
        """What `rank` reported in the last launch, or None."""
        return self._native.failure(rank) or None

    def trace(self, rank: int) -> list[list[np.ndarray]]:
        """The timeline of the last launch: [block][lane] -> array of `TRACE_DTYPE`.

        Lanes are math warpgroups, loaders and pull warps; `native.GPU_TRACE_NAMES` has the names.
        """
        raw = self._native.trace(rank)
        lanes, events, ctas = native.GPU_TRACE_LANES, native.GPU_TRACE_EVENTS, self.num_ctas(rank)
        check(
            len(raw) != 0,
            "trace",
            got="a kernel without a timeline",
            want="GpuRanks(..., trace=True)",
            remedy="create the ranks with trace=True",
        )
        counts = np.frombuffer(raw, np.uint32, ctas * lanes).reshape(ctas, lanes)
        table = np.frombuffer(raw, TRACE_DTYPE, offset=counts.nbytes).reshape(ctas, lanes, events)
        return [
            [table[cta, lane, : min(counts[cta, lane], events)] for lane in range(lanes)]
            for cta in range(ctas)
        ]

    def _activation(self) -> tuple[int, list[float]]:
        activation = self.config.activation
        return activation_number(activation), activation_params(activation).tolist()

    def _raise_failures(self) -> None:
        texts = [self.failure(rank) for rank in range(self.num_ranks)]
        found = [text for text in texts if text is not None]
        if found:
            raise MegaMoERuntimeError("\n".join(found))


def _bytes(array: Any) -> np.ndarray:
    """A contiguous uint8 view of any array, JAX's included."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
