// version.h: the version, stated once; pyproject.toml and the Python package read it from here.
#pragma once

#define JAX_MEGAMOE_VERSION "0.1.0"
