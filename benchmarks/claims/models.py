"""Claims with figures for one model."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import Claim, Part, Where, around, at_least, between
from benchmarks.claims.figures import CompileSeconds, PeakMemory, Speed
from benchmarks.claims.races import EAGER, FULL, GCN, RESNET, TRAIN_RESNET, UNET, subject

COMPILED, MEMORY = Speed(FULL, EAGER), PeakMemory(FULL, EAGER)
CORA = replace(GCN, input="cora")
LLAMA_TRAIN = subject("llama-7b-8", "2x2048", workload="train")
LLAMA_PREFILL = subject("llama-7b-8", "prefill-1x2048")
LLAMA_DECODE = subject("llama-7b-8", "decode-1x1024")
POLICY = subject("ppo-vit", "256")


def _three(
    inference: Where, training: Where, infer: tuple[float, float], train: tuple[float, float], most: tuple[float, float]
) -> tuple[Part, ...]:
    """Training, inference and memory: what many claims consist of."""
    return (
        Part(says="training", figure=COMPILED, allowed=between(train[0], train[1]), where=(training,)),
        Part(says="inference", figure=COMPILED, allowed=between(infer[0], infer[1]), where=(inference,)),
        Part(says="memory", figure=MEMORY, allowed=between(most[0], most[1]), where=(training, inference)),
    )


MODELS = (
    Claim(
        number=10,
        title="GCN on Cora",
        text="GCN on Cora, 2 layers: training +30–34 %, inference +40–48 %, memory ±5 %.",
        parts=_three(CORA, replace(CORA, workload="train"), (1.40, 1.48), (1.30, 1.34), (0.95, 1.05)),
    ),
    Claim(
        number=11,
        title="GAT on Cora",
        text="GAT on Cora, 2 layers: training +20–28 %, inference +30–42 %, memory ±8 %.",
        parts=_three(
            replace(CORA, model="gat"),
            replace(CORA, model="gat", workload="train"),
            (1.30, 1.42),
            (1.20, 1.28),
            (0.92, 1.08),
        ),
    ),
    Claim(
        number=12,
        title="SAGE with NeighborLoader",
        text="SAGE with NeighborLoader: training +15–22 %, inference +25–38 %, memory +10–15 % (dynamic shapes).",
        parts=(
            Part(
                says="training",
                figure=COMPILED,
                allowed=between(1.15, 1.22),
                where=(replace(CORA, model="graphsage", input="arxiv-sampled", workload="train"),),
            ),
            Part(
                says="memory",
                figure=MEMORY,
                allowed=between(1.10, 1.15),
                where=(replace(CORA, model="graphsage", input="arxiv-sampled", workload="train"),),
            ),
        ),
        not_here="inference over sampled neighbourhoods. A trained model is mostly run over the whole graph, without "
        "sampling.",
    ),
    Claim(
        number=13,
        title="ResNet-50",
        text="ResNet-50 ImageNet: training +18–25 %, inference +15–20 %, memory +5–10 %.",
        parts=_three(RESNET, TRAIN_RESNET, (1.15, 1.20), (1.18, 1.25), (1.05, 1.10)),
    ),
    Claim(
        number=14,
        title="A decoder of 7B",
        text="Decoder LLM 7B: training +10–20 %, inference +20–35 %, memory +15–25 %; prefill gains more than decode.",
        parts=(
            Part(says="training", figure=COMPILED, allowed=between(1.10, 1.20), where=(LLAMA_TRAIN,)),
            Part(says="inference", figure=COMPILED, allowed=between(1.20, 1.35), where=(LLAMA_PREFILL, LLAMA_DECODE)),
            Part(
                says="memory",
                figure=MEMORY,
                allowed=between(1.15, 1.25),
                where=(LLAMA_TRAIN, LLAMA_PREFILL, LLAMA_DECODE),
            ),
            Part(
                says="prefill gains more than decode",
                figure=COMPILED,
                allowed=at_least(1.0),
                where=(LLAMA_PREFILL,),
                against=LLAMA_DECODE,
            ),
        ),
    ),
    Claim(
        number=15,
        title="PPO with a ViT",
        text="PPO with a ViT: 0–10 % training, −5 to +5 % inference.",
        parts=(
            Part(
                says="training", figure=COMPILED, allowed=between(1.0, 1.10), where=(replace(POLICY, workload="train"),)
            ),
            Part(says="inference", figure=COMPILED, allowed=between(0.95, 1.05), where=(POLICY,)),
        ),
    ),
    Claim(
        number=18,
        title="Diffusion",
        text="Diffusion with compile: 20 % less per step, 60–120 s to compile; with gradient checkpointing still "
        "10–15 % end to end.",
        parts=(
            Part(says="20 % less per step", figure=COMPILED, allowed=around(1 / (1 - 0.20)), where=(UNET,)),
            Part(says="60–120 s to compile", figure=CompileSeconds(FULL), allowed=between(60, 120), where=(UNET,)),
        ),
        not_here="a diffusion model trained with checkpointing; its training is raced without. Checkpointing with "
        "compile is measured on a language model, see the claim on gradient checkpointing.",
    ),
)
