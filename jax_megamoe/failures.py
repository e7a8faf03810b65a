"""Failures of calls on GPUs, which are found after the call has returned.

XLA gives a custom call on a GPU no way to fail after it has been launched, short of waiting for the
kernel on the host. So a thread of the native module looks at the kernels' reports, and `on_failure`
says what becomes of a report at once: a log record, a call of a function, or an exception in the
main thread. Whatever that is, the next place that can fail does, once, whichever comes first:

* `check_failures` (or `MegaMoE.check_failures`) raises it;
* the next launch of the layer's kernel on these buffers raises it as `JaxRuntimeError`, on all
  ranks, and so do later calls of the program that failed.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Literal

from jax_megamoe._ffi import native
from jax_megamoe.errors import check, describe

__all__ = [
    "MegaMoERuntimeError",
    "OnFailure",
    "check_failures",
    "listen",
    "on_failure",
    "shut_down",
]

logger = logging.getLogger("jax_megamoe")


class MegaMoERuntimeError(RuntimeError):
    """A call on GPUs failed after it was launched: a timeout, or a value that was refused.

    The message is the report: rank, SM, role, counter and its writer, the value wanted and the
    value seen. After a timeout no result of the call can be used; where a value was refused, that
    rank's results are NaN. The next call works.
    """


#: What `on_failure` takes.
OnFailure = Literal["log", "raise"] | Callable[[MegaMoERuntimeError], object]

_how: OnFailure = "log"
_PATIENCE_S = 5.0


def on_failure(how: OnFailure) -> OnFailure:
    """Chooses what happens when a call on GPUs has failed, for all layers of the process.

    Args:
      how: "log", the default: a record of level ERROR of the logger ``jax_megamoe``, which Python
        writes to stderr where logging is not configured. "raise": the record, and
        `MegaMoERuntimeError` in the main thread between two byte codes, wherever it is, unless
        `check_failures` or a launch has raised the failure before. Or a function that gets the
        `MegaMoERuntimeError`; it is called in a thread of its own, and may call whatever other
        threads may. What it raises is logged.

    Returns:
      What had been chosen before.

    On CPU a call that fails raises its error with its results, and none of this happens.

    Raises:
      MegaMoEError: `how` is none of these.
    """
    global _how
    check(
        how in ("log", "raise") if isinstance(how, str) else callable(how),
        "how",
        got=describe(how),
        want="'log', 'raise' or a function of one argument",
        remedy="the function gets a MegaMoERuntimeError",
    )
    before, _how = _how, how
    return before


def check_failures() -> None:
    """Raises `MegaMoERuntimeError` if a call on GPUs failed and nothing has raised that yet.

    A call that is still running may fail later; wait for its results first. On CPU, failures come
    with the results, and this does nothing.
    """
    texts = native.take_gpu_failures()
    if texts:
        raise MegaMoERuntimeError("\n".join(texts))


def _tell(text: str) -> None:
    how = _how
    if callable(how):
        try:
            how(MegaMoERuntimeError(text))
        except BaseException:  # The next report needs this thread.
            logger.exception("the function that on_failure was given failed; its report: %s", text)
        return
    logger.error("%s", text)
    if how == "raise" and not native.call_in_main_thread(check_failures):
        logger.error("the main thread has too much to do; the failure is not raised there")


def _listen() -> None:
    while (text := native.wait_gpu_report()) is not None:
        try:
            _tell(text)
        except BaseException:  # of a filter or handler of the user's logging
            traceback.print_exc()
            print(text, file=sys.stderr)


@functools.cache
def listen() -> threading.Thread:
    """The thread that hears of failures, started by the first call."""
    # It is a daemon, because Python waits for other threads before it calls `shut_down`.
    thread = threading.Thread(target=_listen, name="jax_megamoe failures", daemon=True)
    thread.start()
    return thread


def shut_down() -> None:
    """At the end of the process: no kernel waits any longer, and the thread of `listen` ends."""
    native.shut_down_gpu()
    if listen.cache_info().currsize:
        # The interpreter must not end while the thread is in native code. If a function of the
        # user's holds it up, it is not.
        listen().join(_PATIENCE_S)
