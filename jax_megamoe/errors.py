"""One shape for every message: operand, what was given, what is supported, what to do."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "Array",
    "MegaMoEError",
    "as_array",
    "check",
    "check_array",
    "check_bool",
    "check_positive_int",
    "describe",
    "is_array",
    "narrow_ids",
    "refuse",
    "spell_shape",
    "to_float",
    "to_int",
]

#: What `is_array` recognises as an array.
Array = jax.Array | np.ndarray


class MegaMoEError(ValueError):
    """A mistake in shapes, dtypes, ranges or meshes, found before anything runs."""


def refuse(operand: str, *, got: object, want: str, remedy: str) -> NoReturn:
    """Raises `MegaMoEError` with operand, got, want and remedy.

    Where nothing but a refusal can follow, or what follows needs the type that was checked, this is
    called; `check` is for a condition among others.
    """
    first = remedy.split()[0]
    if first == "a" or (first.isalpha() and len(first) > 1):  # It is a word, not a name such as x.
        remedy = remedy[0].upper() + remedy[1:]
    raise MegaMoEError(f"jax_megamoe: {operand}: got {got}; expected {want}. {remedy}.")


def check(condition: bool, operand: str, *, got: object, want: str, remedy: str) -> None:
    """`refuse`, unless `condition` holds."""
    if not condition:
        refuse(operand, got=got, want=want, remedy=remedy)


def is_array(value: object) -> bool:
    """Whether JAX takes `value` as an array: its own arrays, tracers, and NumPy's arrays."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and not isinstance(
        value, np.ma.MaskedArray
    )


def as_array(value: Any) -> Any:
    """`value`, or the array inside it if it is a parameter of a neural-network library."""
    if not is_array(value) and hasattr(value, "__jax_array__"):
        return value.__jax_array__()
    return value


def narrow_ids(ids: Any) -> Any:
    """NumPy's int64 ids as int32, if JAX would drop their upper halves: it does without x64.

    An id that does not fit becomes the nearest one that does, which is no expert's and no token's.
    """
    if not isinstance(ids, (np.ndarray, np.generic)) or ids.dtype != np.int64:
        return ids
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return ids
    bounds = np.iinfo(np.int32)
    return ids.clip(bounds.min, bounds.max).astype(np.int32)


def describe(value: object) -> str:
    """What was passed, for a message: dtype and shape of an array, otherwise type and value."""
    if is_array(value):
        return f"{value.dtype}{list(value.shape)}"  # type: ignore[attr-defined]
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{value!r}, a {type(value).__name__}".replace(", a int", ", an int")
    if isinstance(value, (list, tuple, dict)) and not hasattr(value, "_fields"):
        kind = type(value).__name__
        return f"{kind} of {len(value)}" if value else f"an empty {kind}"
    name = type(value).__name__
    if type(value).__module__ != "builtins":
        name = f"{type(value).__module__.partition('.')[0]}.{name}"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return name
    return f"{name} {dtype}{list(shape)}"


def spell_shape(shape: tuple[object, ...]) -> str:
    """("...", 128) -> "[..., 128]"."""
    return "[" + ", ".join(str(d) for d in shape) + "]"


