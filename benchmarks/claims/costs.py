"""Claims on what compiling costs: the first call, memory, accuracy."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import Claim, Part, around, at_least, at_most, between
from benchmarks.claims.figures import CompileTime, Error, FirstCall, PeakMemory, Recompiles, Speed, Way
from benchmarks.claims.races import (
    AUTOTUNE,
    BERT,
    EAGER,
    FULL,
    GCN,
    INFERENCE,
    PREFILL,
    REDUCE,
    REGIONAL,
    RESNET,
    TRAIN_BERT,
    TRAIN_LLAMA,
    TRAIN_RESNET,
    TRAINING,
    UNET,
)
from benchmarks.report.model import WRONG

REPEATED = (RESNET, BERT, PREFILL, UNET, GCN)
OURS, OURS_FULL = Way(impl="zoo", strategy="regional"), Way(impl="zoo")
# What the zoo stands for: regions inside one CUDA graph of the whole step, against a full compile inside one.
GRAPHED, GRAPHED_FULL = replace(OURS, cuda_graph=True), replace(OURS_FULL, cuda_graph=True)
CHECKPOINTED = replace(TRAIN_LLAMA, model="llama-3.2-1b-checkpointed")

COSTS = (
    Claim(
        number=2,
        title="The first call",
        text="The first call is 2–10× slower than a normal one, depending on mode.",
        parts=tuple(
            Part(says=says, figure=FirstCall(way), allowed=between(2, 10), where=(RESNET, BERT))
            for says, way in (("default", FULL), ("reduce-overhead", REDUCE), ("max-autotune", AUTOTUNE))
        ),
    ),
    Claim(
        number=17,
        title="The first training step",
        text="The first training step is 20–50 % slower because of compilation.",
        parts=(
            Part(
                says="first step",
                figure=FirstCall(FULL),
                allowed=between(1.2, 1.5),
                where=(TRAIN_RESNET, TRAIN_BERT, TRAIN_LLAMA),
            ),
        ),
    ),
    Claim(
        number=22,
        title="Regional compilation",
        text="Regional compilation cuts initial compile 3–7×; for the Stable Diffusion UNet 7× with 90 % of the "
        "speed-up kept.",
        parts=(
            Part(says="upstream's 3–7×", figure=CompileTime(FULL, REGIONAL), allowed=between(3, 7), where=REPEATED),
            Part(says="7× for the UNet", figure=CompileTime(FULL, REGIONAL), allowed=around(7), where=(UNET,)),
            Part(says="90 % kept for the UNet", figure=Speed(REGIONAL, FULL), allowed=at_least(0.9), where=(UNET,)),
            Part(says="the zoo's 3–7×", figure=CompileTime(OURS_FULL, OURS), allowed=between(3, 7), where=REPEATED),
            Part(
                says="the zoo's 90 % kept for the UNet",
                figure=Speed(OURS, OURS_FULL),
                allowed=at_least(0.9),
                where=(UNET,),
            ),
            Part(
                says="3–7× in a CUDA graph",
                figure=CompileTime(GRAPHED_FULL, GRAPHED),
                allowed=between(3, 7),
                where=INFERENCE,
            ),
            Part(
                says="90 % kept in a CUDA graph",
                figure=Speed(GRAPHED, GRAPHED_FULL),
                allowed=at_least(0.9),
                where=INFERENCE,
            ),
        ),
    ),
    Claim(
        number=24,
        title="Peak memory",
        text="Compile adds 5–25 % peak memory.",
        parts=(
            Part(says="inference", figure=PeakMemory(FULL, EAGER), allowed=between(1.05, 1.25), where=INFERENCE),
            Part(says="training", figure=PeakMemory(FULL, EAGER), allowed=between(1.05, 1.25), where=TRAINING),
        ),
    ),
    Claim(
        number=4,
        title="Numerics",
        text="Compilation does not change numerics beyond normal floating-point noise.",
        parts=(
            Part(says="inference", figure=Error(FULL), allowed=at_most(WRONG), where=INFERENCE),
            Part(
                says="inference under max-autotune",
                figure=Error(AUTOTUNE),
                allowed=at_most(WRONG),
                where=(RESNET, BERT),
            ),
            Part(says="losses of training", figure=Error(FULL), allowed=at_most(WRONG), where=TRAINING),
        ),
    ),
    Claim(
        number=26,
        title="Gradient checkpointing",
        text="Gradient checkpointing composes with compile when its policy and shapes stay fixed.",
        parts=(
            Part(says="nothing is compiled again", figure=Recompiles(FULL), allowed=at_most(0), where=(CHECKPOINTED,)),
            Part(says="the same losses", figure=Error(FULL), allowed=at_most(WRONG), where=(CHECKPOINTED,)),
            Part(says="faster than eager", figure=Speed(FULL, EAGER), allowed=at_least(1.0), where=(CHECKPOINTED,)),
            Part(
                says="memory saved is kept",
                figure=PeakMemory(FULL, EAGER),
                allowed=at_most(1.0),
                where=(CHECKPOINTED,),
            ),
        ),
    ),
)
