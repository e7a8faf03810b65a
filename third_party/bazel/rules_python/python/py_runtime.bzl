"""As in defs.bzl."""

py_runtime = native.py_runtime
