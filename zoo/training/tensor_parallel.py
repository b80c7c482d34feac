"""How the zoo's blocks are split over processes: each holds some heads and a part of the MLP.

Column-parallel layers (queries, keys and values; gate and up) are followed by row-parallel ones (the output products),
after which one all-reduce adds up what the processes computed. Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from zoo.bert import BertLayer
from zoo.llm import LLM, LLMLayer
from zoo.llm.model import QuantizedLinear, RMSNorm
from zoo.ops import triton as kernels
from zoo.ops.common import KERNEL_DTYPES, ceil_div, kernels_run, to_local, triton_runs_on
from zoo.ops.transformer import rms_norm
from zoo.training.fused import Float8Linear

if TYPE_CHECKING:
    from zoo.ops.triton.sums import Shared


class BlockSplit(NamedTuple):
    """A block, and which of its linear layers are split."""

    block: nn.Module
    columns: dict[str, tuple[int, ...]]  # column-parallel layers, and the numbers of rows that are split each
    rows: tuple[str, str]  # row-parallel layers


def splits_of(model: nn.Module, ways: int) -> list[BlockSplit]:
    """How an ``LLM``'s or ``Bert``'s blocks are split; ValueError for other models and for heads that do not divide."""
    splits: list[BlockSplit] = []
    for name, block in model.named_modules():
        if type(block) in (LLMLayer, BertLayer) and any(isinstance(each, Float8Linear) for each in block.children()):
            raise ValueError(f"{name} has products of float8, which tp={ways} does not split: shard it by dp_shard")
        if type(block) is LLMLayer:
            if isinstance(block.qkv_proj, QuantizedLinear):
                raise ValueError(
                    f"{name} has quantized weights, which tp={ways} does not split: take the original model"
                )
            width, inner = block.head_dim, block.gate_up_proj.out_features // 2
            sizes = {"heads": block.heads, "key_heads": block.key_heads, "intermediate_size": inner}
            q, k = block.heads * width, block.key_heads * width
            columns: dict[str, tuple[int, ...]] = {"qkv_proj": (q, k, k), "gate_up_proj": (inner, inner)}
            splits.append(BlockSplit(block, columns, ("o_proj", "down_proj")))
        elif type(block) is BertLayer:
            width, inner = block.attention_output.in_features, block.intermediate.out_features
            sizes = {"heads": block.heads, "intermediate_size": inner}
            columns = {"qkv": (width, width, width), "intermediate": (inner,)}
            splits.append(BlockSplit(block, columns, ("attention_output", "output")))
        else:
            continue
        for what, size in sizes.items():
            if size % ways:
                raise ValueError(f"{name} has {what} {size}, which tp={ways} does not divide: take a divisor of {size}")
    if not splits:
        raise ValueError(
            f"there is no tensor-parallel plan for {type(model).__name__}, only for LLM and Bert: give plan=, as "
            "parallelize_module takes it, or name the mesh's dimension dp_shard"
        )
    return splits


def split_blocks(model: nn.Module, splits: Sequence[BlockSplit], mesh: DeviceMesh, *, keep_frozen: bool) -> None:
    """Split the blocks over a mesh in place: parameters become DTensors, which optimizers and checkpoints know.

    With ``keep_frozen`` those that do not learn stay tensors: faster on the host, but refused by FSDP2.
    """
    ways = mesh.size()
    shared: dict[Any, Shared | None] = {}
    for block, columns, rows in splits:
        for name in ("heads", "key_heads"):
            if hasattr(block, name):
                setattr(block, name, getattr(block, name) // ways)
        for name, parts in columns.items():
            _split(block.get_submodule(name), 0, mesh, keep_frozen=keep_frozen, order=_order(parts, ways))
        for layer in map(block.get_submodule, rows):
            _split(layer, 1, mesh, keep_frozen=keep_frozen, order=None)
            layer.is_first = mesh.get_local_rank() == 0  # type: ignore[assignment]
            layer.shared = _shared_memory(layer.weight, mesh, shared)  # type: ignore[assignment]
        for norm in (getattr(block, "q_norm", None), getattr(block, "k_norm", None)):
            if norm is not None and norm.weight.requires_grad:
                _turn_into(HeadNorm, norm, mesh)
    if isinstance(model, LLM):
        # Caches are made for the heads of this process.
        config = model.config
        heads, key_heads = config.num_attention_heads // ways, config.num_key_value_heads // ways
        if keep_frozen and not model.output_weight.requires_grad and config.vocab_size % ways == 0:
            group = mesh.get_group().group_name
            model.split_logits = functools.partial(_split_logits, ways, mesh.get_local_rank(), group)
        model.config = dataclasses.replace(config, num_attention_heads=heads, num_key_value_heads=key_heads)


def _split_logits(ways: int, rank: int, group: str, head: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The output product of an ``LLM``, where each process multiplies by its rows of the whole weight [V, C].

    X [B, L, C] -> logits [B, L, V] on all processes.
    """
    part = head(x, weight.chunk(ways)[rank]).contiguous()
    found = torch.ops._c10d_functional.all_gather_into_tensor(part, ways, group)
    found = torch.ops._c10d_functional.wait_tensor(found)
    return found.view(ways, *part.shape).movedim(0, -2).flatten(-2)  # type: ignore[no-any-return]


