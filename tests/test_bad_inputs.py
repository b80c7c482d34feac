"""What does not fit (inputs, configurations, options, calls) is refused by name, with the value and the remedy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import Tensor, nn
from torchvision.models.quantization import resnet18 as quantizable

import zoo
from tests import unet_reference as reference
from tests.blocks import Block, Child, Dropping, Sequence, Stack, nested
from zoo import Region, validate
from zoo.bert import pack
from zoo.bert.model import PRESETS
from zoo.gnn import Bucket, CSRGraph, GATConv, GCNConv, GNNLayer, NeighborSampler, SAGEConv
from zoo.llm import RopeScaling
from zoo.ops.csr import mean_neighbours
from zoo.ops.images import conv_add
from zoo.ops.transformer import add_norm, gated_gelu, gated_gelu_product, short_attention
from zoo.resnet import fold_batch_norm
from zoo.training import AdamW, LinearCrossEntropy, TrainingStep, checkpoint_regions
from zoo.training.checkpointing import restores_random_state
from zoo.unet import Sampler, TextKeysValues, TimeShifts, make_schedule

IDS = torch.ones(2, 5, dtype=torch.int64)
MASK = torch.ones_like(IDS)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 4]])
X = torch.randn(5, 12)


def to_node(value: int) -> Tensor:
    """The edges, one of which comes from this node."""
    return EDGES.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(value))


GRAPHS = [
    ({"edge_index": to_node(5)}, ValueError, r"source 5, but there are 5 nodes \(0 to 4\)"),
    ({"edge_index": to_node(5).flip(0)}, ValueError, "destination 5, but there are 5 nodes"),
    ({"edge_index": to_node(-1)}, ValueError, "holds source -1"),
    ({"edge_index": EDGES.int()}, TypeError, r"torch\.int32, expected int64; use edge_index\.to\(torch\.int64\)"),
    ({"edge_index": EDGES.t()}, ValueError, r"shape \[3, 2\], expected \[2, E\]; transpose it"),
    ({"edge_index": torch.eye(5).to_sparse()}, TypeError, r"torch\.sparse_coo, expected a dense"),
    ({"edge_index": EDGES.to("meta")}, ValueError, r"edge_index is on meta and x on cpu; move one of them"),
    ({"x": X[:, :7]}, ValueError, r"x has shape \[5, 7\], expected \[N, 12\]"),
    ({"x": X.double()}, TypeError, r"x is torch\.float64 and the weights torch\.float32"),
    ({"x": X.to("meta")}, ValueError, "x is on meta and the weights on cpu"),
]  # fmt: skip
# What is wrong with the inputs of each model: new values, or what is made of the example's.
BAD: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "bert-debug": [
        ({"input_ids": IDS.float()}, TypeError, "input_ids is torch.float32, expected int64 or int32"),
        ({"input_ids": IDS[:, :0]}, ValueError, r"input_ids has shape \[2, 0\]"),
        ({"input_ids": IDS * 128}, ValueError, "values from 128 to 128, but vocab_size is 128: pass 0"),
        ({"input_ids": IDS.repeat(1, 13)}, ValueError, "input_ids has 65 tokens, but the model has 64 positions"),
        ({"attention_mask": IDS[:1]}, ValueError, r"attention_mask has shape \[1, 5\], expected \[2, 5\]"),
        ({"token_type_ids": IDS[:, :3]}, ValueError, r"token_type_ids has shape \[2, 3\]"),
        ({"token_type_ids": IDS * 2}, ValueError, "values from 2 to 2, but type_vocab_size is 2"),
        ({"position_ids": IDS[0]}, ValueError, r"position_ids has shape \[5\], expected \[2, 5\] or \[1, 5\]"),
        ({"position_ids": IDS * 64}, ValueError, "position_ids has values from 64 to 64"),
        ({"labels": torch.tensor([0, 1])}, ValueError, "labels given, but head 'pooled' takes none"),
        ({"start_positions": torch.tensor([0, 1])}, ValueError, "for head 'question-answering', and this is 'pooled'"),
    ],
    "llm-debug": [
        ({"input_ids": torch.ones(2, 3)}, TypeError, "torch.float32, expected int64"),
        ({"input_ids": IDS.repeat(1, 103)}, ValueError, "515 tokens, but the model has 512"),
        ({"input_ids": torch.tensor([[3, 256]])}, ValueError, "from 3 to 256, but vocab_size is 256: pass 0 to 255"),
        ({"position_ids": torch.ones(2, 5)}, TypeError, "position_ids is torch.float32"),
        ({"position_ids": torch.arange(508, 513)[None]}, ValueError, "508 to 512, but max_position_embeddings is 512"),
        ({"position_ids": torch.arange(4)[None]}, ValueError, r"position_ids has shape \[1, 4\]"),
        ({"attention_mask": torch.ones(2, 4)}, ValueError, r"attention_mask has shape \[2, 4\]"),
        ({"cache": 3}, TypeError, "make_cache"),
        ({"logits_to_keep": -1}, ValueError, "logits_to_keep is -1"),
        ({"logits_to_keep": torch.ones(2)}, TypeError, "logits_to_keep is torch.float32"),
        ({"logits_to_keep": IDS[:1].repeat(3, 1)}, ValueError, r"expected \[L\] or \[2, L\]"),
    ],
    "resnet-debug": [
        ({"images": torch.zeros(2, 3, 8, 8).byte()}, TypeError, r"uint8, expected torch\.float32;.*transforms\(\) of"),
        ({"images": torch.zeros(2, 3, 8, 8).half()}, TypeError, r"images\.to\(torch\.float32\), or torch\.autocast"),
        ({"images": torch.zeros(2, 4, 8, 8)}, ValueError, r"\[2, 4, 8, 8\], expected \[N, 3, H, W\];"),
        ({"images": torch.zeros(2, 8, 8, 3)}, ValueError, r"images\.permute\(0, 3, 1, 2\) puts channels first"),
        ({"images": torch.zeros(3, 8, 8)}, ValueError, r"images\[None\] makes a batch of one image"),
        ({"images": torch.zeros(0, 3, 8, 8)}, ValueError, r"shape \[0, 3, 8, 8\], expected .*none of them 0"),
        ({"images": torch.zeros(1, 3, 8, 8, device="meta")}, ValueError, "images is on meta and the weights on cpu"),
    ],
    "gcn-debug": GRAPHS,
    "gat-debug": GRAPHS,
    "graphsage-debug": GRAPHS,
    "unet-debug": [
        ({"sample": lambda x: x.long()}, TypeError, r"torch\.int64 and the weights torch\.float32"),
        ({"sample": lambda x: x[0]}, ValueError, r"sample\[None\] makes a batch of one sample"),
        ({"sample": lambda x: x[:, :3]}, ValueError, r"\[2, 3, 16, 16\], expected \[B, 4, H, W\];"),
        ({"sample": lambda x: x.permute(0, 2, 3, 1)}, ValueError, r"permute\(0, 3, 1, 2\)"),
        ({"sample": lambda x: x[..., :14, :15]}, ValueError, "14 × 15, which 3 levels cannot .* a multiple of 4"),
        ({"encoder_hidden_states": None}, TypeError, "encoder_hidden_states is a NoneType"),
        ({"encoder_hidden_states": lambda x: x[..., :20]}, ValueError, r"\[B, L, 24\]: the text encoder must be"),
        ({"encoder_hidden_states": lambda x: x[:1]}, ValueError, ", a row for each row of the sample, which guidance"),
        ({"encoder_hidden_states": TextKeysValues(torch.zeros(2, 7, 9))}, ValueError, "this model's text_keys_values"),
        ({"timestep": True}, TypeError, "timestep is True, expected a number"),
        ({"timestep": torch.arange(3)}, ValueError, r"timestep has shape \[3\], expected \[\], \[1\] or \[2\]"),
        ({"timestep": TimeShifts(torch.zeros(5, 1, 304))}, ValueError, "take one step's of a whole run"),
        ({"timestep_cond": torch.zeros(2, 8)}, ValueError, "has no time_cond_proj_dim: leave it out"),
        ({"added_cond_kwargs": {"image_embeds": X}}, ValueError, r"has \['image_embeds'\], and this model takes \[\]"),
        ({"encoder_attention_mask": torch.ones(2, 8)}, ValueError, r"\[2, 8\], expected \[2, 7\]: 1 is seen"),
        ({"attention_mask": torch.ones(2, 256)}, ValueError, "attention_mask is given, which is not supported"),
        ({"cross_attention_kwargs": {"gligen": {}}}, ValueError, r"has \['gligen'\], and only a scale of 1"),
        ({"mid_block_additional_residual": X}, ValueError, r"additional_residual has shape \[5, 12\], expected"),
        ({"down_block_additional_residuals": ()}, ValueError, "has 0 tensors, expected 6"),
    ],
    "unet-xl-debug": [
        ({"added_cond_kwargs": None}, ValueError, r"added_cond_kwargs has \[\], and this model takes \['text_"),
        ({"added_cond_kwargs": lambda given: given | {"hint": 1}}, ValueError, "has .'hint', 'text_embeds'"),
        (
            {"added_cond_kwargs": lambda given: given | {"time_ids": given["time_ids"][:, :5]}},
            ValueError, r"12 \+ 5 × 8 = 52 channels; the model takes 60",
        ),
        (
            {"added_cond_kwargs": lambda given: given | {"time_ids": given["time_ids"][:1]}},
            ValueError, r"time_ids has shape \[1, 6\], expected \[2, Y\]",
        ),
        (
            {"added_cond_kwargs": lambda given: given | {"text_embeds": given["text_embeds"][0]}},
            ValueError, r"expected \[2, X\]",
        ),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in BAD.items() for case in cases]


def inputs_of(name: str, model: Any) -> dict[str, Any]:
    if name.startswith("unet"):
        return zoo.example_inputs(model, tokens=7)
    if name in ("bert-debug", "llm-debug"):
        return {"input_ids": IDS}
    return zoo.example_inputs(model) if name == "resnet-debug" else {"x": X, "edge_index": EDGES}


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"), CASES, ids=[f"{name}: {words}" for name, *_, words in CASES]
)
def test_bad_inputs_are_named_before_anything_runs(name, changes, error, words):
    model: Any = zoo.create(name)
    for module in model.modules():
        # UNets project their timesteps before they look at the text.
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Embedding, GNNLayer)):
            module.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    inputs = inputs_of(name, model)
    for key, change in changes.items():
        inputs[key] = change(inputs[key]) if callable(change) else change
    with pytest.raises(error, match=words), torch.no_grad():
        model(**inputs)


def test_residuals_and_a_further_time_condition_of_another_shape_are_named() -> None:
    model = zoo.create("unet-debug")
    inputs, given = zoo.example_inputs(model), reference.controlnet(model.config)
    down, middle = list(given["down_block_additional_residuals"]), given["mid_block_additional_residual"]
    down[2] = down[2][:, :3]
    for change, words in (
        ({"down_block_additional_residuals": down}, r"residuals\[2\] has shape \[2, 3, 8, 8\], expected \[2, 16, 8, 8"),
        ({"mid_block_additional_residual": middle[..., :2]}, r"residual has shape \[2, 32, 4, 2\], expected \[2, 32"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**inputs, **{**given, **change})
    model: Any = zoo.create("unet-debug", time_cond_proj_dim=8)
    inputs = zoo.example_inputs(model)
    model(**inputs)
    with pytest.raises(ValueError, match=r"timestep_cond has shape \[2, 7\], expected \[2, 8\]"):
        model(**inputs, timestep_cond=torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"timesteps has shape \[2, 3\], expected \[B\] or \[steps, 1\]"):
        model.time_shifts(torch.zeros(2, 3))


PAIR = torch.zeros(2, 3)


def test_inputs_are_looked_at_under_autocast_on_the_host_alone_and_while_a_model_is_traced() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        validate.tensor("x", PAIR.half(), kinds="floating", like=PAIR)
        with pytest.raises(TypeError, match="torch.float64"):
            validate.tensor("x", PAIR.double(), kinds="floating", like=PAIR)
    ids = torch.tensor([[0, 5]])
    validate.in_range("ids", ids, 6, "vocab_size")
    validate.in_range("ids", ids.to("meta"), 5, "vocab_size")
    with pytest.raises(ValueError, match="ids has values from 0 to 5, but vocab_size is 5: pass 0 to 4"):
        validate.in_range("ids", ids, 5, "vocab_size")

    def step(x: torch.Tensor) -> torch.Tensor:
        validate.tensor("x", x, "B T | N", kinds="floating", like=x, sizes={"B": 2})
        return x + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(PAIR), PAIR + 1)


# What is called, words of the error, and its class where that is no ValueError.
Refusal = tuple[Any, ...]


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)))


def compiled(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return zoo.compile_regions(Blocks() if model is None else model, **{"backend": "eager", **options})


def begin_budget(model: Any) -> None:
    zoo.enforce_budget(model).__enter__()


def checkpointed(cls: Any = Block, times: int = 1, eager: int | None = None, **options: Any) -> None:
    model = compiled(Stack(depth=4))
    if eager is not None:
        zoo.uncompile(model.blocks[eager])
    try:
        for _ in range(times):
            checkpoint_regions(model, cls, **options)
    finally:
        assert restores_random_state(model) == (times > 1)


CAPTURES: list[tuple[Any, ...]] = [
    ({"args": torch.ones(2)}, "args is a Tensor, expected a tuple of arguments"),
    ({"kwargs": torch.ones(2)}, "kwargs is a Tensor, expected a dict of arguments by name"),
    ({"static": "input"}, "static is 'input', expected positions or names in a tuple"),
    ({"buckets": [((torch.ones(3),), {}), (torch.ones(4), torch.ones(4))]}, "bucket 1 is no pair"),
]  # fmt: skip


def engine() -> list[Refusal]:
    model, x, around = Blocks(), torch.randn(2, 3, 8), r"zoo\.cuda_graph around the whole step"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainingStep(model, lambda model, batch: model(batch).mean(), optimizer)
    captured = zoo.cuda_graph(nn.Linear(8, 8).requires_grad_(False), (x,))
    find, compile_regions = zoo.find_regions, zoo.compile_regions
    one = torch.ones(2)
    return [
        (lambda: find(model, x), r"regions is a Tensor, .*args=\(x,\)", TypeError),
        (lambda: compile_regions(Blocks(), regions=[]), "regions is empty: leave it out"),
        (lambda: compile_regions(Blocks(), exclude=["*"]), r"exclude=.* leaves no"),
        (lambda: compile_regions(Blocks(), dynamic=1), "dynamic is 1", TypeError),
        (lambda: compile_regions(Blocks(), backend=3), "backend is 3", TypeError),
        (lambda: compile_regions(Blocks(), options=3), "options is 3", TypeError),
        (lambda: compile_regions(Blocks(), options={"foo": 1}), "option foo; torch._inductor.list_options"),
        (lambda: zoo.find_regions(Blocks(), (torch.ones(2),)), r"got a Tensor.*args=\(x,\)", TypeError),
        (lambda: zoo.Region(Block, options=3), "Block: options is 3, expected a dict", TypeError),
        (lambda: zoo.Region(Block, dynamic=3), "Block: dynamic is 3, expected True, False or None", TypeError),
        (lambda: TrainingStep(model, nn.CrossEntropyLoss(), optimizer), r"loss is a .*loss\(model, batch\)", TypeError),
        (lambda: LinearCrossEntropy()(x, nn.Linear(8, 5), one), "weight is a Linear, .* pass its .weight", TypeError),
        (lambda: compile_regions(Blocks(), fullgraph="no"), "fullgraph is 'no'", TypeError),
        (lambda: compile_regions(Stack(), regions=["blocks"]), r"which nothing calls: regions=\['blocks\.\*'\]"),
        (lambda: zoo.cuda_graph(model, buckets=[((x,), {})]), "buckets are given without an example"),
        (lambda: begin_budget(3), "model is a int, expected", TypeError),
        (lambda: begin_budget(Stack()), r"call zoo\.compile_regions"),
        (lambda: zoo.save_compiled("c", model), "model is a str, expected an nn.Module", TypeError),
        (lambda: zoo.load_compiled(model, "c", key=3), "key is a int, expected bytes", TypeError),
        (lambda: checkpoint_regions(compiled(), "Block"), "cls is 'Block', expected", TypeError),
        (lambda: TrainingStep(len, model, optimizer), r"nn.Module: .*\(model, ", TypeError),
        (lambda: TrainingStep(model, optimizer, len), r"Optimizer: .*\(model, ", TypeError),
        (lambda: TrainingStep(model, len, optimizer, clip_norm="1"), "clip_norm is '1'; it is a positive number"),
        (lambda: torch.no_grad()(step)(x), "has no gradient: .*no_grad"),
        (lambda: step.save("c", epoch=3), "epoch is a int without .*; keep plain values"),
        (lambda: step.save(__file__), "test_bad_inputs", FileExistsError),
        (lambda: captured(x.double()), r"by \.to\('cpu', torch\.float32\)"),
        (lambda: captured(input=x), r"called with \['input'\], but captured with \[0\]"),
        (lambda: compile_regions(Stack(), mode="reduce-overhead"), around),
        (lambda: compile_regions(Stack(), options={"triton.cudagraphs": True}), r"triton\.cudagraphs"),
        (lambda: compiled(Stack(), backend="cudagraphs"), "backend='cudagraphs' records a CUDA graph for every region"),
        (lambda: compiled(compiled(Stack())), r"already compiled: blocks\.0, .*zoo\.uncompile"),
        (lambda: compiled(torch.compile(Stack(), backend="eager")), r"already compiled: the model itself.*_orig_mod"),
        (lambda: compiled(Sequence(Block(2), Block(4))), "no block repeats: .*; use torch.compile.* or name classes"),
        (lambda: zoo.warm_up(Stack(), x=torch.randn(2, 4)), r"call zoo\.compile_regions\(model\) first"),
        *((lambda each=each: find(Stack(), [each]), "nn.Module class", TypeError) for each in (3, int, Block(2))),
        (lambda: find(Stack(), Block), r"regions=\[\.\.\.\]", TypeError),
        *((lambda n=n: Region(Block, graphs=n), f"graphs is {n!r}, expected a positive integer") for n in (0, "1")),
        (lambda: compiled(zoo.cuda_graph(Stack())), r"calls of the model itself are captured.*uncompile"),
        (lambda: find(Sequence(Child(4)), [Block]), r"Block matches no module of Sequence; its subclasses \['Child'\]"),
        (lambda: find(nested(), [Sequence, Block]), r"Block \(0\.blocks\.0\) is nested in region Sequence"),
        (lambda: find(Stack(), ["Block"]), "regions names 'Block', but Stack has no such module; a path reads as"),
        (lambda: find(Stack(), exclude=["blocks.7"]), r"'blocks\.7'"),
        (lambda: find(Stack(), exclude="blocks.1"), "exclude is .*a list of classes and paths", TypeError),
        *(
            (lambda call=call, given=given: call(Stack(), **given), said, TypeError)
            for call in (find, compile_regions)
            for given, said in (
                ({"args": torch.ones(2, 4)}, r"args is a Tensor, expected a tuple of arguments: \(x,\)"),
                ({"args": {"x": 1}}, r"args is a dict, .* or kwargs=\{'x': x\}"),
                ({"kwargs": (1,)}, "kwargs is a tuple, expected a dict of arguments by name"),
            )
        ),
        (lambda: zoo.cuda_graph(3), "fn is a int", TypeError),
        *(
            (lambda options=options: zoo.cuda_graph(torch.relu, **{"args": (one,), **options}), said, TypeError)
            for options, said in CAPTURES
        ),
        (lambda: checkpoint_regions(Stack(), Block), r"Stack has no compiled regions: call zoo\.compile_regions"),
        (lambda: checkpointed(Dropping), "no Dropping is or contains a compiled region; regions are of Block"),
        (lambda: checkpointed(nn.ModuleList), "a ModuleList is never called; name the class"),
        (lambda: checkpointed(every=0), "every is 0, expected a positive integer"),
        (lambda: checkpointed(times=2), r"checkpointed already; zoo\.uncompile\(model\) undoes it"),
        (lambda: checkpointed(eager=1), "1 of 4 regions of Block are eager now: compile the model again"),
    ]


NODES = 200


def graph_of(nodes: int, edges: int) -> Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))


def sampler_of(**options: Any) -> NeighborSampler:
    given = {"fanouts": (4, 3), "batch_size": 16, "num_nodes": NODES}
    return NeighborSampler(graph_of(NODES, 3000), **given | options)


LOSSES: list[tuple[Any, ...]] = [
    ({"weight": torch.ones(37, 15)}, r"x \[20, 16\] and weight \[37, 15\] do not fit"),
    ({"labels": torch.zeros(19, dtype=torch.int64)}, r"labels are \[19\], expected .*\[20\]"),
    ({"labels": torch.zeros(20, dtype=torch.int32)}, r"torch\.int32, expected int64", TypeError),
    ({"weight": torch.ones(37, 16).bfloat16()}, r"float32 and weight torch\.bfloat16; convert", TypeError),
    ({"labels": torch.full((20,), 37)}, "from 37 to 37, but the number of classes is 37: pass 0 to 36, or -100"),
    ({"x": torch.ones(0, 16), "labels": torch.zeros(0, dtype=torch.int64)}, "there are no rows"),
]  # fmt: skip


def training() -> list[Refusal]:
    given = {"x": torch.randn(20, 16), "weight": torch.randn(37, 16), "labels": torch.randint(37, (20,))}
    return [
        *((lambda change=change: LinearCrossEntropy(8)(**given | change), *said) for change, *said in LOSSES),
        (lambda: AdamW([nn.Parameter(X)], fused=False), r"or take torch\.optim\.AdamW"),
        (lambda: AdamW([nn.Parameter(X)], foreach=True), "`fused` and `foreach` cannot be", RuntimeError),
        (lambda: AdamW([{"params": [nn.Parameter(X)], "fused": False}]), "a group has fused=False or", ValueError),
        (lambda: AdamW([nn.Parameter(X)], differentiable=True), "differentiable", RuntimeError),
    ]


BASIC = {"block": "basic", "width_per_group": 64}
CONFIGS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "bert-debug": [
        ({"hidden_size": 33}, "hidden_size is 33 and num_attention_heads is 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"head": "qa"}, "head is 'qa', expected one of"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', expected one of"),
        ({"kind": "albert"}, "kind is 'albert'"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"pad_token_id": 128}, "pad_token_id is 128, but vocab_size is 128"),
        ({"kind": "roberta", "pad_token_id": None}, "kind 'roberta' counts positions by it"),
        ({"kind": "roberta", "pad_token_id": 63}, "max_position_embeddings is 64, but positions start later"),
        ({"head": "question-answering", "num_labels": 3}, "num_labels is 3, but an answer has 2"),
    ],
    "llm-debug": [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 15}, "must be even"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"pad_token_id": 256}, "pad_token_id is 256"),
    ],
    "resnet-debug": [
        ({"block": "plain"}, "block is 'plain', expected one of 'basic', 'bottleneck'"),
        ({"layers": (1, 2, 3)}, "four positive numbers"),
        ({"layers": (1, 2, 0, 1)}, "four positive numbers"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"replace_stride_with_dilation": (True,)}, "three flags"),
        ({"norm": "layer"}, "norm is 'layer', expected one of 'batch', 'frozen'"),
        ({"norm_momentum": None}, "norm_momentum is None"),
        ({"block": "basic"}, "width_per_group 16: use bottlenecks"),
        (BASIC | {"layers": (1, 1, 2, 1), "replace_stride_with_dilation": (0, 1, 0)}, "basic blocks cannot be dilated"),
    ],
    "unet-debug": [
        ({"in_channels": 0}, "in_channels is 0, expected a positive integer"),
        ({"block_out_channels": (16, 32)}, "layers_per_block is .* for each of 2 levels"),
        ({"block_out_channels": (16, 32, 36)}, "norm_num_groups is 8, which does not divide"),
        ({"num_attention_heads": 5}, "num_attention_heads has 5, which does not divide 16"),
        ({"down_block_types": ("DownBlock2D",) * 2}, "expected DownBlock2D or Cross.* each of 3 levels"),
        ({"up_block_types": ("KUpBlock2D",) * 3}, r"up_block_types is \('KUpBlock2D', .*, expected UpBlock2D or Cross"),
        ({"addition_embed_type": "text"}, "addition_embed_type is 'text', expected one of None, 'text_time'"),
        ({"addition_embed_type": "text_time"}, "addition_time_embed_dim is None, expected a pos"),
        ({"transformer_layers_per_block": [[1], [2], 1]}, r"is \(\[1\], \[2\], 1\), expected a positive integer"),
    ],
    "gcn-debug": [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"jk": "lstm"}, "jk is 'lstm'"),
        ({"dropout": 1.5}, r"dropout is 1\.5"),
        ({"normalize": False, "add_self_loops": True}, "add_self_loops is True and normalize False"),
        ({"act": "nope"}, "act is 'nope'"),
        ({"act": "elu", "act_kwargs": {"beta": 1}}, "act_kwargs is .*, which elu does not take"),
        ({"norm": "nope"}, "norm is 'nope'"),
        ({"norm": "layer", "norm_kwargs": {"mode": "edge"}}, "mode='edge'"),
    ],
    "gat-debug": [
        ({"hidden_channels": 6, "heads": 4}, "heads is 4, which does not divide hidden_channels 6"),
        ({"heads": 0}, "heads is 0"),
    ],
    "graphsage-debug": [({"aggr": "median"}, "aggr is 'median'")],
}


def models() -> list[Refusal]:
    llama = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    bert = transformers.BertConfig(**vars(llama) | {"model_type": "bert"})
    gcn = partial(zoo.create, "gcn-debug")
    mine = type("Mine", (diffusers.UNet2DConditionModel,), {})(**reference.SIZES)  # forwards of subclasses may differ
    theirs = nn.Linear(2, 2), transformers.LlamaModel(llama), transformers.BertForPreTraining(bert), quantizable(), mine
    return [
        (lambda: zoo.list_models("gn"), "did you mean 'gnn'"),
        (lambda: zoo.create("gcn-debg"), "did you mean 'gcn-debug'"),
        (partial(gcn, hiden_channels=3), "no option 'hiden_channels', did you mean 'hidden_channels'"),
        (partial(gcn, dropout="a"), r"dropout is 'a', expected a value like 0\.", TypeError),
        (partial(gcn, dropout=None), "dropout is None, expected a probability"),
        (partial(gcn, weights={"a": X}), r"weights are a dict, expected a file.*load_state_dict", TypeError),
        (lambda: zoo.create(["gcn-debug"]), r"name is a list, expected a name of zoo\.list_models", TypeError),
        *((partial(zoo.create, name, **bad), words) for name, cases in CONFIGS.items() for bad, words in cases),
        (partial(gcn, dtype="float16"), r"dtype is 'float16', but parameters need a floating-point torch\.dtype"),
        *(
            (
                lambda each=each: zoo.from_upstream(each),
                rf"{type(each).__name__} is (no model of|not one of).*compile_regions",
                TypeError,
            )
            for each in theirs
        ),
        (lambda: zoo.to_upstream(theirs[0]), "zoo.from_upstream", TypeError),
        (lambda: zoo.example_inputs(theirs[0]), "not a model of the zoo", TypeError),
        (lambda: zoo.from_upstream("gcn"), "module is of type str, expected a model", TypeError),
        *(
            (lambda name=name, sizes=sizes: zoo.example_inputs(zoo.create(name), **sizes), words)
            for name, sizes, words in (
                ("bert-debug", {"tokens": 65}, "at most 64 tokens"),
                ("llm-debug", {"tokens": 513}, "tokens 513"),
                ("resnet-debug", {"batch": 0}, "batch is 0"),
                ("unet-debug", {"size": 10}, "size divisible by 4"),
                ("gcn-debug", {"num_nodes": 0}, "num_nodes is 0, expected a positive integer"),
                ("gcn-debug", {"num_edges": -3}, "num_edges is -3, expected an integer of at least 0"),
            )
        ),
    ]


WEIGHTS: list[tuple[Any, ...]] = [
    ({"edge_weight": torch.rand(4)}, r"edge_weight has shape \[4\], expected \[3\], one weight per edge"),
    ({"edge_weight": torch.arange(3)}, r"edge_weight is torch\.int64, expected floating-point numbers", TypeError),
]  # fmt: skip
SAMPLED: list[tuple[Any, ...]] = [
    ({"fanouts": (5, 0)}, r"fanouts are \(5, 0\)"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"workers": -1}, "workers is -1"),
    ({"device": "meta"}, "device is meta; batches are sampled on the host, 'cpu', or on a GPU, 'cuda'"),
    ({"seeds": torch.tensor([200])}, "seeds holds 200, and the graph has nodes 0 to 199"),
    ({"seeds": torch.tensor([], dtype=torch.int64)}, "seeds is empty"),
    ({"seeds": torch.tensor([3, 5, 5])}, r"a node is several times among the seeds.*seeds\.unique\(\)"),
    ({"buckets": [Bucket(64, ((64, 64), (16, 64)))]}, r"may need Bucket\(nodes=200, .* none .*Bucket\(nodes=64"),
    ({"seeds": torch.ones(NODES, dtype=torch.bool)}, r"seeds is a mask.*mask\.nonzero\(\)"),
    ({"seeds": torch.tensor([1.0])}, r"seeds is torch.float32, expected int64; use seeds.to\("),
    ({"seeds": [1, 2]}, r"seeds is a list, expected a dense tensor \[n\]"),
    ({"seeds": torch.tensor([[1]])}, r"seeds has shape \[1, 1\], expected \[n\]"),
    ({"fanouts": 4}, "fanouts are 4; one a hop"),
    ({"fanouts": (4.0, 3)}, r"fanouts are \(4.0, 3\); one a hop, an integer"),
    ({"device": torch.float32}, "device is torch.float32"),
    ({"seed": 1.5}, "seed is 1.5, expected an integer"),
]  # fmt: skip


def graphs() -> list[Refusal]:
    gcn, gat, sage = (zoo.create(f"{name}-debug") for name in ("gcn", "gat", "graphsage"))
    weights, convs = torch.rand(3), (GCNConv(12, 3), GATConv(12, 3), SAGEConv(12, 3))
    graph, weighted = CSRGraph.from_edge_index(EDGES), CSRGraph.from_edge_index(EDGES, weights)
    rectangular = CSRGraph.from_edge_index(EDGES, num_nodes=(5, 6))
    wide, unused = SAGEConv((12, 4), 3), "carries edge weights, which this layer does not use"
    more = r"the graph has 6 destinations and x 5 rows, .* pass x=\(sources, destinations\)"
    tensors = "edge_weight was given with prepared tensors.*with_weights"

    def convolve(conv: Any, x: Tensor = X, edge_index: Tensor = EDGES) -> Tensor:
        return conv(x, edge_index)

    misuse = [
        (lambda: gat(X, EDGES, weights), "does not use edge weights"),
        (lambda: gat(X, weighted), unused),
        (lambda: gcn(X, graph, weights), r"with a CSRGraph.*with_weights"),
        (lambda: gcn(torch.randn(6, 12), graph), r"x has 6 rows.*5 nodes.*num_nodes=6"),
        (lambda: gcn.prepare(graph, num_nodes=6), "num_nodes is 6, but the graph has 5; leave it out"),
        (lambda: sage(X, rectangular), "the graph is rectangular.*convolutions on their own"),
        (lambda: GCNConv(12, 3)(X, rectangular), "normalisation needs a square graph"),
        (lambda: CSRGraph.from_edge_index(EDGES, num_nodes=-1), "num_nodes is -1"),
        (lambda: CSRGraph.from_edge_index(EDGES, num_nodes=(5, 5, 5)), r"\(5, 5, 5\)"),
        (lambda: wide((X, torch.randn(5, 4)), rectangular), "x has 5 rows, the graph 6 nodes"),
        (lambda: GATConv((12, 4), 3)((X, X), graph), r"shape \[5, 12\], expected \[N, 4\]"),
        *((partial(conv, X, rectangular), more) for conv in (SAGEConv(12, 3), GATConv(12, 3))),
        (lambda: SAGEConv(3, 3, aggr="median"), "aggr is 'median', expected"),
        (lambda: GATConv(3, 3, heads=0), "heads is 0, expected a positive integer"),
        (lambda: GATConv(3, 3, dropout=2.0), "dropout is 2.0, expected a probability"),
        (lambda: GCNConv(3, 3, add_self_loops=True, normalize=False), "normalize False"),
        *((partial(conv, X, graph.tensors, weights), tensors) for conv in (*convs[:2], SAGEConv(12, 3, aggr="sum"))),
        (lambda: mean_neighbours(X, graph.tensors), "needs the graph's inverse degrees"),
    ]
    nodes, weighing = torch.tensor([[0, 4, 2], [0, 1, 2]]), [partial(each, X, EDGES) for each in (gcn, convs[0])]
    rootless = SAGEConv((12, 4), 3, root_weight=False)
    batch = next(NeighborSampler(graph_of(200, 3000), fanouts=(3, 2), batch_size=8, num_nodes=200).epoch(0))
    x, own, cut = torch.randn(201, 6), torch.randn(len(batch.nodes), 6), batch.graphs
    narrow = {"in_channels": 6, "num_layers": 2}
    gcn_of_two = zoo.create("gcn-debug", **narrow, normalize=False, add_self_loops=False)
    of_two, of_three = (zoo.create("graphsage-debug", **{**narrow, "num_layers": n}) for n in (2, 3))
    return [
        *misuse,
        *((partial(convolve, conv, **change), words, error) for conv in convs for change, error, words in GRAPHS),
        *(
            (partial(call, **change), *said)
            for call in (*weighing, partial(gcn.prepare, EDGES), graph.with_weights)
            for change, *said in WEIGHTS
        ),
        (lambda: convs[0]((X, X), nodes), "x is a tuple of 2, expected .*sources alone", TypeError),
        (lambda: convs[2]((X,) * 3, nodes), "x is a tuple of 3, expected .*two tensors", TypeError),
        (lambda: rootless((X, None), nodes), r"of the destinations is a NoneType.*torch.empty\(D, 0\)", TypeError),
        (lambda: of_three(own, cut), "there are 2 graphs, but 3 layers; sample as many hops"),
        (lambda: of_two(own, cut[::-1]), "layer 0 is given"),
        (lambda: of_two(x, cut), r"layer 0 is given 201 rows, and its graph is .* pass x\[batch\.nodes\]"),
        (partial(of_two, x, batch), r"is a SampledBatch; pass batch\.graphs with x\[batch\.nodes\]", TypeError),
        (lambda: gcn_of_two(own, cut), "edge_index is a tuple.*only a GraphSAGE"),
        *((lambda given=given: sampler_of(**given), words, (ValueError, TypeError)) for given, words in SAMPLED),
    ]


LABELS: list[tuple[Any, ...]] = [
    ({"head": "masked-lm"}, {"labels": IDS[:, :3]}, r"labels has shape \[2, 3\], expected \[2, 5\]"),
    ({"head": "masked-lm"}, {"labels": IDS * 128}, "from 128 to 128, but the number of classes is 128"),
    ({"head": "sequence-classification"}, {"labels": IDS}, r"expected \[2\] or \[2, 1\]; integers"),
    ({"head": "sequence-classification"}, {"labels": IDS[:, 0] * 1.0}, r"expected \[2, 2\]; integers"),
    ({"head": "question-answering"}, {"labels": IDS}, "pass start_positions and end_positions"),
    ({"head": "question-answering"}, {"start_positions": IDS[:, 0]}, "one of them is missing"),
    (
        {"head": "question-answering"}, {"start_positions": IDS[0], "end_positions": IDS[0]},
        r"start_positions has shape \[5\], expected \[2\] or \[2, 1\]",
    ),
]  # fmt: skip
PACKED: list[tuple[Any, ...]] = [
    ({"input_ids": IDS.float()}, "input_ids is torch.float32", TypeError),
    ({"attention_mask": MASK[:1]}, r"attention_mask has shape \[1, 5\], expected \[2, 5\]"),
    ({"attention_mask": torch.tensor([[1, 0, 0, 0, 0], [0] * 5])}, r"row\(s\) \[1\] have no token"),
    ({"length": 4}, "rows is 2 and length 4"),
    ({"length": 65, "config": PRESETS["bert-debug"]}, "length is 65, but the model has 64 positions"),
    ({"config": PRESETS["bert-debug"], "input_ids": IDS * 200}, "input_ids has values from 200"),
    ({"buckets": (8,)}, r"10 tokens and needs room for 2 of padding, but the largest bucket holds 8"),
    ({"buckets": (8,), "input_ids": IDS[:, :1]}, "length 1, expected sizes in tokens"),
]  # fmt: skip
SCALINGS: list[tuple[Any, ...]] = [
    ({"kind": "yarn", "factor": 2.0}, "kind is 'yarn'"),
    ({"kind": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "needs low < high"),
    ({"kind": "linear", "factor": 2.0, "low_freq_factor": 4.0}, "has a factor only"),
    ({"kind": "linear", "factor": 0}, "factor is 0"),
]


def texts() -> list[Refusal]:
    bert, roberta = zoo.create("bert-debug"), zoo.create("bert-debug", kind="roberta", pad_token_id=1)
    masked, packed = zoo.create("bert-debug", head="masked-lm"), pack(IDS)
    return [
        *(
            (lambda options=options, given=given: zoo.create("bert-debug", **options)(IDS, **given), *said)
            for options, given, *said in LABELS
        ),
        *((lambda given=given: pack(**{"input_ids": IDS, **given}), *said) for given, *said in PACKED),
        (lambda: bert(packed, IDS), "a packed batch holds its own mask"),
        (lambda: bert(pack(IDS, length=70)), "the batch has rows of 70 tokens, but the model 64 positions"),
        (lambda: bert(pack(IDS * 200)), "input_ids has values from 200 to 200"),
        (lambda: bert(pack(IDS, token_type_ids=IDS * 3)), "token_type_ids has values from 3"),
        (lambda: roberta(packed), "counts positions from 0: pack with config=model.config"),
        (lambda: masked(packed, labels=IDS[:, :4]), r"labels has shape \[2, 4\]"),
        *((partial(RopeScaling, **options), words) for options, words in SCALINGS),
    ]


SAMPLERS: list[tuple[Any, ...]] = [
    *(
        ({"shape": shape}, r"expected \[B, 4, H, W\] with H and W divisible by 2")
        for shape in ((2, 4, 16), (0, 4, 16, 16), (2, 3, 16, 16), (2, 4, 16, 15))
    ),
    ({"guidance_scale": float("nan")}, "guidance_scale is nan"),
    ({"guidance_scale": -1}, "guidance_scale is -1"),
    ({"schedule": 30}, "schedule is a int, expected what make_schedule gives", TypeError),
    ({"model": torch.nn.Linear(1, 1)}, "model is a Linear", TypeError),
    ({"model": "other ends"}, "takes more than latents, timestep and text"),
    ({"model": "guidance in the timestep"}, "takes more than latents, timestep and text"),
]  # fmt: skip


def images() -> list[Refusal]:
    model, pixels = zoo.create("resnet-debug"), torch.zeros(1, 3, 64, 64)
    folded = fold_batch_norm(model)
    autocast = torch.autocast("cpu", torch.bfloat16)
    unfolded = zoo.create("resnet-debug", track_running_stats=False)
    x, row, one = torch.randn(6, 8), torch.randn(8), torch.randn(2, 5, 2, 8)
    residual = r"residual has shape \(1, 8\), expected that of x, \(6, 8\)"
    product, keys = r"expected \[R, C\], \[2 I, C\] and \[2 I\]", r"expected \[B, T, N, D\] and twice \[B, L, N, D\]"
    return [
        (lambda: fold_batch_norm(nn.Linear(2, 2)), r"Linear is not a ResNet of the zoo; zoo\.from_upstream", TypeError),
        (lambda: fold_batch_norm(folded), "folded already"),
        (lambda: fold_batch_norm(unfolded), "track_running_stats is False"),
        (lambda: zoo.to_upstream(folded), "folded into the convolutions: convert"),
        (lambda: folded(pixels.clone().requires_grad_()), "a folded model is for inference"),
        (autocast(lambda: folded(pixels)), r"use model\.to\(torch\.bfloat16\)"),
        (lambda: folded(pixels.half()), r"expected float32; use images\.to\(torch\.float32\);", TypeError),
        (lambda: conv_add(x, row, x[:1]), residual),
        (lambda: add_norm(x, x[:1], row, row, None, 1e-5), residual),
        (lambda: gated_gelu(x[:, :7], row), "x has 7 columns, expected an even number"),
        (lambda: gated_gelu(x, row[:7]), r"bias has shape \(7,\), expected one number a column: \(8,\)"),
        (lambda: add_norm(x, x, row, row, row[:3], 1e-5), r"shift has shape \(3,\), .* one number a column: \(8,\)"),
        *(
            (lambda given=given: gated_gelu_product(x, *given), product)
            for given in ((torch.randn(7, 8), row[:7]), (torch.randn(6, 7), row[:6]), (torch.randn(6, 8), row))
        ),
        *(
            (lambda given=given: short_attention(one, *given), keys)
            for given in ((one[:1], one[:1]), (one, one[:, :3]), (one[..., :4], one[..., :4]))
        ),
        *(
            (lambda steps=steps: make_schedule(EULER, steps), "steps is .*, expected an integer from 1 to 1000")
            for steps in (0, -1, 1001, 2.0, True, None)
        ),
        *((lambda options=options: sampler_with(**options), *said) for options, *said in SAMPLERS),
    ]


EULER = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_end=0.012)


def sampler_with(model: Any = "sd", **options: Any) -> Sampler:
    model = zoo.from_upstream(reference.make(model)) if isinstance(model, str) else model
    return Sampler(model, **{"schedule": make_schedule(EULER, 3), "shape": (2, 4, 8, 12), **options})


REFUSALS = [
    (call, words, error[0] if error else ValueError)
    for call, words, *error in (*engine(), *training(), *models(), *graphs(), *texts(), *images())
]


@pytest.mark.parametrize(("call", "words", "error"), REFUSALS, ids=[words for _, words, _ in REFUSALS])
def test_a_call_that_does_not_fit_is_told_the_remedy(call: Callable[[], object], words: str, error: Any) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_function_that_is_captured_without_its_arguments_says_what_to_give() -> None:
    with pytest.raises(TypeError) as error:
        zoo.cuda_graph(lambda x: x * 2)
    assert "give args=(x,)" in error.value.__notes__[0]
