"""Stands in for rules_python where Bazel 4.2.3 builds offline: the rules are native there."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
