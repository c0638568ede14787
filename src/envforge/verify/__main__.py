"""`python -m envforge.verify`: see `--help`."""

from __future__ import annotations

import sys

from envforge.verify.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
