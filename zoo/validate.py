"""Checks in one form: of a model's inputs, before anything runs, and of a config's fields.

Each names the argument, its value, what was expected and what to do. Checks of tensors read no value of a device, so
they never wait for one::

    tensor("input_ids", input_ids, "B T", kinds="integer")  # dense, [B, T], int64 or int32
    tensor("images", images, "N 3 H W", kinds="floating", like=weight)  # as the weights, or autocast
    in_range("input_ids", input_ids, config.vocab_size, "vocab_size")  # on the host only
"""

import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether this is an integer of at least ``least``, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# Inputs


def tensor(
    name: str, given: Any, shape: str | None = None, *, kinds: str | Collection[torch.dtype] | None = None,
    like: Tensor | torch.device | None = None, like_name: str = "the weights", sizes: Mapping[str, int] | None = None,
    empty: bool = True, hint: str = "",
) -> None:  # fmt: skip
    """A dense tensor of this shape, kind, device and dtype; TypeError or ValueError otherwise.

    Args:
        name: The argument's.
        given: Its value.
        shape: A name or number for each dimension, ``"B T"`` or ``"N 3 H W"``; alternatives are separated by ``|``.
            Dimensions of one name are equal.
        kinds: ``"integer"`` (int64 or int32), ``"floating"``, or the very dtypes.
        like: A tensor on the same device and, if both are floating, of the same dtype; under autocast of any. Or the
            device alone.
        like_name: What the message calls ``like``.
        sizes: Of dimensions whose size is known.
        empty: Whether a dimension may be 0.
        hint: What to do about a wrong shape or kind.
    """
    if not isinstance(given, Tensor) or given.layout != torch.strided:
        found = given.layout if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name} is a {found}, expected a dense tensor {_shown(shape, sizes)}".rstrip() + hint)
    if shape is not None and not any(_fits(given.shape, each.split(), sizes or {}) for each in shape.split("|")):
        raise ValueError(f"{name} has shape {list(given.shape)}, expected {_shown(shape, sizes)}{hint}")
    if not empty and 0 in given.shape:
        raise ValueError(f"{name} has shape {list(given.shape)}, expected {_shown(shape, sizes)}, none of them 0")
    device = like.device if isinstance(like, Tensor) else like
    if device is not None and given.device != device:
        raise ValueError(f"{name} is on {given.device} and {like_name} on {device}; move one of them")
    dtype = like.dtype if isinstance(like, Tensor) else None
    if kinds == "floating":
        if not given.is_floating_point():
            raise TypeError(f"{name} is {given.dtype}, expected {dtype or 'floating-point numbers'}{hint}")
    elif kinds is not None:
        known = INTEGERS if kinds == "integer" else tuple(kinds)
        if given.dtype not in known:
            names = " or ".join(str(each).removeprefix("torch.") for each in known)
            remedy = "" if kinds == "integer" else f"; use {name}.to({known[0]})"
            raise TypeError(f"{name} is {given.dtype}, expected {names}{remedy}{hint}")
    if dtype is None or given.dtype == dtype or not dtype.is_floating_point or kinds == "integer":
        return
    # Autocast leaves float64 as it is.
    castable = given.is_floating_point() and torch.float64 not in (given.dtype, dtype)
    if not castable or not torch.is_autocast_enabled(given.device.type):
        also = ", or torch.autocast" if castable else ""
        raise TypeError(f"{name} is {given.dtype} and {like_name} {dtype}; use {name}.to({dtype}){also}")


def on_host(tensor: Tensor) -> bool:
    """Whether Python may read the values: they are on the CPU, and no compiler, trace or transform of torch's runs."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    traced = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    return not traced and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_range(name: str, ids: Tensor, limit: int, field: str, hint: str = "", *, ignored: int | None = None) -> None:
    """Integers from 0 to below ``limit``, which the model calls ``field``, or ``ignored``; read on the host only."""
    tensor(name, ids, kinds="integer")
    if not on_host(ids):
        return
    ids = ids if ignored is None else ids[ids != ignored]
    low, high = map(int, ids.aminmax()) if ids.numel() else (0, -1)
    if low < 0 or high >= limit:
        raise ValueError(f"{name} has values from {low} to {high}, but {field} is {limit}: pass 0 to {limit - 1}{hint}")


def count(name: str, value: Any, least: int = 1) -> None:
    """An integer of at least ``least``."""
    if not is_count(value, least):
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def check_seed(seed: int) -> None:
    """Refuse a seed that ``torch.Generator`` does not take."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}, expected an integer")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}, expected what fits into 64 bits, as torch.Generator takes it")


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU, so that numbers are the same on every device."""
    check_seed(seed)
    return torch.Generator("cpu").manual_seed(seed)


def check_device(device: torch.device | str, what: str) -> None:
    """Refuse a dtype in the place of a device, which would turn the indices in ``what`` into floats."""
    if isinstance(device, torch.dtype):
        raise TypeError(f"device is {device}: {what} moves to a device, and keeps its dtypes")


def warn(message: str, category: type[Warning]) -> None:
    """A warning that points to the line outside of the zoo that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "zoo":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# Fields of configs


def positive(config: Any, *names: str, or_none: bool = False) -> None:
    """Positive integers, or None where that stands for no limit."""
    for name in names:
        if not (or_none and getattr(config, name) is None):
            count(name, getattr(config, name))


def positive_number(config: Any, *names: str) -> None:
    """Numbers above zero."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)!r}, expected a positive number")


def divides(config: Any, part: str, whole: str) -> None:
    """One field is a multiple of the other."""
    first, second = getattr(config, whole), getattr(config, part)
    if first % second:
        raise ValueError(f"{whole} is {first} and {part} is {second}: the first must be a multiple of the second")


def one_of(config: Any, name: str, known: Collection[Any]) -> None:
    """A field has one of these values."""
    if getattr(config, name) not in known:
        raise ValueError(f"{name} is {getattr(config, name)!r}, expected one of {', '.join(map(repr, known))}")


def probability(config: Any, *names: str) -> None:
    """Numbers from 0 to below 1, or None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name} is {value!r}, expected a probability below 1")


def optional_index(config: Any, name: str, limit: str) -> None:
    """None, or an index below another field."""
    value, most = getattr(config, name), getattr(config, limit)
    if value is not None and not 0 <= value < most:
        raise ValueError(f"{name} is {value}, but {limit} is {most}: pass 0 to {most - 1}, or None")


def _shown(shape: str | None, sizes: Mapping[str, int] | None) -> str:
    """``"B T | 1 T"`` as ``[B, 5] or [1, 5]``, where T is known."""
    known = sizes or {}
    specs = [] if shape is None else shape.split("|")
    return " or ".join(f"[{', '.join(str(known.get(name, name)) for name in each.split())}]" for each in specs)


def _fits(shape: Sequence[int], names: Sequence[str], sizes: Mapping[str, int]) -> bool:
    known = dict(sizes)
    pairs = zip(names, shape, strict=False)
    alike = all(size == (int(name) if name.isdigit() else known.setdefault(name, size)) for name, size in pairs)
    return alike and len(shape) == len(names)
