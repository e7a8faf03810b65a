"""MegaMoEConfig: every refusal says operand, got, expected and remedy."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_megamoe.config import (
    GRANULARITIES,
    MAX_RANKS,
    MAX_ROWS,
    MAX_TOP_K,
    Activation,
    MegaMoEConfig,
    gpt_oss_swiglu,
    situ,
    swiglu,
)
from jax_megamoe.errors import MegaMoEError, check, check_array, describe

SITU = ("beta", "linear_beta")
GOOD = {
    "num_experts": 64,
    "top_k": 6,
    "hidden": 256,
    "intermediate": 128,
    "max_tokens_per_rank": 512,
}


def refused(call, operand: str, got: str, want: str, remedy: str) -> None:
    with pytest.raises(MegaMoEError) as error:
        call()
    text = str(error.value)
    assert text.lower() == f"jax_megamoe: {operand}: got {got}; expected {want}. {remedy}.".lower()
    assert f"; expected {want}. " in text and f"{operand}: got {got};" in text
    assert isinstance(error.value, ValueError)


def refused_config(changes: dict, operand: str, got: str, want: str, remedy: str) -> None:
    refused(lambda: MegaMoEConfig(**{**GOOD, **changes}), operand, got, want, remedy)


def test_defaults():
    config = MegaMoEConfig(**GOOD)
    assert config.activation == Activation("swiglu", None)
    assert config.ring_tokens is None and config.timeout_s == 300.0 and config.checked is True


def test_is_a_static_value():
    config = MegaMoEConfig(**GOOD, activation=swiglu(10))
    same = MegaMoEConfig(**GOOD, activation=swiglu(10.0))
    assert config == same and hash(config) == hash(same)
    assert config != dataclasses.replace(config, checked=False)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden = 128


NOT_INTS = [0, -1, 128.0, True, np.True_, None, "128", np.float32(128), np.ones(2, int), 1j]


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("value", NOT_INTS, ids=repr)
def test_sizes_are_positive_ints(name, value):
    refused_config(
        {name: value},
        name,
        repr(value),
        "a positive int",
        "MegaMoEConfig takes static whole numbers; use int(...) on others",
    )


@pytest.mark.parametrize("name", ["num_experts", "hidden", "intermediate"])
def test_sizes_are_blamed_on_their_own_field(name):
    for value in (2**20 + 32, 2**31, 2**64):
        refused_config(
            {name: value}, name, str(value), "at most 1048576", "no kernel counts further"
        )
    assert getattr(MegaMoEConfig(**{**GOOD, name: 2**20}), name) == 2**20


def test_numbers_of_numpy_are_kept_as_those_of_python():
    """Configs are keys of caches: what compares equal has to be the same in every respect."""
    numbers = {name: np.int64(value) for name, value in GOOD.items()}
    config = MegaMoEConfig(
        **numbers,
        activation=gpt_oss_swiglu(np.float32(1.5), np.int32(7)),
        activation_granularity=np.uint8(128),
        ring_tokens=np.int16(64),
        timeout_s=np.float32(2),
        checked=np.False_,
    )
    same = MegaMoEConfig(
        **GOOD,
        activation=gpt_oss_swiglu(1.5, 7.0),
        activation_granularity=128,
        ring_tokens=64,
        timeout_s=2.0,
        checked=False,
    )
    assert config == same and hash(config) == hash(same) and repr(config) == repr(same)
    for field in dataclasses.fields(config):
        assert type(getattr(config, field.name)) is type(getattr(same, field.name)), field.name
    for name in ("limit", "alpha"):
        assert type(getattr(config.activation, name)) is float
    row = MegaMoEConfig(**GOOD, activation_granularity=np.str_("row")).activation_granularity
    assert row == "row" and type(row) is str


@pytest.mark.parametrize(
    "value", [0, 1, 1.0, "True", None, np.int32(1), np.ones(1, bool)], ids=repr
)
def test_checked_is_a_bool(value):
    want, remedy = "True or False", "convert it with bool(...)"
    refused_config({"checked": value}, "checked", describe(value), want, remedy)


@pytest.mark.parametrize("num_experts, top_k", [(64, MAX_TOP_K + 1), (4, 5)])
def test_top_k_limit(num_experts, top_k):
    refused_config(
        {"num_experts": num_experts, "top_k": top_k},
        "top_k",
        str(top_k),
        f"at most min({MAX_TOP_K}, num_experts={num_experts})",
        "a token cannot use more expert slots than that",
    )
    assert MegaMoEConfig(**{**GOOD, "num_experts": num_experts, "top_k": top_k - 1})


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("value, padded", [(1, 32), (31, 32), (129, 160), (2879, 2880)])
def test_widths_are_multiples_of_32(name, value, padded):
    refused_config(
        {name: value},
        name,
        str(value),
        "a multiple of 32",
        f"pad weights and activations with zeros to {padded}",
    )
    assert MegaMoEConfig(**{**GOOD, name: padded})


@pytest.mark.parametrize("value, padded", [(32, 128), (128, 128), (160, 256), (2880, 2944)])
def test_padded_widths(value, padded):
    config = MegaMoEConfig(**{**GOOD, "hidden": value})
    assert (config.padded_hidden, config.padded_intermediate) == (padded, 128)
    config = MegaMoEConfig(**{**GOOD, "intermediate": value})
    assert (config.padded_hidden, config.padded_intermediate) == (256, padded)


@pytest.mark.parametrize("value", [0, 16, 64, 32.0, "128", "rows", None, True, [32]], ids=repr)
def test_activation_granularity(value):
    refused_config(
        {"activation_granularity": value},
        "activation_granularity",
        repr(value),
        "one of (32, 128, 'row')",
        "32 is exactly MXFP8; 128 and 'row' run on FP8 tensor cores",
    )


def test_groups_of_a_granularity():
    groups = {}
    for granularity in GRANULARITIES:
        config = MegaMoEConfig(**GOOD, activation_granularity=granularity)
        groups[granularity] = (config.x_group, config.act_group)
    assert groups == {32: (32, 32), 128: (128, 128), "row": ("row", 128)}
    assert MegaMoEConfig(**GOOD).activation_granularity == 32


def test_activation_type():
    refused_config(
        {"activation": "swiglu"},
        "activation",
        "str",
        "a jax_megamoe.Activation",
        "use jax_megamoe.swiglu, gpt_oss_swiglu or situ",
    )


def test_activation_kind():
    refused(
        lambda: Activation("gelu"),
        "activation.kind",
        "'gelu'",
        "one of ('swiglu', 'gpt_oss_swiglu', 'situ')",
        "use jax_megamoe.swiglu, gpt_oss_swiglu or situ; no other activation is implemented",
    )


@pytest.mark.parametrize(
    ("build", "name", "got"),
    [
        (lambda: gpt_oss_swiglu(alpha=0), "alpha", "0"),
        (lambda: gpt_oss_swiglu(limit=math.inf), "limit", "inf"),
        (lambda: gpt_oss_swiglu(limit=None), "limit", "None"),
        (lambda: Activation("gpt_oss_swiglu", None, 1.702), "limit", "None"),
        (lambda: gpt_oss_swiglu(alpha=3e38), "alpha", "3e+38"),
        (lambda: gpt_oss_swiglu(alpha=1e-46), "alpha", "1e-46"),
        (lambda: situ(beta=-4), "beta", "-4"),
        (lambda: situ(4, None), "linear_beta", "None"),
        (lambda: situ(4, True), "linear_beta", "True"),
        (lambda: situ(beta="4"), "beta", "'4'"),
        (lambda: situ(beta=10**400), "beta", repr(10**400)),
        (lambda: situ(linear_beta=math.nan), "linear_beta", "nan"),
        (lambda: Activation("situ", beta=4.0), "linear_beta", "None"),
    ],
)
def test_activation_parameters(build, name, got):
    kind = "situ" if "beta" in name else "gpt_oss_swiglu"
    remedy = f"see jax_megamoe.{kind} for the values of published models"
    refused(build, f"activation.{name}", got, "a number from 1e-30 to 1e+30", remedy)


@pytest.mark.parametrize(
    ("build", "name", "got", "kind", "parameters"),
    [
        (lambda: Activation("swiglu", alpha=1.5), "alpha", "1.5", "swiglu", ("limit",)),
        (lambda: Activation("situ", 7.0, None, 4.0, 25.0), "limit", "7.0", "situ", SITU),
    ],
)
def test_parameters_of_another_activation(build, name, got, kind, parameters):
    want = f"None: {kind!r} has the parameters {parameters}"
    refused(build, f"activation.{name}", got, want, f"use jax_megamoe.{kind}")


LIMITS = [0.0, -1.0, math.inf, -math.inf, math.nan, 1e39, 1e-40, "x", True, 1j, np.ones(1)]


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_activation_limit(limit):
    refused(
        lambda: swiglu(limit),
        "activation.limit",
        repr(limit),
        "None or a number from 1e-30 to 1e+30",
        "pass None to leave gate and up unclamped",
    )


def test_swiglu():
    assert swiglu() == Activation("swiglu", None)
    assert swiglu(limit=10).limit == 10.0 and isinstance(swiglu(10).limit, float)
    assert isinstance(swiglu(np.float32(0.5)).limit, float)


def test_activations_of_published_models():
    assert gpt_oss_swiglu() == Activation("gpt_oss_swiglu", limit=7.0, alpha=1.702)
    assert situ() == Activation("situ", beta=4.0, linear_beta=25.0)
    assert len({swiglu(), swiglu(7), gpt_oss_swiglu(), situ(), situ(4, 25)}) == 4


def test_row_limit():
    refused_config(
        {"max_tokens_per_rank": 2**30},
        "max_tokens_per_rank * top_k",
        str(6 * 2**30),
        f"at most {MAX_ROWS}",
        "split the batch into several calls",
    )
    assert MegaMoEConfig(**{**GOOD, "max_tokens_per_rank": MAX_ROWS, "top_k": 1})


@pytest.mark.parametrize("value", [0, -128, 1.5, "128", True], ids=repr)
def test_ring_tokens(value):
    refused_config(
        {"ring_tokens": value},
        "ring_tokens",
        repr(value),
        "a positive int",
        "MegaMoEConfig takes static whole numbers; use int(...) on others",
    )
    refused_config(
        {"ring_tokens": 2**64},
        "ring_tokens",
        str(2**64),
        f"at most {MAX_ROWS}",
        "no kernel counts further",
    )
    assert MegaMoEConfig(**GOOD, ring_tokens=1).ring_tokens == 1


TIMEOUTS = [0, -1.0, 1e-10, 1.1e6, math.inf, math.nan, None, "5", True, 10**400]


@pytest.mark.parametrize("value", TIMEOUTS, ids=repr)
def test_timeout(value):
    refused_config(
        {"timeout_s": value},
        "timeout_s",
        repr(value),
        "seconds from 0.001 to 1e+06",
        "a wait without an end is not offered, and a shorter one fails calls in which nothing is "
        "wrong",
    )
    assert MegaMoEConfig(**GOOD, timeout_s=1).timeout_s == 1


# Ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [0, -1, MAX_RANKS + 1])
def test_number_of_ranks(num_ranks):
    refused(
        lambda: MegaMoEConfig(**GOOD).local_experts(num_ranks),
        "number of expert-parallel ranks",
        str(num_ranks),
        f"1 to {MAX_RANKS}",
        "use a shorter mesh axis for expert parallelism",
    )


def test_ranks_divide_experts():
    refused(
        lambda: MegaMoEConfig(**GOOD).local_experts(3),
        "num_experts",
        "64 on 3 ranks",
        "a multiple of the size of the expert-parallel axis",
        "choose an axis size that divides num_experts, or pad with unused experts",
    )


def test_rows_over_all_ranks():
    config = MegaMoEConfig(**{**GOOD, "max_tokens_per_rank": 2**28})
    assert config.local_experts(1) == 64
    refused(
        lambda: config.local_experts(2),
        "ranks * max_tokens_per_rank * top_k",
        str(2 * 2**28 * 6),
        f"at most {MAX_ROWS}",
        "split the batch into several calls",
    )


@given(st.integers(1, 512), st.integers(-2, 80), st.integers(1, 2**27), st.integers(1, MAX_TOP_K))
def test_local_experts_is_an_even_split_or_an_error(num_experts, num_ranks, max_tokens, top_k):
    top_k = min(top_k, num_experts)
    changes = {"num_experts": num_experts, "top_k": top_k, "max_tokens_per_rank": max_tokens}
    if max_tokens * top_k > MAX_ROWS:
        with pytest.raises(MegaMoEError):
            MegaMoEConfig(**{**GOOD, **changes})
        return
    config = MegaMoEConfig(**{**GOOD, **changes})
    fits = (
        1 <= num_ranks <= MAX_RANKS
        and num_experts % num_ranks == 0
        and num_ranks * max_tokens * top_k <= MAX_ROWS
    )
    if fits:
        local = config.local_experts(num_ranks)
        assert isinstance(local, int) and local >= 1 and local * num_ranks == num_experts
    else:
        with pytest.raises(MegaMoEError):
            config.local_experts(num_ranks)


# The message itself ------------------------------------------------------------------------------


def test_check():
    check(True, "x", got=1, want="2", remedy="r")
    refused(lambda: check(False, "x", got=1, want="2", remedy="do that"), "x", "1", "2", "do that")


def test_check_array():
    array = np.zeros((2, 3), np.float32)
    check_array(array, "x", (2, "columns"), ("float32", "bfloat16"), "r")
    want = "float32 or bfloat16 [2, columns]"
    dtypes = ("float32", "bfloat16")
    for bad, got, remedy in (
        (array[0], "float32[3]", "transpose it"),
        (np.zeros((3, 3), np.float32), "float32[3, 3]", "transpose it"),
        (array.astype(np.float64), "float64[2, 3]", "cast it with .astype(jnp.float32)"),
        (
            [[0.0]],
            "list of 1",
            "pass a jax or numpy array, for instance jnp.asarray(..., jnp.float32)",
        ),
        (None, "None", "this operand cannot be left out"),
    ):
        refused(
            lambda bad=bad: check_array(bad, "x", (2, "columns"), dtypes, "transpose it"),
            "x",
            got,
            want,
            remedy,
        )
