"""Compiled regions over several processes: torch's own parallelism, applied in the one order that works.

Tensor parallelism replaces parameters and puts collectives into the blocks, so it comes before the regions are
compiled. FSDP2 and DistributedDataParallel put hooks around blocks, which no graph can hold, so they come after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zoo.engine.call import outermost_call
from zoo.engine.compile import compile_regions
from zoo.engine.discover import resolve
from zoo.ops.common import is_sharded
from zoo.training.checkpointing import checkpoint_regions

# As torchtitan and accelerate name them.
DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
_ORDER = "the order is tensor parallel, compile, checkpoint, shard: zoo.training.parallelize(model, mesh) does all four"


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, plan: Mapping[str, Any] | None = None, compile: bool = True,
    checkpoint: type[nn.Module] | None = None, sharding: Mapping[str, Any] | None = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """Spread a model over the processes of a mesh and compile its regions.

    Returns the same model; under ``dp_replicate`` alone a ``DistributedDataParallel`` that holds it as ``module``. The
    names of the mesh's dimensions say what happens, in this order:

    1. Parameters and buffers are copied from the first process of the mesh to all others.
    2. ``tp``: each process holds some heads and a part of the MLP of each block, in an ``LLM`` or ``Bert``; other
       models need ``plan``. For inference call ``model.requires_grad_(False)`` before, so that weights are plain
       tensors and not DTensors, and run the model in one stream. Processes of a ``tp`` group must get equal batches.
    3. ``compile_regions``, then ``checkpoint_regions``.
    4. ``dp_shard``: ``fully_shard`` (FSDP2) of each block that repeats, and of the whole; together with
       ``dp_replicate`` it is hybrid. ``dp_replicate`` alone: ``DistributedDataParallel``.

    Args:
        model: Uncompiled, with its weights, on the mesh's device.
        mesh: Made by ``init_device_mesh(..., mesh_dim_names=...)``, with some of the dimensions ``dp_replicate``,
            ``dp_shard`` and ``tp``, in this order.
        plan: A plan as ``parallelize_module`` takes it, for a model that is neither an ``LLM`` nor a ``Bert``.
        compile: Whether regions are compiled.
        checkpoint: The class of blocks that ``checkpoint_regions`` is to run again in the backward.
        sharding: Options of ``fully_shard`` (``mp_policy``, ``reshard_after_forward`` of the blocks ...), or of
            ``DistributedDataParallel``.
        options: Of ``zoo.compile_regions``.

    Raises:
        ValueError: If the mesh, the model or an option does not fit. Nothing is changed then.
    """
    names = _check_mesh(model, mesh)
    _check_untouched(model)
    tensor_parallel = mesh["tp"] if "tp" in names else None
    shards = tuple(name for name in names if name != "tp")
    if shards == ("dp_replicate",) and tensor_parallel is not None:
        raise ValueError("DistributedDataParallel takes no tensor-parallel parameters: name a dp_shard dimension too")
    if not compile and (options or checkpoint):
        raise ValueError(f"compile is False, but {', '.join(options) or 'checkpoint'} was given, which needs regions")
    if sharding and not shards:
        raise ValueError(f"sharding is {dict(sharding)}, but the mesh has no dp_replicate or dp_shard, only {names}")
    if plan and tensor_parallel is None:
        raise ValueError(f"plan is for tensor parallelism, but the mesh has no tp, only {names}")
    splits = None
    if tensor_parallel is not None and plan is None:
        from zoo.training.tensor_parallel import split_blocks, splits_of

        splits = splits_of(model, tensor_parallel.size())
    groups = resolve(model, options.get("regions"), options.get("exclude", ())).values()
    blocks = [block for group in groups if len(group) > 1 for block in group.values()]

    # Tensors that are not split must be equal on all processes, and the parts of others must come from one model.
    for tensor in (*model.parameters(), *model.buffers()):
        for group in mesh.get_all_groups():
            dist.broadcast(tensor.detach(), group=group, group_src=0)
    if tensor_parallel is not None:
        from torch.distributed.tensor.parallel import parallelize_module

        # Processes of a group must draw equal dropout for tensors that are not split.
        seed = torch.randint(2**31, (), device=mesh.device_type)
        dist.broadcast(seed, group=tensor_parallel.get_group(), group_src=0)
        torch.manual_seed(int(seed))
        if splits is None:
            parallelize_module(model, tensor_parallel, dict(plan or {}))
        else:
            split_blocks(model, splits, tensor_parallel, keep_frozen=not shards)
    if "dp_shard" in names:
        for parameter in model.parameters():
            # FSDP2 takes no weights in channels_last; contiguous() would keep the strides of a 1x1 convolution's.
            if parameter.dim() == 4:
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    if compile:
        compile_regions(model, **options)
    if checkpoint is not None:
        checkpoint_regions(model, checkpoint)
    if shards == ("dp_replicate",):
        data = mesh["dp_replicate"]
        return nn.parallel.DistributedDataParallel(model, device_mesh=data, **(sharding or {}))
    if shards:
        _shard(model, blocks, mesh[shards if len(shards) > 1 else shards[0]], dict(sharding or {}))
    return model


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups that a model is spread over, one for each dimension of its mesh; none in a single process."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return [model.process_group]
    if not dist.is_available() or not dist.is_initialized():
        return []
    meshes: list[Any] = [getattr(each, "device_mesh") for each in model.parameters() if is_sharded(each)]  # noqa: B009
    meshes += [each.split_over for each in model.modules() if hasattr(each, "split_over")]
    return max(meshes, key=lambda mesh: mesh.ndim).get_all_groups() if meshes else []


def mean_over(groups: Sequence[dist.ProcessGroup], value: Tensor) -> Tensor:
    """The mean of a value over all processes; not finite if the value of any process is not."""
    for group in groups:
        dist.all_reduce(value, group=group)
        value = value / group.size()
    return value


def collective_obstacles(model: nn.Module) -> list[str]:
    """Why the collectives of a step cannot be captured in a CUDA graph, each with its remedy."""
    groups = groups_of(model)
    if not groups:
        return []
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return ["DistributedDataParallel's buckets are made in its first backward passes: name the dimension dp_shard"]
    backends = {dist.get_backend(group) for group in groups}
    obstacles = []
    if backends != {"nccl"}:
        obstacles.append(f"collectives of {', '.join(sorted(backends))} run on the host: init_process_group('nccl')")
    if os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        obstacles.append("NCCL registers a captured graph's buffers, which FSDP2 frees: NCCL_GRAPH_REGISTER=0")
    return obstacles


def clip_gradients(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """``clip_grad_norm_`` for parameters on several meshes or none; returns the norm over all processes' gradients."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [nn.utils.get_total_norm([each.grad for each in kind if each.grad is not None]) for kind in kinds.values()]
    whole = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    norm = torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)
    for kind in kinds.values():
        nn.utils.clip_grads_with_norm_(kind, most, norm)
    return norm


