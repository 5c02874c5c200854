"""``python -m fastpack.bench``."""

import argparse

from fastpack.bench.runner import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="fastpack bench", description=__doc__)
    add_arguments(parser)
    raise SystemExit(main(parser.parse_args()))
