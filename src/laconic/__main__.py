"""`python -m laconic` is the command `laconic`."""

from __future__ import annotations

import sys

from laconic.cli import main

if __name__ == "__main__":
    sys.exit(main())
