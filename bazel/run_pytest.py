"""Runs pytest on the files given and exits with its status."""

import sys

import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
