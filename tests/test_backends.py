"""A back end is one record: a third one works everywhere, and nobody compares names.

The third one computes as the CPU's does, under a name, a weight layout and a key of its own.
"""

import ast
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from jax_megamoe import _backends
from jax_megamoe._ffi import native
from jax_megamoe.cli import main
from jax_megamoe.symmetric import moe_shape
from moe_case import Case, mesh_of

ROOT = Path(__file__).parents[1]
CONFIG = jmm.MegaMoEConfig(
    num_experts=4, top_k=2, hidden=128, intermediate=128, max_tokens_per_rank=8, timeout_s=60.0
)


@dataclasses.dataclass(frozen=True)
class Toy(_backends.CpuBackend):
    """Compiles kernels, or says so: the numbers of their tiles are numbers of tokens."""

    compiled: list = dataclasses.field(default_factory=list, hash=False)

    def key_parts(self, config):
        return [self.name, "made up"]

    def call_attributes(self, config, shape, rows, bias):
        return {"toy": f"{rows} rows{' and biases' * bias}"}

    def tiles(self, config):
        return [{"block_m": 8}, {"block_m": 16}]

    def select_tile(self, config, shape, rows):
        return int(rows > 4)

    def kernel_options(self, config, shape, tile, bias, activation=""):
        return [f"-DTILE={tile}", "-DBIAS" * bias, f"-D{activation or config.activation.kind}"]

    def compile_to_cache(self, config, shape, tile, bias):
        self.compiled.append(tuple(self.kernel_options(config, shape, tile, bias)))

    def load_kernel(self, key, config, tile, bias):
        self.compiled.append((key, tile, bias))

    def availability(self, num_devices):
        return f"on {num_devices} devices"

    @property
    def nothing_to_compile(self):
        return ""


def record(kind=Toy, **fields):
    common = {field.name: getattr(_backends.CPU, field.name) for field in FIELDS}
    own = {"name": "toy", "device_kinds": ("Toy 1",), "layouts": {32: "sm90_bf16"}}
    return kind(**common | own | fields)


FIELDS = dataclasses.fields(_backends.CPU)


@pytest.fixture
def registered(monkeypatch):
    """Registers a record until the test ends; `alone`: all others are forgotten meanwhile."""

    def register(backend, alone=False):
        known = {} if alone else dict(_backends._REGISTRY)
        monkeypatch.setattr(_backends, "_REGISTRY", known)
        return _backends.register(backend)

    return register


def test_a_program_of_a_third_back_end(registered):
    """Conversion of weights, key and attributes come from the record, without a device."""
    toy = registered(record())
    mesh = AbstractMesh((2,), ("ep",))
    layer = jmm.MegaMoE(CONFIG, mesh, backend="toy")
    assert layer.backend == "toy" and layer._site.buffer_key.startswith("moe-toy-r2-e4")
    case = Case(np.random.default_rng(1), CONFIG, 2, 8, "masked")
    case.add_biases(np.random.default_rng(2))
    sharding = NamedSharding(mesh, P("ep"))
    weights = jax.eval_shape(layer.shard, case.weights)
    assert weights.layout == "sm90_bf16"
    operands, weights = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        (tuple(case.operands), weights),
    )

    def loss(x, *rest):
        return jnp.sum(layer(x, *rest).astype(jnp.float32) ** 2)

    for function in (layer, jax.grad(loss)):
        lowered = jax.jit(function).trace(*operands, weights).lower(lowering_platforms=("cpu",))
        text = lowered.as_text()
        assert layer._site.buffer_key in text and "8 rows and biases" in text
    assert layer.warm_up() == 2 and [options[0] for options in toy.compiled] == [
        "-DTILE=0",
        "-DTILE=1",
    ]
    assert layer.warm_up(3, bias=True) == 1 and "-DBIAS" in toy.compiled[-1]


@dataclasses.dataclass(frozen=True)
class ToyCpu(_backends.CpuBackend):
    """The CPU's handlers run its programs, so calls have no attribute of its own."""

    def key_parts(self, config):
        return [self.name]


def test_a_layer_runs_on_a_third_back_end(registered):
    case = Case(np.random.default_rng(3), CONFIG, 2, 8, "masked")
    with jmm.MegaMoE(CONFIG, mesh_of(2)) as layer:
        want = layer(*case.operands, layer.shard(case.weights))
    registered(record(ToyCpu, layouts={32: "cpu"}), alone=True)
    with jmm.MegaMoE(CONFIG, mesh_of(2)) as layer:
        assert layer.backend == "toy" and layer.buffer.backend == "toy"
        assert layer.buffer.key in native.buffer_keys() and "-toy-" in layer.buffer.key
        got = layer(*case.operands, layer.shard(case.weights))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert np.abs(np.asarray(got, np.float32)).max() > 0


def test_buffers_of_a_third_back_end(registered):
    with pytest.raises(jmm.MegaMoEError, match=r"one of \('cpu', 'sm_90a'\)"):
        jmm.buffer_bytes(CONFIG, 2, "toy")
    registered(record())
    assert jmm.buffer_bytes(CONFIG, 2, "toy") == moe_shape(CONFIG, 2).num_bytes
    assert len(jmm.buffer_regions(CONFIG, 2, "toy")) > 10
    with pytest.raises(jmm.MegaMoEError, match=r"one of \('cpu', 'sm_90a', 'toy'\)"):
        jmm.buffer_bytes(CONFIG, 2, "play")


