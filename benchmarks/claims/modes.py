"""Claims on the modes of ``torch.compile``, and on ``fullgraph``."""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Part, at_least, at_most, between
from benchmarks.claims.figures import CompileTime, Speed, WarmUp, Way
from benchmarks.claims.races import AUTOTUNE, BERT, DECODE, EAGER, FULL, REDUCE, RESNET, RESNET_ONE, subject

CNN_ONE, CNN_LARGE = subject("cnn", "1"), subject("cnn", "256")
MLP_ONE, MLP_LARGE = subject("mlp", "1"), subject("mlp", "4096")
SMALL = (CNN_ONE, MLP_ONE, RESNET_ONE, DECODE)
LARGE = (CNN_LARGE, MLP_LARGE, RESNET, BERT)

MODES = (
    Claim(
        number=7,
        title="Which mode is best",
        text="`reduce-overhead` is best at small batch, `max-autotune` best in steady state (a further 5–10 %).",
        parts=(
            Part(
                says="reduce-overhead over default at small sizes",
                figure=Speed(REDUCE, FULL),
                allowed=at_least(1.0),
                where=SMALL,
            ),
            Part(
                says="reduce-overhead over max-autotune at small sizes",
                figure=Speed(REDUCE, AUTOTUNE),
                allowed=at_least(1.0),
                where=SMALL,
            ),
            Part(
                says="a further 5–10 % by max-autotune",
                figure=Speed(AUTOTUNE, FULL),
                allowed=between(1.05, 1.10),
                where=LARGE,
            ),
            Part(
                says="max-autotune over reduce-overhead",
                figure=Speed(AUTOTUNE, REDUCE),
                allowed=at_least(1.0),
                where=LARGE,
            ),
        ),
    ),
    Claim(
        number=19,
        title="What each mode brings and costs",
        text="Modes: default 1.4–1.8× for 10–25 % longer start, reduce-overhead 1.3–1.7× for 5–15 %, max-autotune "
        "1.8–2.2× for 2–3×.",
        parts=(
            Part(says="default", figure=Speed(FULL, EAGER), allowed=between(1.4, 1.8), where=LARGE),
            Part(says="reduce-overhead", figure=Speed(REDUCE, EAGER), allowed=between(1.3, 1.7), where=LARGE),
            Part(says="max-autotune", figure=Speed(AUTOTUNE, EAGER), allowed=between(1.8, 2.2), where=LARGE),
            Part(says="2–3× to compile", figure=CompileTime(AUTOTUNE, FULL), allowed=between(2, 3), where=LARGE),
        ),
        not_here="by how many per cent a start gets longer. How long a start takes without compiling is a matter of "
        "imports and of loading weights, which a row leaves out on purpose; seconds to compile are in every row.",
    ),
    Claim(
        number=21,
        title="fullgraph=True",
        text="`fullgraph=True` adds 10–25 % where there are many small operators.",
        parts=(
            Part(
                says="without breaks over with them",
                figure=Speed(Way(impl="upstream-tuned"), FULL),
                allowed=between(1.10, 1.25),
                where=(subject("graph-breaks", "64"),),
            ),
        ),
    ),
    Claim(
        number=23,
        title="Warm-up of reduce-overhead",
        text="Three to five warm-up calls suffice for `reduce-overhead`.",
        parts=(
            Part(
                says="calls before the steady state", figure=WarmUp(REDUCE), allowed=at_most(5), where=(*SMALL, *LARGE)
            ),
        ),
    ),
)
