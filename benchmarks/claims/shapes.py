"""Claims on shapes that change from call to call."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import Claim, Part, around, at_least, at_most, between
from benchmarks.claims.figures import Epoch, Recompiles, Speed, Way
from benchmarks.claims.races import AUTOTUNE, DYNAMIC, EAGER, FULL, TRAIN_BERT, subject

VISION = subject("cnn", "256")
SIZES = subject("batch-sizes", "1-8-32-128")
EPOCH = replace(TRAIN_BERT, input="epoch-32x512")
EPOCH_STATIC = replace(TRAIN_BERT, input="epoch-static-32x512")
PADDED = Way(impl="upstream-tuned")
# Of an epoch of those inputs on a GPU.
STEPS = 1000
# The limit of torch.compile, after which a frame is run eagerly.
LIMIT = 8

SHAPES = (
    Claim(
        number=8,
        title="Dynamic shapes in vision",
        text="A dynamic-shape vision model gets slower (16.9 → 17.8 ms).",
        parts=(
            Part(says="slower than eager", figure=Speed(DYNAMIC, EAGER), allowed=at_most(1.0), where=(VISION,)),
            Part(says="slower than for one shape", figure=Speed(DYNAMIC, FULL), allowed=at_most(1.0), where=(VISION,)),
        ),
    ),
    Claim(
        number=9,
        title="A variant for each size",
        text="Separate compiled variants for common batch sizes or sequence lengths keep serving predictable.",
        parts=(
            Part(
                says="no slower than one dynamic variant",
                figure=Speed(Way(impl="upstream-tuned", strategy="regional"), Way(strategy="regional", dynamic=True)),
                allowed=at_least(1.0),
                where=(SIZES,),
            ),
            Part(
                says="nothing is compiled later",
                figure=Recompiles(Way(impl="upstream-tuned", strategy="regional")),
                allowed=at_most(0),
                where=(SIZES,),
            ),
        ),
    ),
    Claim(
        number=20,
        title="Variable lengths in fine-tuning",
        text="Variable-length BERT fine-tuning: recompiles take an epoch from 45 s to 71 s, `dynamic=True` or padding "
        "brings 38 s; after about 8 recompiles it gives up.",
        parts=(
            Part(
                says="a graph for each length",
                figure=Epoch(FULL, EAGER, steps=STEPS),
                allowed=around(45 / 71),
                where=(EPOCH_STATIC,),
            ),
            Part(says="dynamic=True", figure=Speed(DYNAMIC, EAGER), allowed=around(45 / 38), where=(EPOCH,)),
            Part(says="padding", figure=Speed(PADDED, EAGER), allowed=around(45 / 38), where=(EPOCH,)),
            Part(
                says="some recompiles and then none",
                figure=Recompiles(FULL),
                allowed=between(LIMIT - 1, LIMIT),
                where=(EPOCH_STATIC,),
            ),
        ),
    ),
    Claim(
        number=25,
        title="A training loop of 7B",
        text="A 7B training loop halves (82 → 44 s an epoch) by max-autotune and fixing dynamic shapes.",
        parts=(
            Part(
                says="max-autotune at one shape",
                figure=Speed(AUTOTUNE, EAGER),
                allowed=around(82 / 44),
                where=(subject("llama-7b-8", "2x2048", workload="train"),),
            ),
        ),
        not_here="what fixing the shapes saved in that loop: how much its batches differed is not told. For batches of "
        "many lengths see the claims on fine-tuning.",
    ),
    Claim(
        number=30,
        title="An epoch of fine-tuning",
        text="Fine-tuning an epoch: 73 → 38 s by max-autotune and fixed lengths.",
        parts=(
            Part(
                says="max-autotune and one length",
                figure=Speed(replace(PADDED, mode="max-autotune"), EAGER),
                allowed=around(73 / 38),
                where=(EPOCH,),
            ),
        ),
    ),
)
