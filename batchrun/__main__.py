"""``python -m batchrun`` is ``batchrun``."""

from batchrun.cli import main

main()