def test_commands_know_a_third_back_end(registered, tmp_path, capsys, monkeypatch):
    registered(record())
    path = tmp_path / "info.json"
    assert main(["info", "--backend", "toy", "--tokens", "64", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["backend"] == "toy" and content["backends"]["toy"] == "on 0 devices"
    assert {row["backend"] for row in content["buffer_bytes"]} == {"cpu", "sm_90a", "toy"}
    compiled = []

    def compile_kernel(include_dir, options, nvrtc):
        compiled.append(options)
        raise RuntimeError("no compiler for toys")

    monkeypatch.setattr(native, "compile_kernel", compile_kernel)
    assert main(["compile", "--arch", "toy", "--granularity", "32", "--bias"]) == 1
    assert compiled == [[f"-DTILE={tile}", "-DBIAS", "-Dswiglu"] for tile in (0, 1)]
    assert "no compiler for toys" in capsys.readouterr().out
    assert main(["compile", "--arch", "sm_100a"]) == 2
    assert "expected toy or sm_90a or cpu" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    compute_capability: str = ""
    device_kind: str = "NVIDIA Test"


def test_devices_of_another_capability(registered):
    """A second GPU architecture is a record beside the first."""
    device = Device("gpu", "10.0", "NVIDIA B200")
    with pytest.raises(jmm.MegaMoEError, match=r"sm_100\); .* 9\.0 \(H100, H200, GH200\)\."):
        _backends.device_backend(device)
    assert _backends.abstract_backend(device) is None
    fields = {"name": "next", "capability": "10.0", "device_kinds": ("B200", "GB200")}
    registered(dataclasses.replace(_backends.SM_90A, **fields))
    assert _backends.device_backend(device) == _backends.abstract_backend(device) == "next"
    assert _backends.device_backend(Device("gpu", "9.0")) == "sm_90a"
    assert _backends.abstract_backend(Device("gpu", "", "NVIDIA H200")) == "sm_90a"
    with pytest.raises(jmm.MegaMoEError, match=r"9\.0 \(H.*\) or 10\.0 \(B200, GB200\)\. Use"):
        _backends.device_backend(Device("gpu", "8.0"))


def test_devices_of_another_platform(registered):
    with pytest.raises(jmm.MegaMoEError, match=r"'tpu'; expected 'cpu' or 'gpu'\. Build"):
        _backends.device_backend(Device("tpu"))
    registered(record(platforms=("tpu",)))
    assert _backends.device_backend(Device("tpu")) == "toy"
    wanted = r"expected 'cpu' or 'gpu' or 'tpu'\..*jax\.devices\('tpu'\)"
    with pytest.raises(jmm.MegaMoEError, match=wanted):
        _backends.device_backend(Device("rocm"))


def test_what_does_not_fit_the_registry(registered):
    with pytest.raises(AssertionError, match="cpu"):
        registered(_backends.CPU)
    with pytest.raises(AssertionError, match="two kinds of handlers for cpu"):
        registered(record(handlers=dict))


# ---- no names outside the records ----

#: Other things that are called "cpu": a layout, a platform, a kind of measurement.
OTHER_NAMES = {"layout", "platform"}


def named_backends(source: str) -> list[str]:
    """Lines of a module that name a GPU back end, or branch on the name of any."""
    known = {*_backends.names(), *_backends.UNSUPPORTED}
    gpus = known - {_backends.CPU.name}
    found = []
    for node in ast.walk(ast.parse(source)):
        strings = [one for one in ast.walk(node) if isinstance(one, ast.Constant)]
        if isinstance(node, ast.Constant) and node.value in gpus:
            found.append(f"{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Compare) and any(one.value in known for one in strings):
            other = ast.unparse(node.left).rpartition(".")[2]
            if other not in OTHER_NAMES:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.MatchValue) and any(one.value in known for one in strings):
            found.append(f"{node.lineno}: case {ast.unparse(node)}")
    return found


def test_only_records_name_back_ends():
    paths = [*(ROOT / "jax_megamoe").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert len(paths) > 30
    lines = {
        str(path.relative_to(ROOT)): named_backends(path.read_text())
        for path in paths
        if path.name != "_backends.py"
    }
    assert {path: found for path, found in lines.items() if found} == {}


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ('if self.backend == "cpu": pass', 1),
        ('if site.backend != "cpu": pass', 1),
        ('x = moe_shape(config, 2, "sm_90a")', 1),
        ('y = "cpu" if backend in ("cpu", "gpu") else None', 1),
        ('match backend:\n  case "cpu": pass', 1),
        ('z = backends["sm_100a"]', 1),
        ('if device.platform == "cpu": pass', 0),
        ('def f(backend: str = "cpu"): """On sm_90a."""', 0),
    ],
)
def test_names_are_found(text, num_found):
    assert len(named_backends(text)) == num_found
