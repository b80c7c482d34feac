"""Inputs that a model cannot take are named, with their value and the remedy, before anything runs; all families."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import unet_reference as reference
from torch import Tensor, nn

import zoo
from zoo import validate
from zoo.gnn import GNNLayer
from zoo.training import TrainingStep, checkpoint_regions
from zoo.unet import TextKeysValues, TimeShifts

IDS = torch.ones(2, 5, dtype=torch.int64)
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
    ({"edge_index": EDGES.to("meta")}, ValueError, r"edge_index is on meta and x on cpu; use edge_index\.to\(cpu\)"),
    ({"x": X[:, :7]}, ValueError, r"x has shape \[5, 7\], expected \[N, 12\]"),
    ({"x": X.double()}, TypeError, r"x is torch\.float64 and the weights torch\.float32"),
    ({"x": X.long()}, TypeError, r"x is torch\.int64, expected torch\.float32"),
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
        ({"attention_mask": IDS.to("meta")}, ValueError, "attention_mask is on meta and input_ids on cpu"),
        ({"token_type_ids": IDS[:, :3]}, ValueError, r"token_type_ids has shape \[2, 3\]"),
        ({"token_type_ids": IDS * 2}, ValueError, "values from 2 to 2, but type_vocab_size is 2"),
        ({"position_ids": IDS[0]}, ValueError, r"position_ids has shape \[5\], expected \[2, 5\] or \[1, 5\]"),
        ({"position_ids": IDS * 64}, ValueError, "position_ids has values from 64 to 64"),
        ({"labels": torch.tensor([0, 1])}, ValueError, "labels given, but head 'pooled' takes none"),
        ({"start_positions": torch.tensor([0, 1])}, ValueError, "for head 'question-answering', and this is 'pooled'"),
    ],
    "llm-debug": [
        ({"input_ids": torch.ones(2, 3)}, TypeError, "torch.float32, expected int64"),
        ({"input_ids": IDS[:, :0]}, ValueError, "none of them 0"),
        ({"input_ids": IDS.repeat(1, 103)}, ValueError, "515 tokens, but the model has 512"),
        ({"input_ids": torch.tensor([[3, 256]])}, ValueError, "from 3 to 256, but vocab_size is 256: pass 0 to 255"),
        ({"position_ids": torch.ones(2, 5)}, TypeError, "position_ids is torch.float32"),
        ({"position_ids": torch.arange(508, 513)[None]}, ValueError, "508 to 512, but max_position_embeddings is 512"),
        ({"position_ids": torch.arange(-1, 4)[None]}, ValueError, "position_ids has values from -1 to 3"),
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
        ({"sample": lambda x: x.half()}, TypeError, r"use sample\.to\(torch\.float32\), or torch\.autocast"),
        ({"sample": lambda x: x[0]}, ValueError, r"sample\[None\] makes a batch of one sample"),
        ({"sample": lambda x: x[:, :3]}, ValueError, r"\[2, 3, 16, 16\], expected \[B, 4, H, W\];"),
        ({"sample": lambda x: x.permute(0, 2, 3, 1)}, ValueError, r"permute\(0, 3, 1, 2\)"),
        ({"sample": lambda x: x[:0]}, ValueError, r"expected \[B, 4, H, W\], none of them 0"),
        ({"sample": lambda x: x[..., :14, :15]}, ValueError, "14 × 15, which 3 levels cannot .* a multiple of 4"),
        ({"sample": lambda x: x.to("meta")}, ValueError, "sample is on meta and the weights on cpu"),
        ({"encoder_hidden_states": None}, TypeError, "encoder_hidden_states is a NoneType"),
        ({"encoder_hidden_states": lambda x: x[..., :20]}, ValueError, r"\[B, L, 24\]: the text encoder must be"),
        ({"encoder_hidden_states": lambda x: x[:1]}, ValueError, "with a row for each row of the sample"),
        ({"encoder_hidden_states": TextKeysValues(torch.zeros(2, 7, 9))}, ValueError, "this model's text_keys_values"),
        ({"timestep": True}, TypeError, "timestep is True, expected a number"),
        ({"timestep": "last"}, TypeError, "timestep is 'last'"),
        ({"timestep": torch.arange(3)}, ValueError, r"timestep has shape \[3\], expected \[\], \[1\] or \[2\]"),
        ({"timestep": TimeShifts(torch.zeros(5, 1, 304))}, ValueError, "take one step's of a whole run"),
        ({"timestep_cond": torch.zeros(2, 8)}, ValueError, "has no time_cond_proj_dim: leave it out"),
        ({"added_cond_kwargs": {"image_embeds": X}}, ValueError, r"has \['image_embeds'\], and this model takes \[\]"),
        ({"encoder_attention_mask": torch.ones(2, 8)}, ValueError, r"\[2, 8\], expected \[2, 7\]: 1 is seen"),
        ({"attention_mask": torch.ones(2, 256)}, ValueError, r"over \[16, 64, 256\] pixels: a mask fits one of them"),
        ({"class_labels": torch.zeros(2)}, ValueError, "class_labels is given"),
        ({"down_intrablock_additional_residuals": []}, ValueError, "_residuals is given, which is not sup"),
        ({"cross_attention_kwargs": {"gligen": {}}}, ValueError, "is {'gligen': {}}: merge LoRA weights"),
        ({"mid_block_additional_residual": X}, ValueError, r"additional_residual has shape \[5, 12\], expected"),
        ({"down_block_additional_residuals": ()}, ValueError, "has 0 tensors, expected 6"),
    ],
    "unet-xl-debug": [
        ({"added_cond_kwargs": None}, ValueError, r"added_cond_kwargs has \[\], and this model takes \['text_"),
        ({"added_cond_kwargs": lambda given: given | {"hint": 1}}, ValueError, "has .'hint', 'text_embeds'"),
        (
            {"added_cond_kwargs": lambda given: {"text_embeds": given["text_embeds"]}},
            ValueError, r"has \['text_embeds'\], and this model takes",
        ),
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


def test_residuals_of_another_shape_are_named() -> None:
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


def test_a_further_time_condition_that_does_not_fit() -> None:
    model: Any = zoo.create("unet-debug", time_cond_proj_dim=8)
    inputs = zoo.example_inputs(model)
    model(**inputs)
    with pytest.raises(ValueError, match=r"timestep_cond has shape \[2, 7\], expected \[2, 8\]"):
        model(**inputs, timestep_cond=torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"timesteps has shape \[2, 3\], expected \[B\] or \[steps, 1\]"):
        model.time_shifts(torch.zeros(2, 3))


PAIR = torch.zeros(2, 3)


def test_autocast_takes_other_dtypes_but_float64() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        validate.tensor("x", PAIR.half(), kinds="floating", like=PAIR)
        with pytest.raises(TypeError, match="torch.float64"):
            validate.tensor("x", PAIR.double(), kinds="floating", like=PAIR)


def test_ranges_are_read_on_the_host_alone() -> None:
    ids = torch.tensor([[0, 5]])
    validate.in_range("ids", ids, 6, "vocab_size")
    validate.in_range("ids", ids.to("meta"), 5, "vocab_size")
    with pytest.raises(ValueError, match="ids has values from 0 to 5, but vocab_size is 5: pass 0 to 4"):
        validate.in_range("ids", ids, 5, "vocab_size")


def test_a_compiled_model_checks_while_it_is_traced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        validate.tensor("x", x, "B T | N", kinds="floating", like=x, sizes={"B": 2})
        return x + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(PAIR), PAIR + 1)


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)))


def misuse() -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    """Calls of public functions that do not fit, as people write them."""
    model, x = Blocks(), torch.randn(2, 3, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainingStep(model, lambda model, batch: model(batch).mean(), optimizer)
    captured = zoo.cuda_graph(nn.Linear(8, 8).requires_grad_(False), (x,))
    calls: Any = {
        "inputs for regions": (lambda: zoo.find_regions(model, x), TypeError, r"regions is a Tensor, .*args=\(x,\)"),
        "no regions": (lambda: zoo.compile_regions(Blocks(), regions=[]), ValueError, "regions is empty: leave it out"),
        "all left out": (lambda: zoo.compile_regions(Blocks(), exclude=["*"]), ValueError, r"exclude=.* leaves no"),
        "a word for a flag": (lambda: zoo.compile_regions(Blocks(), dynamic="yes"), TypeError, "dynamic is 'yes'"),
        "a number for a model": (lambda: zoo.enforce_budget(3).__enter__(), TypeError, "model is a int, expected"),
        "saved backwards": (lambda: zoo.save_compiled("c", model), TypeError, "model is a str, expected an nn.Module"),
        "a number for a key": (lambda: zoo.load_compiled(model, "c", key=3), TypeError, "key is a int, expected bytes"),
        "a name for a class": (lambda: checkpoint_regions(compiled(), "Block"), TypeError, "cls is 'Block', expected"),
        "step backwards": (lambda: TrainingStep(len, model, optimizer), TypeError, r"nn.Module: .*\(model, "),
        "optimizer last": (lambda: TrainingStep(model, optimizer, len), TypeError, r"Optimizer: .*\(model, "),
        "a word for a norm": (
            lambda: TrainingStep(model, len, optimizer, clip_norm="1"), TypeError, "clip_norm is .1., expected",
        ),
        "without gradients": (lambda: torch.no_grad()(step)(x), ValueError, "gradients are off: .*no_grad"),
        "an epoch": (lambda: step.save("c", epoch=3), ValueError, "epoch is a int without .*; keep plain values"),
        "a file for a folder": (lambda: step.save(__file__), FileExistsError, "is a file, expected a folder"),
        "another dtype": (lambda: captured(x.double()), ValueError, r"by \.to\('cpu', torch\.float32\)"),
        "another name": (lambda: captured(input=x), ValueError, r"called with \['input'\], but captured with \[0\]"),
    }  # fmt: skip
    return calls


def compiled() -> nn.Module:
    return zoo.compile_regions(Blocks())


@pytest.mark.parametrize("name", misuse())
def test_misuse_of_a_public_function_is_told_the_remedy(name: str) -> None:
    call, kind, words = misuse()[name]
    with pytest.raises(kind, match=words):
        call()


def test_a_function_that_is_captured_without_its_arguments_says_what_to_give() -> None:
    with pytest.raises(TypeError) as error:
        zoo.cuda_graph(lambda x: x * 2)
    assert "give args=(x,)" in error.value.__notes__[0]
