"""Number of graphs of small models of other libraries, compiled by regions and in other ways.

python -m benchmarks.conformance --model "transformers Bert"            measure one, or all without it
python -m benchmarks.conformance --update docs/conformance.md           write what was measured into the page

Nothing is timed: a backend counts graphs and their operations, which determine compile time.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.utils import _pytree as pytree

import zoo
from benchmarks.cli import run_command
from zoo.engine.captured import tensors_in

OURS = "zoo"
COLUMNS = ("eval", "three sizes", "training", "loop")
ARMS = (OURS, "torch.compile", "accelerate", "diffusers")
COUNT = re.compile(r"([a-z.]+) (\d+) \((\d+)\)")
RULE = "|---|---|---|---|---|---|---|---|---|"


# Small models with random weights, their inputs and the way they are used ---------------------------------------------

# Numbers of images or frames. They start at two, since one is a special case in many models.
FEW = (2, 3, 4)
TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
CAUSAL = {**TINY, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None}
VISION = {**{key: TINY[key] for key in TINY if key != "vocab_size"}, "patch_size": 8, "image_size": 32}
UNET = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 2, "norm_num_groups": 4}
DIT = {"sample_size": 8, "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4}


@dataclass(frozen=True)
class Foreign:
    """A model of another library, with random weights.

    ``inputs`` gives the inputs of one call at a size (a number of tokens, images, pixels or nodes), one of ``sizes``.
    ``loop`` calls the model several times, like generation or a pipeline. ``why`` is the reason for its losses.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    sizes: tuple[int, int, int] = (6, 9, 12)
    loop: Callable[[Any], Any] | None = None
    why: str = ""


def tokens(size: int, name: str = "input_ids", rows: int = 2, **more: Any) -> dict[str, Any]:
    return {name: torch.arange(3, 3 + rows * size).view(rows, size), **more}


def both(size: int) -> dict[str, Any]:
    return {**tokens(size), **tokens(size, "decoder_input_ids")}


def images(size: int, name: str = "x", pixels: int = 32) -> dict[str, Any]:
    return {name: torch.randn(size, 3, pixels, pixels)}


def text_and_images(size: int) -> dict[str, Any]:
    return {**images(size, "pixel_values"), "input_ids": torch.arange(3, 3 + 6 * size).view(size, 6) % 50}


def speech(size: int, rows: int = 2, mels: int = 8, frames: int = 40) -> dict[str, Any]:
    return {"input_features": torch.randn(rows, mels, frames), **tokens(size, "decoder_input_ids", rows)}


def latents(size: int, channels: int = 4, name: str = "hidden_states", **more: Any) -> dict[str, Any]:
    return {name: torch.randn(size, channels, 8, 8), "timestep": torch.arange(size) + 3, **more}


def prompted(size: int, **more: Any) -> dict[str, Any]:
    return latents(size, encoder_hidden_states=torch.randn(size, 5, 16), **more)


def flux(size: int, text: int = 5, channels: int = 8, width: int = 16, pooled: int = 16) -> dict[str, Any]:
    ids = {"img_ids": torch.randn(4 * size, 3), "txt_ids": torch.zeros(text, 3), "timestep": torch.tensor([0.5])}
    streams = {"hidden_states": (1, 4 * size, channels), "encoder_hidden_states": (1, text, width)}
    drawn = {name: torch.randn(shape) for name, shape in streams.items()}
    return {**ids, **drawn, "pooled_projections": torch.randn(1, pooled)}


def video(size: int) -> dict[str, Any]:
    streams = {"hidden_states": torch.randn(1, 4, size, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16)}
    return {**streams, "timestep": torch.tensor([3.0])}


def graph(size: int) -> dict[str, Any]:
    return {"x": torch.randn(size, 8), "edge_index": torch.stack([torch.arange(size), torch.arange(size).flip(0)])}


def generate(model: Any, given: dict[str, Any] | None = None, **how: Any) -> None:
    inputs = {name: each for name, each in (given or tokens(6)).items() if not name.startswith("decoder")}
    for _ in range(2):
        model.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False, disable_compile=True, **how)


def denoise(model: Any, inputs: Callable[[int], dict[str, Any]]) -> None:
    for step in range(5):
        model(**{**inputs(2), "timestep": torch.tensor([0.9 - step / 10])})


def decode(model: Any) -> None:
    """Encode once and decode twice, like a pipeline."""
    hidden = model.encode(torch.randn(2, 3, 16, 16)).latent_dist.mean
    for _ in range(2):
        model.decode(hidden)


