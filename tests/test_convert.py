"""Conversion, asked of every family: upstream's numbers and gradients, its folders both ways, and what is refused."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
import transformers
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0, SlicedAttnProcessor
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

import zoo
from tests import bert_reference as bert
from tests import llm_reference as llm
from tests import unet_reference as unet
from tests.fuzzing import Results, backward, compare, randomize

pytestmark = pytest.mark.usefixtures("one_thread", "exact_norms")
Make = Callable[[], nn.Module]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# What test_fuzz.py does not draw; norms, groups, widths and dilated bottlenecks it does.
RESNETS: dict[str, tuple[type[nn.Module], list[int], dict[str, Any]]] = {
    "bottleneck": (Bottleneck, [2, 1, 1, 1], {"num_classes": 7}),
    "dilated basic": (BasicBlock, [1, 1, 1, 1], {"replace_stride_with_dilation": [False, False, True]}),
}
# What test_fuzz.py does not draw.
GRAPHS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (pyg.GCN, {"num_layers": 4, "act": "elu", "act_kwargs": {"alpha": 0.7}}),
    # Without a bias and a norm it would write into what the aggregation returned.
    *((cls, {"act_kwargs": {"inplace": True}, "bias": False}) for cls in (pyg.GCN, pyg.GAT, pyg.GraphSAGE)),
    (pyg.GAT, {"heads": 2, "norm": "batch_norm", "norm_kwargs": {"affine": False, "eps": 1e-3, "momentum": 0.3}}),
    (pyg.GCN, {"norm": "BatchNorm", "norm_kwargs": {"track_running_stats": False}, "act": "leaky_relu"}),
    (pyg.GraphSAGE, {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "act": "sigmoid"}),
    (pyg.GAT, {"norm": "layer", "norm_kwargs": {"mode": "graph", "affine": False}, "act_first": True, "act": "silu"}),
    (pyg.GCN, {"add_self_loops": False}),
    (pyg.GCN, {"decomposed_layers": 2}),
    (pyg.GCN, {"cached": True, "improved": True, "jk": "cat"}),
    (pyg.GAT, {"heads": 8, "num_layers": 1, "hidden_channels": 3}),
    (pyg.GraphSAGE, {"aggr": "add", "project": True}),
    (pyg.GraphSAGE, {"hidden_channels": 6, "out_channels": 6, "num_layers": 3}),
]


def graph_model(cls: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    return cls(**{"in_channels": 6, "hidden_channels": 8, "num_layers": 2, "out_channels": 5, **options})


def graph_inputs(weighted: bool) -> dict[str, Tensor]:
    """Duplicates, self-loops (one doubled) and isolated nodes at both ends of the numbering."""
    edge_index = torch.randint(1, 12, (2, 50), generator=torch.Generator().manual_seed(0))
    edge_index[:, 3] = edge_index[:, 4]
    edge_index[:, 7] = 5
    given = {"x": drawn(14, 6), "edge_index": edge_index}
    if weighted:
        # Of the self-loops of a node the last counts alone; torch-geometric gives the others its gradient.
        loops = edge_index[0] == edge_index[1]
        edge_index[1, loops.nonzero()[:-1]] = 12
        given["edge_weight"] = drawn(50).abs() + 0.1
    return given


# A model, its inputs, and whether it trains.
PARITY: dict[str, tuple[Make, Callable[[Any], dict[str, Any]], bool]] = {
    **{
        f"{kind} {head}": (
            partial(bert.make, kind, head),
            lambda _, kind=kind, head=head: {**bert.batch(kind), **bert.labels(head)},
            False,
        )
        for kind, head in bert.CASES
    },
    **{kind: (partial(llm.make, kind), lambda _: {"input_ids": llm.tokens(3, 17)}, False) for kind in llm.KINDS},
    **{case: (partial(unet.make, case), unet.inputs, False) for case in unet.CASES},
    **{
        f"resnet {name}{' trains' * trains}": (
            lambda block=block, layers=layers, options=options: randomize(ResNet(block, layers, **options), 0),
            lambda _: {"x": drawn(2, 3, 33, 34)},
            trains,
        )
        for name, (block, layers, options) in RESNETS.items()
        for trains in (False, True)
    },
    **{
        f"{cls.__name__} {options}{' trains' * trains}": (
            lambda cls=cls, options=options: randomize(graph_model(cls, options), 0),
            lambda _, weighted=cls is pyg.GCN and "bias" not in options: graph_inputs(weighted),
            trains,
        )
        for cls, options in GRAPHS
        for trains in (False, True)
    },
}


@pytest.mark.parametrize("name", PARITY)
def test_outputs_gradients_and_buffers_are_upstreams(name: str) -> None:
    make, inputs_of, trains = PARITY[name]
    theirs = make().train(trains)
    inputs = inputs_of(theirs)

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        given = {
            key: value.to(dtype).clone().requires_grad_() if _learns(value) else value for key, value in inputs.items()
        }
        # torchvision and the zoo name images otherwise.
        outputs = model(given["x"]) if name.startswith("resnet") else model(**given)
        if not isinstance(outputs, (Tensor, dict)):
            outputs = outputs._asdict() if hasattr(outputs, "_asdict") else {"sample": outputs.sample}
        if isinstance(outputs, Tensor):
            outputs = {"output": outputs}
        named = {"output" if key in ("logits", "output") else key: value for key, value in outputs.items()}
        found = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        return backward(found, *(value for value in given.values() if _learns(value)))

    # Rotary tables and frequencies of timesteps are float32 in both, by formulas that differ in the last bit.
    floor = 1e-6 if name in llm.KINDS else 1e-7 if name in unet.CASES else 1e-10
    ours = compare(theirs, run, torch.float64, floor=floor)
    assert ours.training is trains


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


AUTO = {
    "pooled": transformers.AutoModel,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}
# The family, and what reads its folders back.
FOLDERS: dict[str, tuple[str, Any]] = {
    **{f"{kind} {head}": ("bert", AUTO[head]) for kind, head in bert.CASES},
    **dict.fromkeys(llm.KINDS, ("llm", transformers.AutoModelForCausalLM)),
    **dict.fromkeys(unet.CASES, ("unet", UNet2DConditionModel)),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_saved_folders_load_in_both_libraries(name: str, tmp_path: Path) -> None:
    (family, reader), (make, inputs_of, _) = FOLDERS[name], PARITY[name]
    package, theirs = importlib.import_module(f"zoo.{family}"), make()
    answers = ("labels", "start_positions", "end_positions")
    inputs = {key: value for key, value in inputs_of(theirs).items() if key not in answers}

    def same(ours: Any, upstream: Any) -> None:
        with torch.inference_mode():
            found, expected = pytree.tree_leaves(ours(**inputs)), pytree.tree_leaves(tuple(upstream(**inputs).values()))
        # Language models of transformers return a cache behind the logits.
        for one, other in zip([each for each in found if each is not None], expected, strict=family != "llm"):
            assert (one - other).norm() <= 1e-5 * other.norm()

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = package.load(tmp_path / "theirs")
    assert not model.training and model.config == zoo.from_upstream(theirs).config
    same(model, theirs)
    package.save(model, tmp_path / "ours")
    read, report = reader.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(read) is type(theirs)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    same(model, read.eval())
    again = package.load(tmp_path / "ours", dtype=torch.bfloat16)
    assert again.config == model.config and next(again.parameters()).dtype is torch.bfloat16


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}


def small_unet(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return UNet2DConditionModel(**{**unet.SIZES, **options})


def changed(model: nn.Module, **options: Any) -> nn.Module:
    vars(model.config).update(options)
    return model


def edited(make: Make, change: Any) -> nn.Module:
    """A model whose owner changed it by hand: by a function, or a module at a place replaced by another."""
    model = make()
    if callable(change):
        change(model)
    else:
        place, name, other = change
        setattr(model.get_submodule(place), name, other)
    return model


small_resnet = partial(ResNet, BasicBlock, [1, 2, 1, 1])
BY_HAND: list[tuple[Make, Any, str]] = [
    *(
        (small_resnet, change, words)
        for change, words in [
            (("", "fc", nn.Sequential(nn.Dropout(), nn.Linear(512, 3))), "fc=Sequential"),
            (("", "conv1", nn.Conv2d(3, 64, 3, bias=False)), r"conv1\.kernel_size=\(3, 3\).*expected \(7, 7\)"),
            (("layer3.0", "bn2", nn.BatchNorm2d(256, eps=1e-3)), r"layer3\.0\.bn2\.eps=0\.001.*expected 1e-05"),
            (("layer2.0", "relu", nn.GELU()), r"layer2\.0\.relu=GELU"),
            (("", "bn1", nn.GroupNorm(4, 64)), r"bn1=GroupNorm.*expected BatchNorm2d"),
            (lambda module: module.train().layer1[0].bn1.eval(), r"layer1\.0\.bn1 has training=False"),
            (lambda module: module.layer4.register_forward_hook(print), "layer4 has a hook"),
        ]
    ),
    *(
        (partial(unet.make, "sd"), change, words)
        for change, words in [
            (lambda module: module.enable_freeu(0.9, 0.2, 1.2, 1.4), "FreeU is on.*disable_freeu"),
            (lambda module: module.fuse_qkv_projections(), "is a FusedAttnProcessor2_0.*unfuse_qkv"),
            (lambda module: module.set_attn_processor(SlicedAttnProcessor(1)), "is a SlicedAttnProcessor"),
            (
                lambda module: module.set_attn_processor(IPAdapterAttnProcessor2_0(16, 32)),
                r"is a IPAdapterAttnProcessor2_0.*call pipe\.unload_ip_adapter\(\)",
            ),
            (lambda module: module.mid_block.attentions.append(nn.Identity()), "attentions.1=Identity"),
        ]
    ),
    (
        partial(graph_model, pyg.GCN, {"num_layers": 3}),
        ("convs.1", "improved", True),
        "convs.1.improved=True.*expected False",
    ),
    (partial(graph_model, pyg.GAT, {}), ("convs.0", "dropout", 0.5), r"dropout=0\.5"),
    *(
        (partial(graph_model, pyg.GCN, {"num_layers": 3, "norm": "batch_norm"}), change, words)
        for change, words in [
            (lambda module: module.train().norms[0].eval(), r"norms\.0 has training=False, .* put all of it in one"),
            (lambda module: module.convs[0].register_forward_hook(print), r"convs\.0 has a hook, .* remove it first"),
            (lambda module: module.register_forward_hook(print), "the model itself has a hook"),
            (lambda module: module.convs[0].register_message_forward_hook(print), r"convs\.0 has a hook"),
            (lambda module: module.convs[0].register_full_backward_hook(print), r"convs\.0 has a hook"),
            (("convs.0", "message", print), r"convs\.0 has a message in place of its class's, .* compile the model as"),
            (("convs.0", "lin", nn.Sequential(nn.Linear(8, 8))), r"convs\.0\.lin='Sequential'"),
            (
                lambda module: setattr(module.norms[1].module, "weight", module.norms[0].module.weight),
                r"norms\.1\.module\.weight and .* would no longer be one tensor; untie them",
            ),
        ]
    ),
    (partial(unet.make, "sd"), lambda module: module.enable_gradient_checkpointing(), "gradient_checkpointing=True"),
]


def test_a_unet_whose_projections_were_fused_and_unfused_is_converted() -> None:
    module = unet.make("sd")
    inputs = unet.inputs(module)
    module.fuse_qkv_projections()
    module.unfuse_qkv_projections()
    found, expected = (each(**inputs, return_dict=False)[0] for each in (zoo.from_upstream(module), module))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_parts_in_another_mode_are_not_converted_back() -> None:
    model = zoo.create("resnet-debug").train()
    model.stages[0].eval()
    with pytest.raises(ValueError, match=r"stages\.0.* has training=False, which would be lost"):
        zoo.to_upstream(model)


REFUSED: list[tuple[Make, str]] = [
    *(
        (lambda name=option, value=value: changed(bert.make("bert", "pooled"), **{name: value}), f"{option}={value!r}")
        for option, value in [
            ("is_decoder", True), ("add_cross_attention", True), ("position_embedding_type", "relative_key"),
            ("hidden_act", "silu"),
        ]
    ),
    (partial(bert.make, "bert", "masked-lm", tie_word_embeddings=False), "tie_word_embeddings=False"),
    *(
        (partial(llm.make, kind, **options), f"transformers' {kind} with {words}")
        for kind, options, words in [
            ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
            ("llama", {"attention_bias": True}, "attention_bias=True"),
            ("llama", {"mlp_bias": True}, "mlp_bias=True"),
            ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
            ("llama", {"rope_parameters": YARN}, "rope_type='yarn'"),
            ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor=0.5"),
            ("qwen2", {**WINDOW, "max_window_layers": 1}, "layer_types="),
        ]
    ),
    *(
        (partial(small_unet, **{option: value}), f"{option}={value!r}")
        for option, value in [
            ("mid_block_type", None), ("act_fn", "gelu"), ("class_embed_type", "timestep"), ("flip_sin_to_cos", False),
        ]
    ),
    (
        partial(
            small_unet, transformer_layers_per_block=[[1], [2]], reverse_transformer_layers_per_block=[[2, 1], [1, 3]]
        ),
        "reverse_transformer_layers_per_block",
    ),
    (partial(small_resnet, norm_layer=nn.SyncBatchNorm), "bn1=SyncBatchNorm"),
    *((partial(edited, make, change), words) for make, change, words in BY_HAND),
    (partial(small_unet, addition_embed_type="text", addition_embed_type_num_heads=4), "addition_embed_type"),
    *(
        (partial(graph_model, cls, options), words)
        for cls, options, words in [
            (pyg.GAT, {"v2": True}, "convs.0='GATv2Conv'"),
            (pyg.GAT, {"edge_dim": 3}, "edge_dim=3"),
            (pyg.GAT, {"in_channels": (6, 6)}, r"in_channels=\(6, 6\)"),
            (pyg.GraphSAGE, {"aggr": ["mean", "max"]}, r"aggr is \['mean', 'max'\], expected"),
            (pyg.GCN, {"aggr": "mean"}, "convs.0.aggr_module=MeanAggregation.*expected SumAggregation"),
            (pyg.GCN, {"act": abs}, "act=<built-in function abs"),
            (pyg.GCN, {"norm": torch.nn.LayerNorm(8)}, "supported are torch-geometric's BatchNorm and LayerNorm"),
            (pyg.GCN, {"norm": "batch", "norm_kwargs": {"momentum": None}}, "norm_kwargs has momentum=None"),
            (pyg.GCN, {"norm": "batch", "norm_kwargs": {"allow_single_element": True}}, "allow_single_element"),
            (pyg.GCN, {"flow": "target_to_source"}, "flow='target_to_source'"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_options_that_are_not_supported_are_named(make: Make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zoo.from_upstream(make())


def test_a_weighted_degree_of_zero_gives_no_gradient_where_torch_geometric_gives_nan() -> None:
    theirs = graph_model(pyg.GCN, {"num_layers": 1})
    x, edge_index = torch.randn(2, 6), torch.tensor([[0, 1], [1, 1]])
    outputs, gradients = [], []
    for model in (zoo.from_upstream(theirs), theirs):
        weight = torch.tensor([1.0, -1.0], requires_grad=True)
        outputs.append(model(x, edge_index, weight))
        outputs[-1].sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*outputs)
    assert torch.equal(gradients[0], torch.zeros(2)) and gradients[1].isnan().all()


def test_lazy_width_is_read_from_the_weights() -> None:
    theirs = graph_model(pyg.GraphSAGE, {"in_channels": -1})
    with pytest.raises(ValueError, match=r"in_channels=-1.*call the model once"):
        zoo.from_upstream(theirs)
    x, edge_index = graph_inputs(weighted=False).values()
    theirs(x, edge_index)
    assert zoo.from_upstream(theirs).config.in_channels == 6


@pytest.mark.parametrize(("cls", "options"), [(pyg.GCN, {}), (pyg.GAT, {"heads": 2}), (pyg.GraphSAGE, {})], ids=str)
def test_dropout_has_upstreams_effect(cls: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    theirs = graph_model(cls, {"dropout": 0.4, **options})
    ours = zoo.from_upstream(theirs.train())
    x, edge_index = graph_inputs(weighted=False).values()
    draws = [torch.stack([model(x, edge_index).detach() for _ in range(600)]) for model in (ours, theirs)]
    for ours, theirs in ((each.mean(0) for each in draws), (each.std(0) for each in draws)):
        assert (ours - theirs).norm() < 0.1 * theirs.norm()
