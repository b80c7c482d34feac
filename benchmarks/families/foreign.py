"""Models of other libraries at full size with random weights: eager, compiled whole, and compiled by regions.

``upstream`` arms are eager, whole and by the library's own helper; ``zoo`` arms use ``zoo.compile_regions`` on the same
model, which declares no regions.

Shapes: B rows, N prompts, T tokens, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from benchmarks import conformance as foreign
from benchmarks.families import base
from benchmarks.plan import CUDA_GRAPH_MODES, Case
from zoo.engine.compat import compile_limit_kwargs

ACTIVATIONS = 4 << 30  # of the largest call, its cache included
DYNAMIC, STATIC, CONTINUOUS, DEBUG = "dynamic", "static", "continuous", "-debug"
BYTES_FORMULA = "Weights, for each token that is generated. A lower bound: inputs, activations and caches are left out."


@dataclass(frozen=True)
class Model:
    """A model, inputs of one call by name, and the number of ``unit`` in them."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, Callable[[], dict[str, Any]]]
    count: int
    unit: str


tiny = foreign.MODELS
# fmt: off
MODELS = {
    "llama-1b": Model(foreign.hf("LlamaForCausalLM", None, vocab_size=128256, hidden_size=2048, num_hidden_layers=16,
                                 num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
                                 tie_word_embeddings=True, eos_token_id=None, pad_token_id=0).make,
                      {**dict.fromkeys(("dynamic-64", "static-64"), partial(foreign.tokens, 64, rows=1)),
                       "continuous-64": partial(foreign.tokens, 64, rows=32)}, 64, "tokens"),
    "vit-l": Model(foreign.hf("ViTModel", None, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                              intermediate_size=4096).make,
                   {"8x224": partial(foreign.pixels, 8, pixels=224)}, 8, "images"),
    "flux-4-8": Model(foreign.diffusers("FluxTransformer2DModel", None, num_layers=4, num_single_layers=8).make,
                      {"1x1024": partial(foreign.flux, 1024, 512, 64, 4096, 768)}, 1, "images"),
    "convnext-base": Model(foreign.vision("convnext_base", None).make,
                           {"8x224": partial(foreign.images, 8, pixels=224)}, 8, "images"),
    "whisper-small": Model(foreign.hf("WhisperForConditionalGeneration", None, vocab_size=51865, d_model=768,
                                      encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                                      decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072).make,
                           {"8x30s": partial(foreign.speech, 64, 8, 80, 3000)}, 8, "clips"),
    "llama-debug": Model(tiny["transformers Llama"].make,
                         {**dict.fromkeys(("dynamic-4", "static-4"), partial(foreign.tokens, 6, rows=1)),
                          "continuous-4": partial(foreign.tokens, 6)}, 4, "tokens"),
    "vit-debug": Model(tiny["transformers ViT"].make, {"2x32": partial(foreign.pixels, 2)}, 2, "images"),
    "flux-debug": Model(tiny["diffusers FluxTransformer2DModel"].make, {"1x64": partial(foreign.flux, 4)}, 1, "images"),
    "convnext-debug": Model(tiny["torchvision convnext_tiny"].make, {"2x32": partial(foreign.images, 2)}, 2, "images"),
    "whisper-debug": Model(tiny["transformers Whisper"].make, {"2x0.4s": partial(foreign.speech, 6)}, 2, "clips"),
}
# fmt: on


