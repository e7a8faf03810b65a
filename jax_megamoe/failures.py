"""Failures of calls on GPUs, which are found after the call has returned.

XLA gives a custom call on a GPU no way to fail after it has been launched, short of waiting for the
kernel on the host. So a thread of the native module looks at the kernels' reports, and a failure
reaches the user in whichever of these ways comes first, once:

* `check_failures` (or `MegaMoE.check_failures`) raises it;
* the next launch of the layer's kernel on these buffers raises it as `JaxRuntimeError`, on all
  ranks, and so do later calls of the program that failed;
* the main thread raises it between two byte codes, wherever it is.

The report is also printed to stderr at once.
"""

from __future__ import annotations

import functools

from jax_megamoe._ffi import native

__all__ = ["MegaMoERuntimeError", "check_failures", "raise_in_main_thread"]


class MegaMoERuntimeError(RuntimeError):
    """A call on GPUs failed after it was launched: a timeout, or a value that was refused.

    The message is the report: rank, SM, role, counter and its writer, the value wanted and the
    value seen. After a timeout no result of the call can be used; where a value was refused, that
    rank's results are NaN. The next call works.
    """


def check_failures() -> None:
    """Raises `MegaMoERuntimeError` if a call on GPUs failed and nobody has been told of it yet.

    A call that is still running may fail later; wait for its results first. On CPU, failures come
    with the results, and this does nothing.
    """
    texts = native.take_gpu_failures()
    if texts:
        raise MegaMoERuntimeError("\n".join(texts))


@functools.cache
def raise_in_main_thread() -> None:
    """From now on failures are raised in the main thread if they are not told before."""
    native.on_gpu_failure(check_failures)
