"""``python -m fastpack``: the same as the ``fastpack`` command."""

import sys

from fastpack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