class ForeignWorkload(base.Workload):
    """Inference of models of transformers, diffusers and torchvision that the zoo does not implement.

    ``BxP``: images of P pixels a side; ``Bx30s``: speech and 64 tokens of its text, through encoder and decoder;
    ``dynamic-N``, ``static-N``: N tokens by ``generate()`` with transformers' cache of that kind; ``continuous-N``: N
    tokens of each of many prompts by its continuous batching.
    """

    family = "foreign"
    models = tuple(MODELS)
    inputs = tuple(dict.fromkeys(name for model in MODELS.values() for name in model.inputs))
    cpu_race = ("vit-debug", "2x32")
    gpu_races = tuple((name, given) for name, model in MODELS.items() if DEBUG not in name for given in model.inputs)

    def cannot(self, case: Case) -> str | None:
        if case.input not in MODELS[case.model].inputs:
            return f"the inputs of {case.model} are {', '.join(MODELS[case.model].inputs)}"
        if case.impl == "zoo" and (case.strategy in ("eager", "full") or not case.kernels):
            return f"the model is the library's, {case.strategy} is upstream's arm"
        if case.strategy == "hierarchical":
            return "the model declares no regions"
        if case.impl == "upstream-tuned" and case.strategy != "regional":
            return "only regional has a recompile limit to raise"
        if case.input.startswith((DYNAMIC, CONTINUOUS)) and (case.cuda_graph or case.mode in CUDA_GRAPH_MODES):
            return "its steps are of many sizes"
        if case.input.startswith(STATIC) and case.cuda_graph and case.impl != "zoo":
            return "transformers captures a step in full reduce-overhead"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Bytes of the drawn float32 weights and of those in the case's dtype; the reference is a float32 model too."""
        weights, small = parameters(case.model), DEBUG in case.model
        return weights * (4 * (2 if reference else 1) + base.dtype_of(case).itemsize) + (0 if small else ACTIVATIONS)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> base.Prepared:
        told, kind, model = MODELS[case.model], case.input.partition("-")[0], drawn(case, seed)
        torch.manual_seed(seed)
        inputs = base.converted(told.inputs[case.input](), case.device, base.dtype_of(case))
        run: Generation | Batching | None = None
        step, whole, count = Call(model), inputs, told.count
        if kind in (DYNAMIC, STATIC):
            text = torch.randint(3, model.config.vocab_size, (1, count)).to(case.device)
            step = run = Generation(model, inputs["input_ids"], text, static=kind == STATIC)
            whole = {"input_ids": torch.cat([inputs["input_ids"], text[:, :-1]], dim=1)}  # nothing follows the last
        elif kind == CONTINUOUS:
            step = run = Batching(model, told.count)
            count *= len(inputs["input_ids"])

        def compile_regions(step: Any, **options: Any) -> None:
            if case.impl == "zoo" and kind in (DYNAMIC, CONTINUOUS):
                options["dynamic"] = None  # the default of users
            if case.impl == "zoo" and kind == CONTINUOUS:
                options["fullgraph"] = False  # transformers keeps its cache's update out of any graph
            step.model = by_regions(case, step.model, options)

        def reference() -> Tensor:
            exact = drawn(case, seed).float()
            output: Tensor = Call(exact)(**base.converted(whole, case.device, torch.float32))
            return run.of(output) if run else output

        return base.Prepared(
            model=step.eval().requires_grad_(False),
            inputs=inputs,
            compile_regions=compile_regions,
            compile_full=run and run.compile_full,
            capture=run and run.capture,
            reference=reference,
            reference_dtype="float32",
            bytes=(told.count if run else 1) * sum(each.nbytes for each in model.parameters()),
            bytes_formula=BYTES_FORMULA,
            flops=base.count_flops(Call(model), **whole),
            data="generated",
            sizes={"parameters": parameters(case.model)},
            count=count,
            unit=told.unit,
        )


@cache
def parameters(name: str) -> int:
    with torch.device("meta"):
        return base.count_parameters(MODELS[name].make())


