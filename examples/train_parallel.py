"""Train a language model on random tokens over several processes, one GPU each, or on the CPU.

torchrun --nproc-per-node 2 examples/train_parallel.py llama-3.2-1b --rows 4 --tokens 2048
torchrun --nproc-per-node 2 examples/train_parallel.py llm-debug --dimension dp_replicate
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zoo
from zoo.training import AdamW, TrainingStep, parallelize


def loss(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Cross entropy of each next token of input_ids [B, T]."""
    logits = model(input_ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, spread the model, train and print the mean loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a language model of zoo.list_models()")
    parser.add_argument("--dimension", choices=("dp_shard", "dp_replicate", "tp"), default="dp_shard")
    parser.add_argument("--rows", type=int, default=2, help="of each process's batch")
    parser.add_argument("--tokens", type=int, default=16, help="of a row")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=(options.dimension,))
    model = parallelize(zoo.create(options.model, device=device).train(), mesh)
    autocast = torch.bfloat16 if device == "cuda" else None
    step = TrainingStep(model, loss, AdamW(model.parameters(), lr=1e-4), autocast=autocast, clip_norm=1.0)

    # The processes of a tensor-parallel group work on one batch, others on different ones.
    generator = torch.Generator().manual_seed(0 if options.dimension == "tp" else dist.get_rank())
    inner = model.module if options.dimension == "dp_replicate" else model
    tokens = torch.randint(inner.config.vocab_size, (options.rows, options.tokens), generator=generator).to(device)
    with zoo.enforce_budget(model, group=dist.group.WORLD):
        for number in range(options.steps):
            mean = step(tokens)
            if dist.get_rank() == 0:
                print(f"step {number}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()
    if device == "cpu":
        time.sleep(0.5)  # Gloo's threads still free tensors, which aborts the process once Python has ended


if __name__ == "__main__":
    main()
