"""What code in a captured step can ask and do; static buffers, and checks of what may be copied into them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_step_input(tensor: torch.Tensor) -> bool:
    """Whether this is an input buffer of a captured step, whose contents change between replays.

    Whatever Python derives from it and remembers (a prepared graph, a mask) would be baked into the CUDA graph.
    """
    return getattr(tensor, "_is_step_input", False)


def is_captured(device: torch.device) -> bool:
    """Whether what runs on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def branch(device: torch.device) -> Iterator[Callable[[], None] | None]:
    """Capture the block on a stream of its own: in the CUDA graph it runs beside what follows it.

    Yields a function that waits for the block; None where no CUDA graph is captured and the block runs as usual.
    Before that call nothing may use what the block computes, or write what it reads.
    """
    if torch.compiler.is_compiling() or not is_captured(device):
        yield None
        return
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield functools.partial(main.wait_stream, side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all branches: libraries keep a workspace for every stream."""
    return torch.cuda.Stream(device)


def is_constant(value: Any) -> bool:
    """Whether this is a plain value, which a CUDA graph can only hold as it was."""
    return isinstance(value, _CONSTANTS)


def check_leaves(leaves: Iterable[Any]) -> None:
    """Refuse what cannot be copied in: ValueError for an input that requires grad, TypeError for anything opaque."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise ValueError(f"input {describe([leaf])} requires grad; run backward inside the step, or detach it")
            if leaf.layout is not torch.strided:
                raise TypeError(
                    f"input {describe([leaf])} is {leaf.layout}; only strided tensors are copied in: name it static="
                )
        elif not is_constant(leaf):
            raise TypeError(f"an input is a {type(leaf).__name__}, which cannot be copied in; name it in static=")


def make_buffer(leaf: Any) -> torch.Tensor | None:
    """A static copy of the same kind: an inference tensor only where the example was one, or blocks would recompile."""
    if not isinstance(leaf, torch.Tensor):
        return None
    with torch.inference_mode(leaf.is_inference()), torch.no_grad():
        buffer = torch.empty_like(leaf).copy_(leaf)
    buffer._is_step_input = True  # type: ignore[attr-defined]
    return buffer


def may_write(*tensors: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inference mode if one of the tensors is an inference tensor, which may be written nowhere else."""
    inference = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if inference else contextlib.nullcontext()


def flatten_outputs(outputs: Any) -> tuple[list[Any], Any]:
    """Leaves without autograd history, and how they were put together."""
    leaves, spec = pytree.tree_flatten(outputs)
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec


def tensors_in(values: Iterable[Any], depth: int = 4) -> list[torch.Tensor]:
    """Tensors in static arguments, some levels deep into containers and plain objects, to learn the device."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth and isinstance(value, (list, tuple)):
            found += tensors_in(value, depth - 1)
        elif depth and isinstance(value, dict):
            found += tensors_in(value.values(), depth - 1)
        elif depth and not isinstance(value, (type, types.ModuleType)):
            found += tensors_in(getattr(value, "__dict__", {}).values(), depth - 1)
    return found


def one_device(tensors: list[torch.Tensor]) -> torch.device:
    """The GPU that all tensors on one are on, or the CPU; ValueError for several, or for none to tell by."""
    if not tensors and torch.cuda.is_available():
        raise ValueError(
            "no argument, weight or buffer of the step is a tensor, so that nothing says which device it runs on; pass "
            "what it works on as an argument, static if it is always the same"
        )
    on_gpu = {tensor.device for tensor in tensors if tensor.is_cuda}
    if len(on_gpu) > 1:
        raise ValueError(f"inputs and weights lie on {sorted(map(str, on_gpu))}; one CUDA graph runs on one device")
    return on_gpu.pop() if on_gpu else torch.device("cpu")


def shapes_of(leaves: list[Any]) -> tuple[Any, ...]:
    """What tells buckets apart: shape and dtype of tensors, type and value of constants, the type of whatever else."""
    return tuple(map(shape_of, leaves))


def shape_of(leaf: Any) -> Any:
    """``shapes_of`` of one leaf."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    # 1 is not True, nor 1.0, and 0.0 is not -0.0: what is captured may ask. A NaN is itself.
    return (type(leaf), repr(leaf)) if is_constant(leaf) else type(leaf)


def describe(leaves: Iterable[Any]) -> str:
    """Dtype, shape and device of tensors, constants as they are."""
    words = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            words.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device}")
        else:
            words.append(repr(leaf))
    return ", ".join(words)
