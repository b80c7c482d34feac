"""What a graph that is being traced is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_to_run = False


@contextmanager
def tracing_to_run(runs: bool) -> Iterator[None]:
    """Meanwhile :func:`traced_to_run` says ``runs``. One thread at a time may be inside."""
    global _to_run
    before, _to_run = _to_run, runs
    try:
        yield
    finally:
        _to_run = before


def traced_to_run() -> bool:
    """Whether a graph with nothing to fuse will run as it is traced, and not be compiled by Inductor."""
    return _to_run


# Dynamo folds the answer without a guard: compiled code is called when nothing is traced. The public decorator,
# ``torch.compiler.assume_constant_result``, would import Dynamo.
traced_to_run._dynamo_marked_constant = True  # type: ignore[attr-defined]
