"""`python -m kitfox.launch_server --model-path MODEL ...`: serve with SGLang's spellings, radix cache by default."""

import sys

from kitfox.cli import main_launch_server

if __name__ == "__main__":
    sys.exit(main_launch_server())
