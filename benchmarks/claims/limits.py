"""Claims on what lies beyond a model's kernels."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import Claim, Part, at_most
from benchmarks.claims.figures import Speed
from benchmarks.claims.races import EAGER, FULL, TRAIN_RESNET

FROM_FILES = replace(TRAIN_RESNET, input="jpeg-128x224")
# Less than this is not seen end to end.
UNSEEN = 1.05

LIMITS = (
    Claim(
        number=32,
        title="A slow loader",
        text="If the loader or post-processing dominates, kernel gains do not show end to end.",
        parts=(
            Part(says="from JPEG files", figure=Speed(FULL, EAGER), allowed=at_most(UNSEEN), where=(FROM_FILES,)),
            Part(
                says="less than from the device",
                figure=Speed(FULL, EAGER),
                allowed=at_most(1.0),
                where=(FROM_FILES,),
                against=TRAIN_RESNET,
            ),
        ),
    ),
    Claim(
        number=29,
        title="Nightly builds",
        text="Nightly builds bring a further 5–15 %.",
        not_here="rows are of releases. A nightly build is gone after some weeks, and a row that nobody can measure "
        "again is not a result.",
    ),
    Claim(
        number=31,
        title="Offloading and quantisation",
        text="Offloading and quantisation with compile still leave 10–20 % over the uncompiled baseline.",
        not_here="offloading moves weights over the bus in each call, and measures the bus. Which quantisation, and "
        "which kernels it runs on, the claim does not say, and each has another answer.",
    ),
)