def of(library: str, name: str, inputs: Any, *args: Any, **kwargs: Any) -> Foreign:
    """A model by class name; arguments are those of the class, or in transformers those of its configuration."""
    about = {key: kwargs.pop(key) for key in ("sizes", "loop", "why") if key in kwargs}

    def make() -> nn.Module:
        cls = getattr(importlib.import_module(library), name)
        return cls(cls.config_class(**kwargs)) if library == "transformers" else cls(*args, **kwargs)  # type: ignore[no-any-return]

    return Foreign(make, inputs, **about)


hf, diffusers, timm = (partial(of, library) for library in ("transformers", "diffusers", "timm.models"))
vision, gnn = partial(of, "torchvision.models", sizes=FEW), partial(of, "torch_geometric.nn", sizes=(12, 15, 18))
pixels = partial(images, name="pixel_values")
# fmt: off
THREE_SHAPES = "five convolutions of three shapes, one layer each, are too few to gain by regions"
SPEECH = {"vocab_size": 50, "d_model": 16, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 2,
          "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0,
          "eos_token_id": None, "decoder_start_token_id": 1}
MODELS: dict[str, Foreign] = {
    "transformers Bert": hf("BertModel", tokens, **TINY),
    "transformers DistilBert": hf("DistilBertModel", tokens, vocab_size=50, dim=16, n_layers=4, n_heads=2,
                                  hidden_dim=32),
    "transformers Albert": hf("AlbertModel", tokens, embedding_size=8, **TINY),
    "transformers DebertaV2": hf("DebertaV2Model", tokens, relative_attention=True, pos_att_type=["p2c", "c2p"],
                                 **TINY),
    "transformers ModernBert": hf("ModernBertModel", tokens, pad_token_id=0, **TINY,
                                  why="each layer passes its sliding window on, and this attention leaves it unread"),
    "transformers GPT2": hf("GPT2LMHeadModel", tokens, loop=generate, vocab_size=50, n_embd=16, n_layer=4, n_head=2,
                            eos_token_id=None, pad_token_id=0),
    "transformers OPT": hf("OPTForCausalLM", tokens, loop=generate, ffn_dim=32, word_embed_proj_dim=16, layerdrop=0.5,
                           **CAUSAL),
    "transformers Llama": hf("LlamaForCausalLM", tokens, loop=generate, **CAUSAL),
    "transformers Llama, static cache": hf("LlamaForCausalLM", tokens,
                                           loop=partial(generate, cache_implementation="static"), **CAUSAL),
    "transformers Qwen3": hf("Qwen3ForCausalLM", tokens, loop=generate, head_dim=8, **CAUSAL),
    "transformers Gemma3": hf("Gemma3ForCausalLM", tokens, loop=generate, head_dim=8, sliding_window=8,
                              layer_types=["sliding_attention", "full_attention"] * 2, **CAUSAL),
    "transformers Mixtral": hf("MixtralForCausalLM", tokens, loop=generate, num_local_experts=4, **CAUSAL),
    "transformers T5": hf("T5ForConditionalGeneration", both, loop=generate, vocab_size=50, d_model=16, d_kv=8, d_ff=32,
                          num_layers=4, num_heads=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
                          why="accelerate reaches torch's recompile limit in the first call, then blocks run eagerly"),
    "transformers Bart": hf("BartForConditionalGeneration", both, loop=generate, forced_eos_token_id=None,
                            max_position_embeddings=64, **SPEECH),
    "transformers Whisper": hf("WhisperForConditionalGeneration", speech, loop=partial(generate, given=speech(2)),
                               num_mel_bins=8, max_source_positions=20, max_target_positions=40, bos_token_id=1,
                               suppress_tokens=None, begin_suppress_tokens=None, **SPEECH),
    "transformers Wav2Vec2": hf("Wav2Vec2Model", lambda size: {"input_values": torch.randn(2, 200 * size)},
                                conv_dim=(8, 8), conv_kernel=(8, 4), conv_stride=(5, 4), num_feat_extract_layers=2,
                                num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.5,
                                mask_time_prob=0.0, **TINY),
    "transformers ViT": hf("ViTModel", pixels, sizes=FEW, **VISION),
    "transformers Dinov2": hf("Dinov2Model", pixels, sizes=FEW, drop_path_rate=0.2, **VISION),
    "transformers Swin": hf("SwinModel", pixels, sizes=FEW, image_size=32, patch_size=2, embed_dim=8, depths=[2, 2, 2],
                            num_heads=[2, 2, 2], window_size=4),
    "transformers ConvNext": hf("ConvNextModel", pixels, sizes=FEW, hidden_sizes=[8, 16, 32], depths=[2, 4, 2],
                                num_stages=3, drop_path_rate=0.2),
    "transformers CLIP": hf("CLIPModel", text_and_images, sizes=FEW, projection_dim=8, vision_config=VISION,
                            text_config={**TINY, "max_position_embeddings": 32, "eos_token_id": 2}),
    "diffusers UNet2DConditionModel": diffusers(
        "UNet2DConditionModel",
        lambda size: latents(size, name="sample", encoder_hidden_states=torch.randn(size, 5, 8)), sizes=FEW,
        cross_attention_dim=8, attention_head_dim=4, **UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        why="diffusers compiles the transformer blocks alone, and leaves the residual blocks eager"),
    "diffusers AutoencoderKL": diffusers(
        "AutoencoderKL", partial(images, name="sample", pixels=16), sizes=FEW, loop=decode, block_out_channels=(8, 16),
        layers_per_block=2, norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        why="torch.compile compiles forward alone, and the loop calls encode and decode, which run eagerly"),
    "diffusers DiTTransformer2DModel": diffusers(
        "DiTTransformer2DModel", lambda size: latents(size, class_labels=torch.arange(size)), sizes=FEW,
        num_embeds_ada_norm=10, norm_num_groups=1, in_channels=4, **DIT),
    "diffusers PixArtTransformer2DModel": diffusers(
        "PixArtTransformer2DModel", partial(prompted, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        sizes=FEW, cross_attention_dim=16, caption_channels=16, norm_num_groups=1, **DIT),
    "diffusers FluxTransformer2DModel": diffusers(
        "FluxTransformer2DModel", flux, loop=partial(denoise, inputs=flux), in_channels=8, num_layers=4,
        num_single_layers=4, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        pooled_projection_dim=16, axes_dims_rope=(2, 2, 4)),
    "diffusers WanTransformer3DModel": diffusers(
        "WanTransformer3DModel", video, loop=partial(denoise, inputs=video), sizes=FEW, num_attention_heads=2,
        attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=4,
        rope_max_seq_len=32),
    "torchvision resnet50": vision("resnet50", images),
    "torchvision convnext_tiny": vision("convnext_tiny", images),
    "torchvision VisionTransformer": vision("VisionTransformer", images, image_size=32, patch_size=8, num_layers=4,
                                            num_heads=2, hidden_dim=16, mlp_dim=32),
    "torchvision SwinTransformer": vision("SwinTransformer", partial(images, pixels=64), patch_size=[4, 4], embed_dim=8,
                                          depths=[2, 2, 4], num_heads=[2, 2, 2], window_size=[4, 4],
                                          stochastic_depth_prob=0.2,
                                          why="where the window covers the image the code leaves its shift unread"),
    "torchvision efficientnet_b0": vision("efficientnet_b0", images),
    "torchvision mobilenet_v3_small": vision("mobilenet_v3_small", images),
    "torch_geometric GCN": gnn("GCN", graph, 8, 16, 5, 8, why=THREE_SHAPES),
    "torch_geometric GraphSAGE": gnn("GraphSAGE", graph, 8, 16, 5, 8),
    "torch_geometric GAT": gnn("GAT", graph, 8, 16, 5, 8, why=THREE_SHAPES),
    "torch_geometric GIN": gnn("GIN", graph, 8, 16, 5, 8),
    "timm VisionTransformer": timm("VisionTransformer", images, sizes=FEW, img_size=32, patch_size=8, embed_dim=16,
                                   depth=6, num_heads=2, drop_path_rate=0.2),
    "timm ConvNeXt": timm("ConvNeXt", images, sizes=FEW, depths=(2, 2, 4, 2), dims=(8, 8, 16, 32), drop_path_rate=0.2),
    "timm SwinTransformer": timm("SwinTransformer", images, sizes=FEW, img_size=32, embed_dim=8, depths=(2, 2, 4),
                                 num_heads=(2, 2, 2), window_size=4, drop_path_rate=0.2),
    "timm rexnet_100": timm("rexnet_100", images, sizes=FEW, why="no block has weights of the same shapes as another"),
}
# fmt: on

# What they cost -------------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """A backend that counts graphs and their operations, and runs the graphs unchanged."""

    graphs: int = 0
    operations: int = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        self.operations += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return graph.forward

    def __str__(self) -> str:
        return f"{self.graphs} ({self.operations})"


def compiled(arm: str, model: Any, backend: Count) -> Any:
    """The model, compiled by one of the arms; None if its library does not offer this arm."""
    if arm == OURS:
        return zoo.compile_regions(model, backend=backend)
    if arm == "torch.compile":
        model.compile(backend=backend)  # in place, so that generate() runs it as well
    elif arm == "accelerate":
        from accelerate.utils import compile_regions

        return compile_regions(model, backend=backend)
    elif not getattr(model, "_repeated_blocks", None):
        return None
    else:
        model.compile_repeated_blocks(backend=backend)
    return model


def call(model: Any, foreign: Foreign, size: int) -> None:
    """A call at a size; in training mode also its backward."""
    outputs = model(**foreign.inputs(size))
    if model.training:
        found = [each.sum() for each in tensors_in(pytree.tree_leaves(outputs)) if each.requires_grad]
        torch.stack(found).sum().backward()


def counts(foreign: Foreign, arm: str) -> dict[str, str]:
    """Graphs and operations by column; the name of the error if a call fails."""
    found: dict[str, str] = {}
    at_sizes = [partial(call, foreign=foreign, size=size) for size in foreign.sizes]
    for first, last, calls in (
        ("eval", "three sizes", at_sizes),
        ("training", "training", at_sizes[:1]),
        ("loop", "loop", [foreign.loop] if foreign.loop else []),
    ):
        torch.compiler.reset()
        torch.manual_seed(0)
        backend = Count()
        try:
            model = compiled(arm, foreign.make().train(first == "training"), backend) if calls else None
            if model is None:
                continue
            for each in calls:
                with torch.set_grad_enabled(first == "training"):
                    each(model)
                found.setdefault(first, str(backend))
                found[last] = str(backend)
        except Exception as error:
            found = {first: type(error).__name__, last: type(error).__name__, **found}
    return found


def row(name: str, arms: Iterable[str] = ARMS) -> str:
    foreign = MODELS[name]
    reports = []
    for training in (False, True):
        with torch.set_grad_enabled(training):  # as in ``counts``
            reports.append(zoo.find_regions(foreign.make().train(training), kwargs=foreign.inputs(foreign.sizes[0])))
    regions = [f"{len(found.modules)} {found.name}" for found in reports[0].regions]
    by_arm = {arm: counts(foreign, arm) for arm in arms}
    columns = ["<br>".join(f"{arm} {by[each]}" for arm, by in by_arm.items() if each in by) for each in COLUMNS]
    predicted = ", ".join(report.graphs for report in reports)
    cells = [name, "<br>".join(regions) or "none", f"{reports[0].coverage:.0%}", predicted, *columns, foreign.why]
    return f"| {' | '.join(cells)} |"


def losses(line: str) -> list[str]:
    """Entries of a line with more operations than another arm, a wrong prediction, or no region."""
    _, _, regions, _, predicted, *columns, _, _ = (cell.strip() for cell in line.split("|"))
    found = ["no region"] if regions == "none" else []
    by_column = [{arm: (int(n), int(m)) for arm, n, m in COUNT.findall(cell.replace("<br>", " "))} for cell in columns]
    for column, cell, by_arm in zip(COLUMNS, columns, by_column, strict=True):
        if cell and OURS not in by_arm:
            found.append(f"{column} fails")
        elif regions != "none":
            found += [f"{column}: {arm}" for arm, (_, operations) in by_arm.items() if operations < by_arm[OURS][1]]
    for said, by_arm in zip(predicted.split(", "), by_column[::2], strict=True):
        at_least, graphs = said.startswith("at least"), by_arm.get(OURS, (0, 0))[0]
        if graphs < (wanted := int(said.split()[-1])) or (graphs > wanted and not at_least):
            found.append(f"predicted {said}, seen {graphs}")
    return found


def rows_of(text: str) -> dict[str, str]:
    return {name: line for line in text.splitlines() if (name := line.split(" | ")[0].removeprefix("| ")) in MODELS}


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Names in the table; all that are installed if omitted.")
    ] = None,
    update: Annotated[Path | None, typer.Option(help="Page whose lines are replaced by what is measured.")] = None,
) -> int:
    """Count graphs of foreign models, compiled by regions and otherwise."""
    warnings.simplefilter("ignore")
    text = update.read_text(encoding="utf-8") if update else ""
    lines = rows_of(text)
    for name in model or MODELS:
        if importlib.util.find_spec(name.split()[0]) is None:
            print(f"{name}: not installed")
            continue
        lines[name] = row(name)
        print(lines[name], *losses(lines[name]), sep="\n  ", flush=True)
        if update:
            start = text.index(RULE) + len(RULE)
            table = "".join(f"\n{lines[name]}" for name in MODELS if name in lines)
            update.write_text(f"{text[:start]}{table}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.conformance"))
