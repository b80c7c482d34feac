"""How the zoo's blocks are split over processes: each holds some heads and a part of the MLP.

Column-parallel layers (queries, keys and values; gate and up) are followed by row-parallel ones (the output products),
after which one all-reduce adds up what the processes computed. Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from zoo.bert import BertLayer
from zoo.llm import LLM, LLMLayer
from zoo.ops.norms import rms_norm


def styles_of(model: nn.Module, ways: int) -> dict[str, ParallelStyle]:
    """A plan of ``parallelize_module`` for the blocks of an ``LLM`` or a ``Bert``.

    Raises:
        ValueError: If the model has no such block, or a number of heads cannot be split in so many ways.
    """
    styles: dict[str, ParallelStyle] = {}
    for name, block in model.named_modules():
        if type(block) is LLMLayer:
            width, inner = block.head_dim, block.gate_up_proj.out_features // 2
            sizes = {"heads": block.heads, "key_heads": block.key_heads, "intermediate_size": inner}
            q, k = block.heads * width, block.key_heads * width
            columns = {"qkv_proj": (q, k, k), "gate_up_proj": (inner, inner)}
            rows = ("o_proj", "down_proj")
        elif type(block) is BertLayer:
            width, inner = block.attention_output.in_features, block.intermediate.out_features
            sizes = {"heads": block.heads, "intermediate_size": inner}
            columns = {"qkv": (width, width, width), "intermediate": (inner,)}
            rows = ("attention_output", "output")
        else:
            continue
        for what, size in sizes.items():
            if size % ways:
                raise ValueError(f"{name} has {what} {size}, which tp={ways} does not divide: take a divisor of {size}")
        styles[name] = _Heads()
        styles.update({f"{name}.{layer}": _FusedColumns(parts) for layer, parts in columns.items()})
        styles.update({f"{name}.{layer}": RowwiseParallel() for layer in rows})
        norms = [norm for norm in ("q_norm", "k_norm") if getattr(block, norm, None) is not None]
        styles.update({f"{name}.{norm}": _HeadNorm() for norm in norms})
    if not styles:
        raise ValueError(
            f"there is no tensor-parallel plan for {type(model).__name__}, only for LLM and Bert: give plan=, as "
            "parallelize_module takes it, or name the mesh's dimension dp_shard"
        )
    if isinstance(model, LLM):
        styles[""] = _LocalConfig()
    return styles


class _Heads(ParallelStyle):
    """A block counts the heads of this process."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in ("heads", "key_heads"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


class _LocalConfig(ParallelStyle):
    """The configuration has the heads of this process, for which caches are made."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        config: Any = module.config
        ways = device_mesh.size()
        module.config = dataclasses.replace(
            config,
            num_attention_heads=config.num_attention_heads // ways,
            num_key_value_heads=config.num_key_value_heads // ways,
        )
        return module


class _HeadNorm(ParallelStyle):
    """A norm of heads: its weight is whole on each process, its gradient the sum over all heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            weight: Any = module.weight
            if torch.is_grad_enabled():
                whole = DTensor.from_local(weight, device_mesh, [Replicate()], run_check=False)
                weight = whole.to_local(grad_placements=[Partial()])
            return rms_norm(x, weight, module.eps)  # type: ignore[arg-type]

        module.forward = forward  # type: ignore[method-assign]
        return module


class _FusedColumns(ColwiseParallel):
    """A layer whose rows are several parts one after the other, each of which is split.

    A shard must be consecutive rows, so the rows are put in the order of processes: all parts of the first, all of the
    second ... A state dict has them as they were, in which order any number of processes reads it.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        super().__init__()
        self._parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        order = _order(self._parts, device_mesh.size())
        for name, parameter in list(module.named_parameters(recurse=False)):
            ordered = nn.Parameter(reorder(parameter.detach(), order), requires_grad=parameter.requires_grad)
            module.register_parameter(name, ordered)
        module.row_order = order  # type: ignore[assignment]
        module.register_state_dict_post_hook(_to_file)
        module.register_load_state_dict_pre_hook(_from_file)
        return super()._apply(module, device_mesh)


def _order(parts: Sequence[int], ways: int) -> Tensor:
    """Rows in the order of processes, as indices into parts that follow each other."""
    rows = torch.arange(sum(parts)).split(tuple(parts))
    return torch.cat([part.chunk(ways)[process] for process in range(ways) for part in rows])


def reorder(tensor: Tensor, order: Tensor) -> Tensor:
    """Rows ``tensor[order]``, spread as before; of a DTensor a collective."""
    order = order.to(tensor.device)
    if not isinstance(tensor, DTensor):
        return tensor[order]
    return distribute_tensor(tensor.full_tensor()[order], tensor.device_mesh, tensor.placements, src_data_rank=None)


def _to_file(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    inverse = module.row_order.argsort()  # type: ignore[operator]
    for name, _parameter in module.named_parameters(recurse=False):
        state[prefix + name] = reorder(state[prefix + name], inverse)


def _from_file(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = reorder(state[prefix + name], module.row_order)  # type: ignore[arg-type]


def reorder_optimizer(model: nn.Module, state: Any, *, to_file: bool) -> None:
    """Put an optimizer's state, by names of parameters, into the order of a file or of this model, in place."""
    for prefix, module in model.named_modules():
        order = getattr(module, "row_order", None)
        if order is None:
            continue
        order = order.argsort() if to_file else order
        for name, parameter in module.named_parameters(prefix, recurse=False):
            # New dictionaries: those of a state dict are the optimizer's own.
            if name in state:
                state[name] = {
                    key: reorder(value, order)
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in state[name].items()
                }