class ColumnLinear(nn.Linear):
    """A linear layer with some rows of the weight: x [..., C], whole, -> this process's part of [..., N]."""

    split_over: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by this process's rows; the gradient of x is the sum over all processes."""
        return F.linear(_alike(x, self.split_over), to_local(self.weight), to_local(self.bias))


class RowLinear(nn.Linear):
    """A linear layer with some columns of the weight: this process's part of [..., C] -> [..., N], whole."""

    split_over: DeviceMesh
    group: str
    is_first: bool
    shared: Shared | None  # memory that all processes of a host reach

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by this process's columns, add up what all processes have, then the bias."""
        out = self.add_parts(F.linear(x, to_local(self.weight)))
        return out if self.bias is None else out + to_local(self.bias).to(out.dtype)

    def add_parts(self, part: Tensor) -> Tensor:
        """The sum over all processes: an all-reduce, or where memory is shared a kernel of our own for few numbers."""
        if torch.is_grad_enabled():
            parts = DTensor.from_local(part, self.split_over, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()
        shared = self.shared
        fits = shared is not None and part.dtype == self.weight.dtype and part.numel() <= kernels.sums.capacity(shared)
        if shared is not None and fits and kernels_run(part):
            return kernels.sums.sum_of_parts(part, shared)
        summed: Tensor = torch.ops._c10d_functional.all_reduce(part, "sum", self.group)
        return torch.ops._c10d_functional.wait_tensor(summed)  # type: ignore[no-any-return]


class HeadNorm(RMSNorm):
    """A norm of heads: its weight is whole on each process, its gradient the sum over all heads."""

    split_over: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """X [..., D] -> [..., D]."""
        return rms_norm(x, _alike(self.weight, self.split_over), self.eps)


def _alike(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor, equal on all processes, with which each computes another part: its gradients are summed over all."""
    if not torch.is_grad_enabled():
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _split(layer: nn.Module, dim: int, mesh: DeviceMesh, *, keep_frozen: bool, order: Tensor | None) -> None:
    """Split a linear layer's weight along a dimension, and its bias if that is the first; else the bias stays whole.

    A shard must be consecutive, so rows are first put in ``order``. A state dict has them in the original order, which
    any number of processes can read.
    """
    placements = {"weight": Shard(dim), "bias": Replicate() if dim else Shard(0)}
    layer.row_order, layer.placements = order, placements  # type: ignore[assignment]
    for name, parameter in list(layer.named_parameters(recurse=False)):
        learns = parameter.requires_grad
        whole = parameter.detach() if order is None else reorder(parameter.detach(), order)
        part: Any = distribute_tensor(whole, mesh, [placements[name]], src_data_rank=None)
        if keep_frozen and not learns:
            part = part.to_local().clone()  # or it would be a view, and the whole stay in memory
        layer.register_parameter(name, nn.Parameter(part, requires_grad=learns))
    layer.register_state_dict_post_hook(_to_file)
    layer.register_load_state_dict_pre_hook(_from_file)
    _turn_into(RowLinear if dim else ColumnLinear, layer, mesh)


def _turn_into(cls: type[nn.Module], module: nn.Module, mesh: DeviceMesh) -> None:
    module.__class__ = cls
    module.split_over, module.group = mesh, mesh.get_group().group_name  # type: ignore[assignment]


# Most rows that one kernel sums.
SHARED_ROWS = 32


def _shared_memory(weight: Any, mesh: DeviceMesh, made: dict[Any, Shared | None]) -> Shared | None:
    """Memory that all processes reach, for sums of few rows. None if the weight learns or there is no such memory."""
    fits = not isinstance(weight, DTensor) and weight.dtype in KERNEL_DTYPES and triton_runs_on(weight.device)
    if not fits or torch.version.hip is not None:
        return None
    key = weight.dtype, len(weight)
    if key not in made:
        made[key] = _make_shared(SHARED_ROWS * len(weight), weight.dtype, weight.device, mesh)
    return made[key]


def _make_shared(numbers: int, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh) -> Shared | None:
    """Memory for sums of at most ``numbers`` numbers, or None on all processes; all of them must call this."""
    from torch.distributed import _symmetric_memory as symmetric

    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def gathered(value: Any) -> list[Any]:
        """The values of all processes, by rank, once all have called it."""
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, value, group=group)
        return found

    # Checked first, since a rendezvous with another host may not end.
    hosts, devices = zip(*gathered((socket.gethostname(), device.index)), strict=True)
    near = ranks > 1 and len(set(hosts)) == 1 and len(set(devices)) == ranks
    near = near and max(devices) < torch.cuda.device_count()
    peers = [each for each in devices if each != device.index]
    if not all(gathered(near and all(torch.cuda.can_device_access_peer(device.index, each) for each in peers))):
        return None
    programs = ceil_div(numbers, kernels.sums.WORDS)
    shape = 2, ranks, programs * kernels.sums.WORDS
    starts: list[int] = []
    offset = None
    try:
        # Each process writes to each: multicast, which not every machine with NVLink has set up, is not needed.
        with _environment("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):
            word = torch.int32 if dtype.itemsize == 2 else torch.int64
            memory = symmetric.empty(*shape, dtype=word, device=device).zero_()
            starts = symmetric.rendezvous(memory, group).buffer_ptrs
        offset = memory.data_ptr() - starts[rank] if all(starts) else None
    except RuntimeError:  # whatever a driver or a container does not allow
        pass
    torch.cuda.synchronize(device)  # nobody writes into another's memory before that is all zeros
    if None in (offsets := gathered(offset)):
        return None
    part = memory[0, rank].data_ptr() - memory.data_ptr()
    addresses = [start + each + part for start, each in zip(starts, offsets, strict=True)] + [memory.data_ptr()]
    counts = torch.zeros(programs, dtype=torch.int32, device=device)
    return kernels.sums.Shared(memory, torch.tensor(addresses, device=device), counts)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _order(parts: Sequence[int], ways: int) -> Tensor:
    """Rows in the order of processes: all parts of the first, all of the second ..., as indices into the parts."""
    rows = torch.arange(sum(parts)).split(tuple(parts))
    return torch.cat([part.chunk(ways)[process] for process in range(ways) for part in rows])


def reorder(tensor: Tensor, order: Tensor) -> Tensor:
    """Rows ``tensor[order]``, spread as before; of a DTensor a collective."""
    order = order.to(tensor.device)
    if not isinstance(tensor, DTensor):
        return tensor[order]
    return distribute_tensor(tensor.full_tensor()[order], tensor.device_mesh, tensor.placements, src_data_rank=None)


def _to_file(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        value = state[prefix + name]
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, module.split_over, [module.placements[name]], run_check=False)
        state[prefix + name] = value if module.row_order is None else reorder(value, module.row_order.argsort())


def _from_file(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if prefix + name in state:
            value = state[prefix + name]
            value = value if module.row_order is None else reorder(value, module.row_order)
            state[prefix + name] = value if isinstance(parameter, DTensor) else to_local(value)


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
                held = state[name].items()
                moved = {key for key, value in held if isinstance(value, Tensor) and value.shape == parameter.shape}
                state[name] = {key: reorder(value, order) if key in moved else value for key, value in held}
