"""A decoder of the widths of seven billion weights, with eight of its thirty-two layers.

In full its weights, gradients and moments would leave no room for the reference that results are checked against. The
output product weighs more here than in the whole model: four times as much beside the layers.
"""

from __future__ import annotations

from benchmarks.families import llm, llm_train
from benchmarks.families.base import PROCESS_BYTES, Prepared
from benchmarks.families.llm_steps import task_of
from benchmarks.plan import Case
from zoo.llm import LLMConfig
from zoo.llm.config import PRESETS

CONFIGS = {
    "llama-7b-8": LLMConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "llama-small": PRESETS["llm-debug"],
}
_INFERENCE, _TRAINING = ("prefill-1x2048", "decode-1x1024"), ("2x2048",)
INPUTS = (*_INFERENCE, *_TRAINING, "prefill-1x32", "decode-1x64", "2x16")


def default_races(workload: str) -> list[tuple[str, str]]:
    """(model, input) pairs of a plain run on a GPU."""
    return [("llama-7b-8", name) for name in (_INFERENCE if workload == "inference" else _TRAINING)]


def refuses(case: Case) -> str | None:
    """Why there is no such case, names that exist taken for granted; or None."""
    if case.input not in INPUTS:
        return f"{case.model} has the inputs {', '.join(INPUTS)}"
    config = CONFIGS[case.model]
    if case.workload == "train":
        return llm_train.cannot(case, config)
    if llm_train.rows_of(case.input) is not None:
        return f"{case.input} is an input of training; inference takes decode-BxS or prefill-BxT"
    slots = task_of(case.input).slots
    if slots > config.max_position_embeddings:
        return f"{case.input} needs {slots} positions, and {case.model} has {config.max_position_embeddings}"
    return None


def memory_bytes(case: Case) -> int:
    """As of the language models."""
    config = CONFIGS[case.model]
    estimate = llm_train.memory if case.workload == "train" else llm.memory
    return estimate(case, config, reference=True) + PROCESS_BYTES


def prepare(case: Case, *, seed: int) -> Prepared:
    """As of the language models, whose arms these are."""
    return (llm_train.prepare if case.workload == "train" else llm.prepare)(case, CONFIGS[case.model], seed=seed)
