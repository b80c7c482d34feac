"""Weights in 8 bits, by torchao where it is installed: half the bytes that a decode step reads, at some accuracy."""

from __future__ import annotations

from zoo.engine.compile import plan_of
from zoo.llm.model import LLM


def quantize_int8(model: LLM) -> LLM:
    """Round the weights of all products to int8, a scale for each row, in place. Opt-in: outputs change a little.

    Activations, the cache, norms and the embedding stay as they are; so does the output product where it is tied to
    the embedding. What was rounded cannot be saved or taken to transformers.

    Args:
        model: Not compiled yet.

    Returns:
        The same model.

    Raises:
        ImportError: If torchao is not installed.
        TypeError: If the model is not of this family.
        ValueError: If its regions are compiled already.
    """
    try:
        from torchao.quantization import (  # type: ignore[import-not-found, import-untyped]
            Int8WeightOnlyConfig,
            quantize_,
        )
    except ImportError as error:
        raise ImportError("quantize_int8 needs torchao: pip install torchao") from error
    if not isinstance(model, LLM):
        raise TypeError(f"model is a {type(model).__name__}, expected a language model of the zoo")
    if plan_of(model) is not None:
        raise ValueError("the model's regions are compiled already; call zoo.uncompile(model) first")
    quantize_(model, Int8WeightOnlyConfig())
    return model


def refuse_quantized(model: LLM) -> None:
    """A ValueError for a model whose weights were rounded."""
    if any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters()):
        raise ValueError("the model's weights were rounded to int8; save or convert it before quantize_int8")
