"""One external repository made from a Python installation: CPython's headers, nanobind, XLA FFI.

The wheels of jaxlib and nanobind ship everything that an extension module is compiled from, so the
interpreter that will import the module is also the place to take its headers from. It is named by
the environment variable JAX_MEGAMOE_PYTHON and defaults to the python3 on PATH.
"""

# Prints one directory a line. find_spec does not import jaxlib, which would be slow.
_QUERY = """
import importlib.util, os, sys, sysconfig
def package(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        sys.exit("no module " + name + "; install it next to this interpreter: pip install " + name)
    return os.path.dirname(spec.origin)
print(os.path.abspath(sys.executable))
print(sysconfig.get_path("include"))
print(os.path.join(package("jaxlib"), "include"))
print(package("nanobind"))
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python_headers",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/xla/ffi/**/*.h"]),
    includes = ["jaxlib"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    # What nanobind's own CMake function passes for a release build.
    copts = [
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-DNB_COMPACT_ASSERTIONS",
    ],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
    ],
    # nb_combined.cpp includes the other sources.
    textual_hdrs = glob(
        ["nanobind/src/*", "nanobind/ext/**/*.h"],
        exclude = ["nanobind/src/nb_combined.cpp"],
    ),
    deps = [":python_headers"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _python_env_impl(repository_ctx):
    # A relative path would be read from the repository's own folder, so it is not offered.
    name = repository_ctx.os.environ.get("JAX_MEGAMOE_PYTHON", "python3")
    python = name if name.startswith("/") else repository_ctx.which(name)
    if python == None:
        fail("JAX_MEGAMOE_PYTHON: got %s; expected an absolute path or a name on PATH." % name)
    result = repository_ctx.execute([python, "-c", _QUERY])
    if result.return_code != 0:
        fail("JAX_MEGAMOE_PYTHON: got %s; expected an interpreter with jaxlib and nanobind. %s" %
             (python, result.stderr))
    executable, include, jaxlib, nanobind = result.stdout.splitlines()
    repository_ctx.symlink(include, "python")
    repository_ctx.symlink(jaxlib, "jaxlib")
    repository_ctx.symlink(nanobind, "nanobind")
    repository_ctx.file("BUILD.bazel", _BUILD.replace("{python}", executable))

python_env_repository = repository_rule(
    implementation = _python_env_impl,
    environ = ["JAX_MEGAMOE_PYTHON", "PATH"],
    local = True,
)