def drawn(case: Case, seed: int) -> Any:
    """The library's model with random weights; norms and layer scales are drawn too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    with torch.device(case.device):
        model = MODELS[case.model].make()
        for weight in model.parameters():
            if weight.numel() == max(weight.shape):
                weight.data += 0.1 * torch.randn(weight.shape)
    return model.to(base.dtype_of(case)).eval()


def by_regions(case: Case, model: Any, options: dict[str, Any]) -> Any:
    """The model, compiled by the zoo or as users of its library do; torchvision has no helper."""
    if case.impl == "zoo":
        return zoo.compile_regions(model, **options)
    options |= compile_limit_kwargs() if case.impl == "upstream-tuned" else {}
    if type(model).__module__.startswith("transformers."):
        return base.accelerated(model, **options)
    if hasattr(model, "compile_repeated_blocks"):
        model.compile_repeated_blocks(**options)
    for block in [each for each in model.modules() if type(each).__name__ == "CNBlock"]:
        block.compile(**options)
    return model


# What a call is: of the model, of ``generate()``, or of continuous batching -------------------------------------------


class Call(nn.Module):
    """One call of the model; returns the first tensor of its output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        """The model's own inputs -> its first output."""
        output = self.model(**inputs)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return first


class Generation(Call):
    """``generate()`` with forced tokens, so that all arms read the same text; returns the last token's logits.

    A static cache is kept from call to call, so that no address changes. With a static cache transformers compiles a
    decoding step itself: here only for ``reduce-overhead``. A captured step replaces the same step.
    """

    def __init__(self, model: Any, prompt: Tensor, text: Tensor, *, static: bool) -> None:
        super().__init__(model)
        self.prompt, self.chosen = prompt.shape[1], text[0].tolist()
        self.how: dict[str, Any] = {"max_new_tokens": text.shape[1], "do_sample": False, "disable_compile": True}
        self.kept: Any = None
        self.step: Any = None
        if static:
            from transformers import StaticCache

            self.name, slots = base.cache_argument(model), self.prompt + text.shape[1]
            self.kept = self.how[self.name] = StaticCache(config=model.config, max_cache_len=slots)

    def forward(self, **inputs: Any) -> Tensor:
        """``input_ids`` [1, T] -> logits [1, V]."""
        if self.kept is not None:
            self.kept.reset()
        mask = torch.ones_like(inputs["input_ids"])
        self.model.generate(**inputs, attention_mask=mask, logits_processor=[self._follow], **self.how)
        return self.logits

    def of(self, logits: Tensor) -> Tensor:
        """The part of the logits [1, T, V] of all tokens that is returned."""
        return logits[:, -1]

    def _follow(self, ids: Tensor, scores: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # these are a copy of the step's output
        self.logits = scores
        wanted = torch.zeros_like(scores)
        wanted[:, self.chosen[ids.shape[1] - self.prompt]] = 1.0
        return wanted

    def compile_full(self, _: Any, *, mode: str | None, **options: Any) -> None:
        """Compile the model; with CUDA graphs transformers compiles a decoding step."""
        if mode in CUDA_GRAPH_MODES:
            self._compile_steps(mode=mode, **options)
        else:
            self.model.compile(mode=mode, **options)

    def capture(self) -> None:
        """Let the next call capture a decoding step, which later steps replay."""
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
            # Warm-up runs before a capture write into the cache and advance it.
            held = [each for layer in self.kept.layers for each in vars(layer).values() if isinstance(each, Tensor)]
            before = [each.clone() for each in held]
            step = partial(lambda model, **given: model(**given).logits, self.model)
            self.step = zoo.cuda_graph(step, kwargs=inputs, static=[self.name], clone_outputs=False)
            for each, value in zip(held, before, strict=True):
                each.copy_(value)
        return CausalLMOutputWithPast(logits=self.step(**inputs))


class Batching(Call):
    """transformers' continuous batching of N prompts in its own thread; returns their first tokens' log probabilities.

    Later tokens are not compared: with random weights they diverge at near-equal probabilities.
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
        """The part of the prompts' logits [N, T, V] that is returned."""
        return logits[:, -1].log_softmax(-1).amax(-1).cpu()

    def compile_full(self, _: Any, **options: Any) -> None:
        """Compile the step as transformers does, including attention and sampling."""
        from transformers import CompileConfig

        config = CompileConfig(**{**options, "mode": options.get("mode") or "default", "dynamic": True})
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
        """End transformers' thread, which would keep the process alive."""
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager = None


WORKLOAD = ForeignWorkload()
