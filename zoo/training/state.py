"""A training run on disk: weights as safetensors, all else in torch's weights-only format."""

from __future__ import annotations

import pickle
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zoo.files import reading, replacing

WEIGHTS, REST = "model.safetensors", "training.pt"
_FORMAT = 1
_REMEDY = ": go on from another folder"


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def save(step: Any, folder: Path, others: Mapping[str, Any]) -> None:
    """Write both files; each replaces the old one when it is complete."""
    from safetensors.torch import save_model

    if stateless := [name for name, other in others.items() if not hasattr(other, "state_dict")]:
        what = type(others[stateless[0]]).__name__
        raise ValueError(f"{stateless[0]} is a {what} without state_dict(); keep plain values yourself")
    modules = [part for part in (step.model, *others.values()) if isinstance(part, nn.Module)]
    kept = {param for module in modules for param in module.parameters()}
    if lost := sum(param not in kept for param in parameters_of(step.optimizer)):
        raise ValueError(
            f"{lost} parameters of {type(step.optimizer).__name__} are not of the model and would not be saved: give "
            "what holds them, as in step.save(folder, loss=loss)"
        )
    # Two files cannot be replaced at once, so each holds the id of its save.
    pair = secrets.token_hex(8)
    random = {"cpu": torch.get_rng_state()}
    if step.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(step.device)
    rest = {
        "format": _FORMAT,
        "pair": pair,
        "steps": step.steps,
        "seen": int(step._watch.count),
        "optimizer": step.optimizer.state_dict(),
        "parameters": _parameters_of(step),
        "scaler": None if step.scaler is None else step.scaler.state_dict(),
        "random": random,
        "others": {name: other.state_dict() for name, other in others.items()},
    }
    with replacing(folder) as new:
        save_model(step.model, str(new / WEIGHTS), metadata={"pair": pair})
        torch.save(rest, new / REST)
        try:
            torch.load(new / REST, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise ValueError(
                f"the state of {', '.join(others) or 'the optimizer'} holds {found[1] if found else 'an object'}, but "
                "only tensors and plain values can be read again: have its state_dict() give tensors, lists and numbers"
            ) from error


def load(step: Any, folder: Path, others: Mapping[str, Any]) -> None:
    """Read both files; nothing is changed unless all of it fits."""
    for name in (WEIGHTS, REST):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; step.save(folder) writes {WEIGHTS} and {REST}")
    with reading(folder / REST, _REMEDY):
        rest = torch.load(folder / REST, map_location="cpu", weights_only=True)
    if rest.get("format") != _FORMAT:
        raise ValueError(f"{folder / REST} has format {rest.get('format')}, this release reads {_FORMAT}")
    if set(rest["others"]) != set(others):
        held = sorted(rest["others"])
        raise ValueError(f"{folder} holds states of {held}, given are {sorted(others)}: name the same")
    for name, other in others.items():
        if not hasattr(other, "load_state_dict"):
            raise ValueError(f"{name} is a {type(other).__name__} without load_state_dict()")
    if (rest["scaler"] is None) != (step.scaler is None):
        was, now = ("without", "with") if rest["scaler"] is None else ("with", "without")
        raise ValueError(f"{folder} was saved {was} float16 loss scaling, this step trains {now} it")
    weights = _weights(step.model, folder / WEIGHTS, rest["pair"])
    _check_order(step, rest, folder / REST)
    _load_optimizer(step.optimizer, rest["optimizer"], folder / REST)
    with torch.no_grad():
        for name, tensor in step.model.state_dict().items():
            if name in weights:
                tensor.copy_(weights[name])
    if step.scaler is not None:
        step.scaler.load_state_dict(rest["scaler"])
    for name, other in others.items():
        other.load_state_dict(rest["others"][name])
    step.steps = rest["steps"]
    step._watch.begin_at(rest["seen"])
    torch.set_rng_state(rest["random"]["cpu"])
    if step.device.type == "cuda" and "cuda" in rest["random"]:
        torch.cuda.set_rng_state(rest["random"]["cuda"], step.device)


def distributed_state(step: Any) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint`` saves and loads into: tensors by the names of parameters."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from zoo.training.tensor_parallel import reorder_optimizer

    model, optimizer = get_state_dict(step.model, step.optimizer)
    reorder_optimizer(step.model, optimizer["state"], to_file=True)
    return {"model": model, "optimizer": optimizer, "steps": step.steps, "seen": int(step._watch.count)}


def load_distributed_state(step: Any, saved: Mapping[str, Any]) -> None:
    """Load a state of ``distributed_state``."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from zoo.training.tensor_parallel import reorder_optimizer

    optimizer = saved["optimizer"]
    reorder_optimizer(step.model, optimizer["state"], to_file=False)
    set_state_dict(step.model, step.optimizer, model_state_dict=saved["model"], optim_state_dict=optimizer)
    step.steps = saved["steps"]
    step._watch.begin_at(saved["seen"])


def _parameters_of(step: Any) -> list[tuple[str, int]]:
    """Name and group of the optimizer's parameters, whose states it numbers in this order."""
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    groups = enumerate(step.optimizer.param_groups)
    return [(names.get(param, "none of the model's"), index) for index, group in groups for param in group["params"]]


def _check_order(step: Any, rest: Mapping[str, Any], file: Path) -> None:
    """ValueError if states would go to other parameters: fused optimizers would write past their memory."""
    now = _parameters_of(step)
    for number, (was, given) in enumerate(zip(rest["parameters"], now, strict=False)):
        if tuple(was) != given:
            raise ValueError(
                f"{file} was saved from another optimizer than this {type(step.optimizer).__name__}: parameter "
                f"{number} was {was[0]} in group {was[1]}, and is {given[0]} in group {given[1]}; give it the "
                "parameters in the same order and groups"
            )


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any], file: Path) -> None:
    """Load a state; ValueError, and the optimizer unchanged, if it does not fit."""
    before = dict(vars(optimizer))
    # Torch gives every optimizer that loads a default "differentiable", also one whose groups never had it.
    options = {option for option in optimizer.defaults if all(option in group for group in optimizer.param_groups)}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for option, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(option), torch.Tensor):
                # Torch moves states to where their parameters are, and leaves a learning rate where it was saved.
                saved[option] = value.to(group[option].device)
    try:
        optimizer.load_state_dict(state)
        missing = {option for group in optimizer.param_groups for option in options if option not in group}
        if missing:
            raise ValueError(f"its groups have no {', '.join(sorted(missing))}")
    except Exception as error:  # an optimizer may raise anything on another's state
        vars(optimizer).update(before)
        name = type(optimizer).__name__
        raise ValueError(f"{file} was saved from another optimizer than this {name}: {error}") from error


def _weights(model: nn.Module, file: Path, pair: str) -> dict[str, Tensor]:
    """The file's tensors, shared ones once; ValueError unless they fit the model and have ``pair``, the save's id."""
    from safetensors import safe_open

    with reading(file, _REMEDY), safe_open(str(file), framework="pt") as tensors:
        if (tensors.metadata() or {}).get("pair") != pair:
            raise ValueError(
                f"{file} and its {REST} are of different saves, one of which was cut off: go on from another "
                "folder, or load the weights alone and make a new optimizer"
            )
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    own = model.state_dict()
    stored = {own[name].data_ptr() for name in found if name in own}
    wrong = [f"{name} is not in it" for name in found if name not in own]
    for name, tensor in own.items():
        held = found.get(name)
        if held is None and tensor.data_ptr() not in stored:
            wrong.append(f"{name} is missing")
        elif held is not None and (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            wrong.append(f"{name} is {held.dtype} {list(held.shape)}, not {tensor.dtype} {list(tensor.shape)}")
    if wrong:
        name = type(model).__name__
        raise ValueError(f"{file} was saved from another model than this {name}: {'; '.join(wrong[:3])}")
    return found
