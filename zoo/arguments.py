"""Arguments that several families take, checked alike: seeds, and where to move what holds indices."""

from __future__ import annotations

import torch

_SEEDS = -(2**63), 2**64 - 1  # what a torch.Generator takes


def check_seed(seed: int) -> None:
    """Refuse what no generator takes.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it does not fit into 64 bits.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}, expected an integer")
    least, greatest = _SEEDS
    if not least <= seed <= greatest:
        raise ValueError(f"seed is {seed}, expected {least} to {greatest}: what fits into 64 bits")


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU, whose numbers are the same wherever they go.

    Raises:
        TypeError, ValueError: If the seed is none.
    """
    check_seed(seed)
    return torch.Generator("cpu").manual_seed(seed)


def check_device(device: torch.device | str, what: str) -> None:
    """Refuse a dtype in the place of a device: tensors would take it, and indices become floats.

    Args:
        device: As given.
        what: What moves, for the message: "a graph".
    """
    if isinstance(device, torch.dtype):
        raise TypeError(f"device is {device}: {what} moves to devices alone, and fits whatever the dtype of the model")
