"""Run the ``fastpack`` command as ``python -m fastpack``."""

import sys

from fastpack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
