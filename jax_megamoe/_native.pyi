from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


VERSION: str = '0.1.0'

FFI_API_VERSION: tuple = (0, 3)

CPU_BLOCK_M: int = 64

NUM_STATUS_WORDS: int = 4

def cpu_ffi_handlers() -> dict:
    """
    Stage name -> capsule, for jax.ffi.register_ffi_target(platform='cpu').
    """

class MoeShape:
    """Sizes of one layer on R ranks; see cc/protocol/shape.h."""

    @staticmethod
    def make(num_ranks: int, num_experts: int, top_k: int, hidden: int, intermediate: int, max_tokens: int, ring_tokens: int = 0, block_m: int = 64) -> MoeShape:
        """
        ring_tokens = 0 picks the default. Raises ValueError for an invalid shape.
        """

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def block_m(self) -> int: ...

    @property
    def ring_blocks(self) -> int: ...

    @property
    def max_pool_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

def workspace_regions(shape: MoeShape) -> list:
    """The symmetric buffer's regions in order, without allocating anything."""

def create_buffer(key: str, shape: MoeShape, groups: Sequence[Sequence[int]], workers_per_rank: int) -> None:
    """
    Allocates one buffer per rank; groups[g][r] is the device ordinal of rank r of group g.
    """

def release_buffer(key: str) -> None:
    """
    Frees a buffer; runs the calls that all ranks have entered and fails the others.
    """

def buffer_keys() -> list[str]: ...

def cpu_isa() -> str:
    """
    The instruction set of the CPU back end's products; ValueError if JAX_MEGAMOE_CPU_ISA names
    one that this machine does not support.
    """

def cpu_isas() -> list[str]:
    """The instruction sets that this machine supports, the best one last."""

def poison_buffer(key: str) -> None:
    """
    Fills every data region with 0xFF bytes; a correct call does not notice.
    """

def arm_fault(key: str, group: int, region: str, rank: int) -> None:
    """The next signal that `rank` sends to a counter of `region` is lost."""

def read_region(key: str, group: int, rank: int, region: str) -> bytes:
    """A copy of one region's bytes."""

ACTIVATIONS: tuple = ('swiglu', 'gpt_oss_swiglu', 'situ')

def source_rows(counts: Sequence[int]) -> list[tuple[int, int]]:
    """
    (rank, index) of every row of an expert, in pool order, from the ranks' row counts.
    """

def visit_blocks(shape: MoeShape, rows_of_expert: Sequence[int], worker: int, num_workers: int) -> list[tuple[int, int, int, int, int, int]]:
    """
    (phase, expert, m_block, n_block, pool_block, valid_m) of every block of a worker.
    """

def ring_targets(shape: MoeShape, pool_block: int) -> tuple[int, int, int, int, int, int]:
    """
    (slot, lap, l1_arrival, l1_empty, l2_arrival, l2_empty targets) of a pool block.
    """

def l1_arrival_increment(shape: MoeShape, row_in_block: int, valid_rows: int) -> int: ...

