"""Claims on what compiling gains, and where."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import Claim, Part, around, at_least, at_most, between
from benchmarks.claims.figures import CompileSeconds, Kernels, Speed, Way
from benchmarks.claims.races import (
    BERT,
    EAGER,
    FULL,
    INFERENCE,
    REGIONAL,
    RESNET,
    TRAIN_BERT,
    TRAIN_LLAMA,
    TRAIN_RESNET,
    TRAINING,
    UNET,
    subject,
)

COMPILED = Speed(FULL, EAGER)
# A gain below this is little.
LITTLE = 1.1
WHOLE_STEP = subject("whole-step", "16x128", workload="train")
RECOMMENDER = subject("recommender", "16384")

GAINS = (
    Claim(
        number=1,
        title="Three well-known models",
        text="ResNet-50 inference, batch 64: 1.33× warm. BERT-base, length 128: 1.33×. Diffusion UNet step: 1.5×.",
        parts=(
            Part(says="ResNet-50", figure=COMPILED, allowed=around(1.33), where=(RESNET,)),
            Part(says="BERT-base", figure=COMPILED, allowed=around(1.33), where=(BERT,)),
            Part(says="UNet step", figure=COMPILED, allowed=around(1.5), where=(UNET,)),
        ),
    ),
    Claim(
        number=3,
        title="Inference and training in general",
        text="Inference gains 1.1–3× (average 2.27×), training 1.1–1.8× (average 1.41×).",
        parts=(
            Part(says="inference", figure=COMPILED, allowed=between(1.1, 3.0), where=INFERENCE),
            Part(says="inference on average", figure=COMPILED, allowed=around(2.27), where=INFERENCE, mean=True),
            Part(says="training", figure=COMPILED, allowed=between(1.1, 1.8), where=TRAINING),
            Part(says="training on average", figure=COMPILED, allowed=around(1.41), where=TRAINING, mean=True),
        ),
    ),
    Claim(
        number=5,
        title="One operator or many kernels",
        text="Small single-operator-dominated models gain little; models of many small kernels gain most.",
        parts=(
            Part(says="one operator", figure=COMPILED, allowed=at_most(LITTLE), where=(subject("one-operator", "64"),)),
            Part(
                says="many kernels gain more than one operator",
                figure=COMPILED,
                allowed=at_least(1.0),
                where=(subject("many-kernels", "64"),),
                against=subject("one-operator", "64"),
            ),
        ),
    ),
    Claim(
        number=6,
        title="The whole model or one module",
        text="Compile the whole model or training step, not just one module; compiling the step beats compiling the "
        "forward.",
        parts=(
            Part(
                says="the model over one module",
                figure=Speed(FULL, REGIONAL),
                allowed=at_least(1.0),
                where=(WHOLE_STEP,),
            ),
            Part(
                says="the step with its loss over without",
                figure=Speed(Way(impl="upstream-tuned"), FULL),
                allowed=at_least(1.0),
                where=(WHOLE_STEP,),
            ),
        ),
        not_here="the optimizer inside the compiled step. It is fused in every arm, which leaves a compiler "
        "nothing to join.",
    ),
    Claim(
        number=16,
        title="Recommenders",
        text="Dense MLPs over embeddings (recommenders) gain from less Python and fused pointwise work.",
        parts=(
            Part(says="gain", figure=COMPILED, allowed=at_least(LITTLE), where=(RECOMMENDER,)),
            Part(
                says="gain in training",
                figure=COMPILED,
                allowed=at_least(LITTLE),
                where=(replace(RECOMMENDER, workload="train"),),
            ),
            Part(says="fewer kernels", figure=Kernels(FULL, EAGER), allowed=at_most(1.0), where=(RECOMMENDER,)),
        ),
    ),
    Claim(
        number=27,
        title="A hundred and sixty-three models",
        text="Over 163 open-source Transformer models compile cut training time 43 % on average (fp32 21 %, AMP 51 %); "
        "90–95 % of models compile.",
        parts=(
            Part(
                says="43 % on average",
                figure=COMPILED,
                allowed=around(1 / (1 - 0.43)),
                where=(TRAIN_BERT, replace(TRAIN_BERT, dtype="float32"), TRAIN_LLAMA),
                mean=True,
            ),
            Part(
                says="21 % in fp32",
                figure=COMPILED,
                allowed=around(1 / (1 - 0.21)),
                where=(replace(TRAIN_BERT, dtype="float32"),),
            ),
            Part(says="51 % by AMP", figure=COMPILED, allowed=around(1 / (1 - 0.51)), where=(TRAIN_BERT,)),
        ),
        not_here="163 models, and which share of them compiles. There is no collection of models here; the figures are "
        "of the transformers that are raced, BERT and Llama.",
    ),
    Claim(
        number=28,
        title="A transformer, and a loop with Python in it",
        text="Transformer inference of stable shape: 18.4 → 12.6 ms after 4.8 s; a training loop with Python overhead: "
        "41.2 → 29.7 ms after 7.2 s.",
        parts=(
            Part(says="inference", figure=COMPILED, allowed=around(18.4 / 12.6), where=(BERT,)),
            Part(says="inference after 4.8 s", figure=CompileSeconds(FULL), allowed=around(4.8), where=(BERT,)),
            Part(says="training", figure=COMPILED, allowed=around(41.2 / 29.7), where=(TRAIN_BERT, TRAIN_RESNET)),
            Part(
                says="training after 7.2 s",
                figure=CompileSeconds(FULL),
                allowed=around(7.2),
                where=(TRAIN_BERT, TRAIN_RESNET),
            ),
        ),
    ),
)
