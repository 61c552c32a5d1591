"""`python -m kitfox`: the same as the `kitfox` command."""

import sys

from kitfox.cli import main

if __name__ == "__main__":
    sys.exit(main())
