"""What runs where: transports and products for the mesh that is traced for."""

from __future__ import annotations

import importlib.util

import jax

from jax_megamoe.config import BLOCK_N, MegaMoEConfig
from jax_megamoe.errors import check
from jax_megamoe.unfused._products import GEMMS
from jax_megamoe.unfused._transport import TRANSPORTS

__all__ = ["choose"]


def _target():
    """(platform, device kind or None) of the mesh this is traced for, without touching arrays."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend(), None
    return getattr(device, "platform", None) or jax.default_backend(), device.device_kind


def _is_hopper(device_kind):
    for device in jax.local_devices():
        if device_kind in (None, device.device_kind):
            return getattr(device, "compute_capability", None) == "9.0"
    return False


def _has_mosaic():
    # JAX's module imports JAX's own test helpers, which import absl, which JAX does not require.
    return importlib.util.find_spec("absl") is not None


def choose(
    transport: str, gemm: str, differentiable: bool = False, config: MegaMoEConfig | None = None
) -> tuple[str, str]:
    """Resolves ``"auto"`` for the mesh being traced, and refuses what cannot run there.

    Args:
      transport: "auto" or one of `TRANSPORTS`.
      gemm: "auto" or one of `GEMMS`.
      differentiable: whether reverse-mode differentiation has to work.
      config: shapes, or None for such as every gemm takes.

    Returns:
      (transport, gemm), both named.

    Raises:
      MegaMoEError: an unknown name, the ragged transport on CPU, the Mosaic kernel on anything but
        Hopper or with widths that are not whole tiles, or either of them in a differentiable layer.
    """
    widths = () if config is None else (config.hidden, config.intermediate)
    whole_tiles = all(width % BLOCK_N == 0 for width in widths)
    for operand, name, names in (("transport", transport, TRANSPORTS), ("gemm", gemm, GEMMS)):
        check(
            name == "auto" or name in names,
            operand,
            got=repr(name),
            want=f"'auto' or one of {names}",
            remedy="'auto' picks what was measured to be fastest",
        )
    platform, device_kind = _target()
    if transport == "auto":
        # Measured on 2 x H200 (NVLink), jax 0.11.2, DeepSeek-V4-Flash with 32 experts per GPU:
        # all_to_all 662 us and ragged_all_to_all 807 us at 8 tokens, 17 ms and 161 ms at 8192.
        transport = "all_to_all"
    if gemm == "auto":
        if platform == "cpu" or differentiable:
            gemm = "blocked"
        else:
            mosaic = _is_hopper(device_kind) and _has_mosaic() and whole_tiles
            gemm = "mosaic" if mosaic else "ragged_dot"
    check(
        transport != "ragged_all_to_all" or platform != "cpu",
        "transport",
        got="'ragged_all_to_all' on CPU",
        want="'all_to_all' or 'all_gather'",
        remedy="XLA:CPU does not implement ragged_all_to_all",
    )
    check(
        gemm != "mosaic" or whole_tiles,
        "gemm",
        got=f"'mosaic' with hidden, intermediate = {widths}",
        want="'blocked' or 'ragged_dot'",
        remedy=f"the kernel computes whole tiles of {BLOCK_N}; 'auto' picks another one",
    )
    check(
        gemm != "mosaic" or _is_hopper(device_kind),
        "gemm",
        got=f"'mosaic' on {device_kind or platform}",
        want="'blocked' or 'ragged_dot'",
        remedy="the kernel is written for compute capability 9.0",
    )
    check(
        gemm != "mosaic" or _has_mosaic(),
        "gemm",
        got="'mosaic' without the package absl-py",
        want="absl-py installed",
        remedy="install absl-py: JAX's module with this kernel imports it",
    )
    check(
        not differentiable or (transport != "ragged_all_to_all" and gemm != "mosaic"),
        "transport and gemm of a differentiable layer",
        got=(transport, gemm),
        want="transport 'all_to_all' or 'all_gather', gemm 'blocked' or 'ragged_dot'",
        remedy="leave both at 'auto'",
    )
    return transport, gemm
