"""What a call of a foreign model is: the model, ``generate()`` or continuous batching.

Shapes: N prompts, T tokens, V words.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from benchmarks.plan import CUDA_GRAPH_MODES


class Call(nn.Module):
    """One call of the model, of whose output the first tensor is returned."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        """The model's own inputs -> its first output."""
        output = self.model(**inputs)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return first


class Generation(Call):
    """``generate()`` along a text that is given, so that all arms read the same; returns the last token's logits.

    A static cache is kept from call to call, so that no address changes. transformers compiles a decoding step itself
    where the cache is static: here for ``reduce-overhead`` alone. A captured step takes the same place.
    """

    def __init__(self, model: Any, prompt: Tensor, text: Tensor, *, static: bool) -> None:
        super().__init__(model)
        self.prompt, self.chosen = prompt.shape[1], text[0].tolist()
        self.how: dict[str, Any] = {"max_new_tokens": text.shape[1], "do_sample": False, "disable_compile": True}
        self.kept: Any = None
        self.step: Any = None
        if static:
            from transformers import StaticCache

            # Its name changed within transformers 5.
            self.name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            self.kept = self.how[self.name] = StaticCache(
                config=model.config, max_cache_len=self.prompt + text.shape[1]
            )

    def forward(self, **inputs: Any) -> Tensor:
        """``input_ids`` [1, T] -> logits [1, V]."""
        if self.kept is not None:
            self.kept.reset()
        mask = torch.ones_like(inputs["input_ids"])
        self.model.generate(**inputs, attention_mask=mask, logits_processor=[self._follow], **self.how)
        return self.logits

    def of(self, logits: Tensor) -> Tensor:
        """What is returned, of the logits [1, T, V] of all tokens."""
        return logits[:, -1]

    def _follow(self, ids: Tensor, scores: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # these are a copy of the step's output
        self.logits = scores
        wanted = torch.zeros_like(scores)
        wanted[:, self.chosen[ids.shape[1] - self.prompt]] = 1.0
        return wanted

    def compile_full(self, _: Any, *, mode: str | None, **options: Any) -> None:
        """The model, or with CUDA graphs a decoding step by transformers."""
        if mode in CUDA_GRAPH_MODES:
            self._compile_steps(mode=mode, **options)
        else:
            self.model.compile(mode=mode, **options)

    def capture(self) -> None:
        """Have a decoding step captured in the next call, and replayed from then on."""
        self._compile_steps()
        self.model.get_compiled_call = lambda _: self._replay

    def _compile_steps(self, **options: Any) -> None:
        from transformers import CompileConfig

        config = CompileConfig(**options)
        config._compile_all_devices = True
        self.how |= {"disable_compile": False, "compile_config": config}

    def _replay(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if self.step is None:
            # The runs before a capture write into the cache and move it on.
            held = [each for layer in self.kept.layers for each in vars(layer).values() if isinstance(each, Tensor)]
            before = [each.clone() for each in held]
            step = partial(lambda model, **given: model(**given).logits, self.model)
            self.step = zoo.cuda_graph(step, kwargs=inputs, static=[self.name], clone_outputs=False)
            for each, value in zip(held, before, strict=True):
                each.copy_(value)
        return CausalLMOutputWithPast(logits=self.step(**inputs))


class Batching(Call):
    """transformers' continuous batching of N prompts in its own thread; returns what their first tokens' odds were.

    Later tokens are not compared: with random weights they part where two are as likely.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        super().__init__(model)
        self.tokens = tokens
        self.how: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 512, "return_logprobs": True}
        self.manager: Any = None
        self.capture = None

    def forward(self, **inputs: Any) -> Tensor:
        """``input_ids`` [N, T] -> log probabilities [N]."""
        if self.manager is None or self.manager.model is not self.model:
            self._start()
        wanted = self.manager.add_requests(inputs["input_ids"].tolist(), max_new_tokens=self.tokens)
        found: dict[str, Any] = {}
        while len(found) < len(wanted):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result
            if (result is None and not self.manager.is_running()) or (result is not None and result.error):
                raise RuntimeError(f"continuous batching ended: {result and result.error}")
        return torch.tensor([found[each].logprobs[0] for each in wanted])

    def of(self, logits: Tensor) -> Tensor:
        """What is returned, of the logits [N, T, V] of the prompts."""
        return logits[:, -1].log_softmax(-1).amax(-1).cpu()

    def compile_full(self, _: Any, **options: Any) -> None:
        """The step, as transformers does it: its attention and sampling included."""
        from transformers import CompileConfig

        config = CompileConfig(**{**options, "dynamic": True})
        self.how |= {"varlen_compile_config": config, "decode_compile_config": config}
        self.stop()

    def _start(self) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self.stop()
        generation = GenerationConfig(max_new_tokens=self.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(**self.how)
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self.manager.start()

    def stop(self) -> None:
        """End transformers' thread, without which the process does not end by itself."""
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager = None
