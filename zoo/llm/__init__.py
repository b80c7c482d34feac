"""Decoder-only language models: Llama, Mistral, Qwen2 and Qwen3 with a static cache."""

from zoo.llm.convert import WEIGHTS
from zoo.llm.convert import load as load
from zoo.llm.convert import quantize as quantize
from zoo.llm.convert import save as save
from zoo.llm.generate import GenerationOptions as GenerationOptions
from zoo.llm.generate import KVCache as KVCache
from zoo.llm.generate import Session as Session
from zoo.llm.model import LLM as LLM
from zoo.llm.model import PRESETS, example_inputs
from zoo.llm.model import LLMConfig as LLMConfig
from zoo.llm.model import LLMHead as LLMHead
from zoo.llm.model import LLMLayer as LLMLayer
from zoo.llm.model import RMSNorm as RMSNorm
from zoo.llm.model import RopeScaling as RopeScaling
from zoo.ops.attention import attend as attend
from zoo.registry import Family, register

register(Family(presets=PRESETS, example_inputs=example_inputs, upstream_packages=("transformers",), weights=WEIGHTS))