def _check_mesh(model: nn.Module, mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    if not names or names != tuple(name for name in DIMENSIONS if name in names):
        raise ValueError(
            f"the mesh's dimensions are {mesh.mesh_dim_names}, expected some of {DIMENSIONS} in this order: "
            "init_device_mesh(device, sizes, mesh_dim_names=...)"
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {mesh.device_type}:
        found = ", ".join(sorted(devices)) or "nowhere"
        raise ValueError(f"the parameters are on {found}, the mesh is of {mesh.device_type}: model.to(...) first")
    return names


def _check_untouched(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        where = f"{name or 'the model itself'} ({type(module).__name__})"
        if isinstance(module, FSDPModule | nn.parallel.DistributedDataParallel):
            raise ValueError(f"{where} is sharded or replicated already; {_ORDER}")
        if outermost_call(module) is not None or hasattr(module, "_orig_mod"):
            raise ValueError(f"{where} is compiled already: call zoo.uncompile(model) first, for {_ORDER}")
    if spread := [name for name, parameter in model.named_parameters() if is_sharded(parameter)]:
        raise ValueError(f"{spread[0]} is a DTensor already, of another plan or of fully_shard; {_ORDER}")


def _shard(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from zoo.llm import LLM

    for block in blocks:
        if list(block.parameters()):
            fully_shard(block, mesh=mesh, **options)
    # The backward needs the root's parameters first, so they stay gathered.
    options.pop("reshard_after_forward", None)
    fully_shard(model, mesh=mesh, **options)
    if isinstance(model, LLM):
        register_fsdp_forward_method(model, "features")
