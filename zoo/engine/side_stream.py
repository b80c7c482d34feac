"""Work that depends on nothing around it, as a branch of the CUDA graph that is being captured.

A CUDA graph keeps to the order of the stream that it was captured from: a kernel of one program has the GPU to itself.
What is captured on a stream of its own runs beside the rest, until somebody waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zoo.engine.step_buffers import is_captured


@contextmanager
def branch(device: torch.device) -> Iterator[Callable[[], None] | None]:
    """Have the block run beside what comes behind it, until what this yields is called.

    Where no CUDA graph is being captured the block runs as it stands, and None is yielded: an eager call mostly waits
    for the host. What the block computes is not to be used, nor what it reads to be written, before the call.

    Args:
        device: Of the block's work.
    """
    if torch.compiler.is_compiling() or not is_captured(device):
        yield None
        return
    main, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield functools.partial(main.wait_stream, side)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for all branches: the libraries keep memory to work in for every stream that they have met."""
    return torch.cuda.Stream(device)
