"""As in defs.bzl; this one comes with Bazel 4.2.3 as a .bzl file."""

load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

py_runtime_pair = _py_runtime_pair
