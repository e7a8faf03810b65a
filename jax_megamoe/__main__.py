"""``python -m jax_megamoe``; see `jax_megamoe.cli`."""

import sys

from jax_megamoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