def check_array(
    array: object,
    operand: str,
    shape: tuple[object, ...],
    dtypes: tuple[str, ...],
    remedy: str,
    *,
    cast: str | None = None,
    where: str = "",
) -> None:
    """Checks that `array` is an array, its dtype and its shape, in this order.

    Args:
      array: what was passed.
      operand: its name.
      shape: wanted; a str is a free dimension with that name, "..." at the start one or more.
      dtypes: wanted, one of them.
      remedy: for a wrong shape.
      cast: the remedy for a wrong dtype; None finds one.
      where: what follows the wanted shape, such as " on each rank".
    """
    want = f"{' or '.join(dtypes)} {spell_shape(shape)}{where}"
    got = describe(array)
    if not is_array(array):
        refuse(operand, got=got, want=want, remedy=_conversion(array, dtypes[0]))
    dtype, own_shape = array.dtype, array.shape  # type: ignore[attr-defined]
    if str(dtype) not in dtypes:
        refuse(operand, got=got, want=want, remedy=cast or _cast(dtype, dtypes[0]))
    last = shape
    if shape and shape[0] == "...":
        last = shape[1:]
        fits = len(own_shape) >= len(shape)
        own_shape = own_shape[len(own_shape) - len(last) :]
    else:
        fits = len(own_shape) == len(shape)
    fits = fits and all(
        isinstance(want_d, str) or got_d == want_d
        for got_d, want_d in zip(own_shape, last, strict=True)
    )
    check(fits, operand, got=got, want=want, remedy=remedy)


def _conversion(value: object, dtype: str) -> str:
    """Remedy for something that is not an array."""
    if value is None:
        return "this operand cannot be left out"
    if isinstance(value, jax.ShapeDtypeStruct):
        return (
            "a ShapeDtypeStruct holds no values: pass it to jax.eval_shape or to the lower method "
            "of a jitted function, and an array here"
        )
    if isinstance(value, np.ma.MaskedArray):
        return "the mask would be lost: pass value.filled(...), a plain array"
    if isinstance(value, (dict, str, bytes, type)) or callable(value):
        return "pass a jax or numpy array; look whether the operands are in the right order"
    return f"pass a jax or numpy array, for instance jnp.asarray(..., jnp.{dtype})"


def _kind(dtype: Any) -> str:
    for kind in ("floating", "integer", "bool_"):
        if jnp.issubdtype(dtype, getattr(jnp, kind)):
            return kind
    return "other"


def _cast(dtype: Any, want: str) -> str:
    """Remedy for an array of another dtype."""
    if str(dtype) == "int8" and want == "uint8":
        return "reinterpret the bytes with .view(jnp.uint8)"
    own, wanted = _kind(dtype), _kind(jnp.dtype(want))
    # Numbers of one byte have scales in another array.
    narrow = own == "floating" and jnp.dtype(dtype).itemsize == 1
    if own == wanted and not narrow:
        return f"cast it with .astype(jnp.{want})"
    return "look whether the operands are in the right order, and where this one comes from"


def check_positive_int(value: object, operand: str, owner: str, most: int | None = None) -> int:
    """A static positive whole number as a Python int; `owner` is what it was passed to.

    Anything that Python takes for an index is one: ints, NumPy's integers. A bool is not.

    Raises:
      MegaMoEError: something else, or a number below 1 or above `most`.
    """
    number = to_int(value)
    if number is None or number <= 0:
        refuse(
            operand,
            got=repr(value),
            want="a positive int",
            remedy=f"{owner} takes static whole numbers; use int(...) on others",
        )
    check(
        most is None or number <= most,
        operand,
        got=number,
        want=f"at most {most}",
        remedy="no kernel counts further",
    )
    return number


def to_int(value: object) -> int | None:
    """A static whole number as a Python int; None for a bool or anything else."""
    if not _is_bool(value):
        with contextlib.suppress(TypeError):  # A tracer raises a subclass of it.
            return operator.index(value)  # type: ignore[arg-type]
    return None


def to_float(value: object) -> float | None:
    """A static real number as a Python float; None for a bool, text, arrays, or what overflows."""
    if _is_bool(value) or isinstance(value, (str, bytes)) or getattr(value, "ndim", 0) != 0:
        return None
    if getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def check_bool(value: object, operand: str, remedy: str = "convert it with bool(...)") -> bool:
    """True or False as a Python bool, NumPy's included. 0 and 1 are refused: they equal bools.

    Equal values share an entry in every cache, so an int in place of a bool would stay there.
    """
    check(
        _is_bool(value),
        operand,
        got=describe(value),
        want="True or False",
        remedy=remedy,
    )
    return bool(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))