def quantize_e4m3(values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
    """(codes, sf) of float32 values in groups of 32."""

def quantize_e2m1(values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
    """(codes, sf) of float32 values in groups of 32, one code a byte."""

def sf_e4m3(amax_bits: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

def sf_e2m1(amax_bits: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

def e4m3_to_float(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...

def e2m1_doubled(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

def ue8m0_to_float(bytes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...

def bf16_to_float(bits: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...

def fp16_to_float(bits: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...

def float_to_bf16(values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint16], dict(shape=(None,))]: ...

def activate(gate: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], up: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], activation: int, params: Sequence[float]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]:
    """The activation in FP32; its number is an index of ACTIVATIONS."""

GPU_WEIGHT_CHUNK_ROWS: int = 128

GPU_TRACE_LANES: int = 8

GPU_TRACE_EVENTS: int = 512

GPU_TRACE_NAMES: tuple = ...

def compile_kernel(include_dir: str, options: Sequence[str], nvrtc_path: str) -> tuple:
    """
    (cubin, log, cache) of the layer's kernel. cache: "read" if it was in the cache, "written" if it is now, "none" if it could not be kept. Raises RuntimeError with the compiler's log.
    """

def gpu_shape(num_ranks: int, num_experts: int, top_k: int, hidden: int, intermediate: int, max_tokens: int, granularity: int, ring_tokens: int = 0) -> MoeShape:
    """
    The shape that sizes a rank's buffer on a GPU. granularity: 0 (row), 32 or 128. Raises ValueError for an invalid shape.
    """

def gpu_kernel_options(shape: MoeShape, granularity: int, tile: int, build: int = 0, activation: int = 0, bias: bool = False) -> list[str]:
    """
    The compiler's options for one kernel, without include directories. build: 0 to run, 1 with a timeline, 2 for compute-sanitizer's racecheck.
    """

def gpu_tiles(granularity: int) -> list:
    """The tile configurations, narrowest first."""

def gpu_select_tile(shape: MoeShape, granularity: int, num_rows: int) -> int:
    """The tile that a call with this many rows per rank uses."""

def gpu_weight_chunk_bytes(granularity: int) -> int:
    """Bytes of the packed weights of 128 rows and 128 of K."""

class GpuRanks:
    """
    Runs the ranks' kernels on GPUs without JAX; see jax_megamoe.devtools.gpu_harness for NumPy arrays.
    """

    def __init__(self, layout: MoeShape, granularity: int, devices: Sequence[int], ctas_per_rank: int, include_dir: str, nvrtc_path: str, build: int) -> None: ...

    def num_ctas(self, rank: int) -> int: ...

    def set_weights(self, rank: int, w13: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], w13_row_scale: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], w2: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], w2_row_scale: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], b13: Annotated[NDArray, dict(order='C', device='cpu', writable=False)] | None, b2: Annotated[NDArray, dict(order='C', device='cpu', writable=False)] | None) -> None:
        """This rank's E/R experts in the GPU layout."""

    def set_inputs(self, rank: int, num_rows: int, x: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], x_sf: Annotated[NDArray, dict(order='C', device='cpu', writable=False)] | None, topk_idx: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], topk_weights: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], num_tokens: int | None) -> None:
        """Copies one rank's operands to its GPU."""

    def select_tile(self) -> int:
        """The tile that the number of rows asks for."""

    def prepare(self, tile: int, activation: int) -> None:
        """Compiles and loads a kernel."""

    def launch(self, tile: int, repeats: int, flush_l2: bool, timeout_s: float, checked: bool, activation: int, activation_params: Sequence[float], skip_rank: int, fault_rank: int, fault_region: str, gate: bool, hold: tuple[int, int]) -> list[float]:
        """Microseconds of every rank in every repeat, flat."""

    def launch_burst(self, tile: int, calls: int, timeout_s: float, checked: bool, activation: int, activation_params: Sequence[float]) -> float:
        """Calls without waiting in between; seconds in all."""

    def y(self, rank: int) -> bytes: ...

    def received(self, rank: int) -> bytes: ...

    def status(self, rank: int) -> bytes: ...

    def read(self, rank: int, region: str) -> bytes:
        """A copy of one region's bytes."""

    def trace(self, rank: int) -> bytes:
        """
        The trace buffer of the last launch, as cc/gpu/interface/kernel_args.h describes it.
        """

    def poison(self) -> None:
        """Fills every data region and all outputs with 0xFF bytes."""

    def failure(self, rank: int) -> str:
        """What a rank reported in the last launch; empty: nothing."""

def gpu_ffi_handlers() -> dict:
    """
    Stage name -> capsule, for jax.ffi.register_ffi_target(platform='CUDA').
    """

def create_gpu_buffer(key: str, shape: MoeShape, granularity: int, groups: Sequence[Sequence[int]], include_dir: str, nvrtc_path: str) -> None:
    """
    Allocates one buffer per rank on its GPU; groups[g][r] is the ordinal of rank r of group g. Raises MemoryError, or RuntimeError if GPUs have no link or there is no driver.
    """

def prepare_gpu_kernel(key: str, tile: int, activation: int, bias: bool) -> None:
    """Compiles and loads a kernel of a buffer, unless it is there."""

def wait_gpu_report() -> str | None:
    """
    Waits until a call has failed; returns its report, or None once the process ends.
    """

def call_in_main_thread(callback: Callable) -> bool:
    """
    The main thread calls `callback` between two byte codes, and raises what it raises. False if too many such calls wait already.
    """

def take_gpu_failures() -> list[str]:
    """
    Texts of failed calls that nobody has been told of yet; each is returned once.
    """

def shut_down_gpu() -> None:
    """
    Stops looking for failures and makes running kernels give up. Before the process ends.
    """
