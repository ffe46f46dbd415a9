"""``python -m flashoptim_dist``: the command line."""

import sys

from flashoptim_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
