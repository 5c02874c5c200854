"""Train Unsloth's variant: as :mod:`fastpack.bench.variant_run`, but Unsloth is imported first.

Unsloth changes transformers, PEFT and TRL when it is imported, which must be before they are.
"""

from __future__ import annotations

import unsloth  # noqa: F401 (before everything else)

from fastpack.bench.variant_run import main

if __name__ == "__main__":
    main()
