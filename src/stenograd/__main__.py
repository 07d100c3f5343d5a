"""`python -m stenograd` is the command `stenograd`."""

from __future__ import annotations

import sys

from stenograd.cli import main

if __name__ == "__main__":
    sys.exit(main())
