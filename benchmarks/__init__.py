"""The harness that measures models: ``python -m benchmarks.run --family gnn``."""

import importlib.util
import sys

if importlib.util.find_spec("typer") is None:
    sys.exit('benchmarks needs the packages of the extra "bench": pip install -e ".[bench]"')
