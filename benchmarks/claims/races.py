"""Arms and races that several claims speak of.

People claim what compiling their own model gained, so the arms are those of the upstream libraries unless a claim is
about regions.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import Where
from benchmarks.claims.figures import Way

EAGER = Way(strategy="eager")
FULL = Way()
REDUCE = Way(mode="reduce-overhead")
AUTOTUNE = Way(mode="max-autotune")
REGIONAL = Way(strategy="regional")
DYNAMIC = Way(dynamic=True)

RESNET = Where(family="resnet", model="resnet50", input="64x224")
RESNET_ONE = replace(RESNET, input="1x224")
BERT = Where(family="bert", model="bert-base", input="32x128")
PREFILL = Where(family="llm", model="llama-3.2-1b", input="prefill-1x2048")
DECODE = replace(PREFILL, input="decode-1x1024")
UNET = Where(family="unet", model="sd15", input="2x64x64")
SDXL = replace(UNET, model="sdxl", input="2x128x128")
GCN = Where(family="gnn", model="gcn", input="arxiv", dtype="float32")
GAT = replace(GCN, model="gat")
SAGE = replace(GCN, model="graphsage")

# What the families are known for: claims about compiling in general are held against these.
INFERENCE = (RESNET, RESNET_ONE, BERT, PREFILL, DECODE, UNET, SDXL, GCN, GAT, SAGE)

TRAIN_RESNET = replace(RESNET, workload="train", input="128x224")
TRAIN_BERT = replace(BERT, workload="train")
TRAIN_LLAMA = replace(PREFILL, workload="train", input="4x2048")
TRAIN_UNET = replace(UNET, workload="train", input="4x64x64")
TRAIN_GCN, TRAIN_GAT, TRAIN_SAGE = (replace(where, workload="train") for where in (GCN, GAT, SAGE))
TRAINING = (TRAIN_RESNET, TRAIN_BERT, TRAIN_LLAMA, TRAIN_UNET, TRAIN_GCN, TRAIN_GAT, TRAIN_SAGE)


def subject(model: str, input: str, *, dtype: str = "bfloat16", workload: str = "inference") -> Where:
    """A race of the small models that were written for claims, see ``benchmarks/families/claims.py``."""
    return Where(family="claims", model=model, input=input, dtype=dtype, workload=workload)
