"""One shape for every message: operand, what was given, what is supported, what to do."""

from __future__ import annotations


class MegaMoEError(ValueError):
    """A mistake in shapes, dtypes, ranges or meshes, found before anything runs."""


def check(condition: bool, operand: str, *, got: object, want: str, remedy: str) -> None:
    """Raises `MegaMoEError` with operand, got, want and remedy unless `condition` holds."""
    if not condition:
        first = remedy.split()[0]
        if first.isalpha() and len(first) > 1:  # a word, not a name such as x or layer.shard
            remedy = remedy[0].upper() + remedy[1:]
        raise MegaMoEError(f"jax_megamoe: {operand}: got {got}; expected {want}. {remedy}.")


def check_array(
    array: object, operand: str, shape: tuple[object, ...], dtypes: tuple[str, ...], remedy: str
) -> None:
    """Checks an array's shape and dtype; a str in `shape` is a free dimension with that name."""
    got_dtype, got_shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    spelled = "[" + ", ".join(str(d) for d in shape) + "]"
    want = f"{' or '.join(dtypes)} {spelled}"
    if got_shape is None:
        got, fits = type(array).__name__, False
    else:
        got = f"{got_dtype}{list(got_shape)}"
        fits = len(got_shape) == len(shape) and all(
            isinstance(want_d, str) or got_d == want_d
            for got_d, want_d in zip(got_shape, shape, strict=True)
        )
    check(fits and str(got_dtype) in dtypes, operand, got=got, want=want, remedy=remedy)


def check_positive_int(value: object, operand: str, owner: str) -> None:
    """Raises `MegaMoEError` unless `value` is a positive int; `owner` is what it was passed to."""
    check(
        isinstance(value, int) and not isinstance(value, bool) and value > 0,
        operand,
        got=repr(value),
        want="a positive int",
        remedy=f"{owner} takes static Python ints; use int(...) on numpy scalars",
    )
