"""Loads the native module, and turns what users pass into what it takes."""

from __future__ import annotations

import jax
import numpy as np

from jax_megamoe.config import Activation, MegaMoEConfig

try:
    from jax_megamoe import _native as native
except ImportError as error:  # The tree was not built, or for another Python.
    raise ImportError(
        "jax_megamoe: the native module is missing or does not fit this Python "
        f"({error}). Install the package with `pip install .`; a C++20 compiler is all it needs."
    ) from error

__version__ = native.VERSION

#: The name has the contract's version, so that a cached program never meets other handlers.
TARGET = "jax_megamoe.mega_moe.v3"


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to pass as ``disabled_checks`` to `jax.export.export` for programs that call the layer.

    JAX exports custom calls only when told that their contract is stable. The target's name carries
    a version, so a program exported under another contract is refused instead of run. To serialise
    what it exports, JAX needs flatbuffers: ``pip install 'jax-megamoe[export]'``.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


def granularity_number(config: MegaMoEConfig) -> int:
    """The native module's number for config.activation_granularity: 32, 128, or 0 for rows."""
    return 0 if config.x_group == "row" else int(config.x_group)


def activation_number(activation: Activation) -> int:
    """The native module's number for an activation."""
    return native.ACTIVATIONS.index(activation.kind)


def activation_params(activation: Activation) -> np.ndarray:
    """[4] float32: ActivationParams of cc/protocol/activation.h. What the kind lacks is 1."""
    limit = np.inf if activation.limit is None else activation.limit
    others = (activation.alpha, activation.beta, activation.linear_beta)
    return np.array([limit, *(1 if value is None else value for value in others)], np.float32)
