"""Random models of every family, and random training runs, against upstream's and a plain loop; see fuzzing.py."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
import transformers
from diffusers import UNet2DConditionModel
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

import zoo
from tests.bert_reference import NAMES
from tests.fuzzing import (
    Results,
    backward,
    compare,
    convert,
    dtypes,
    fuzz,
    one_of,
    randomize,
    rarely,
    round_trips,
    seeds,
)
from tests.gnn_reference import edges_of
from tests.training_models import build, draw, loss_of, optimizer_of, plain_losses
from zoo.bert import pack, unpack
from zoo.gnn import CSRGraph, GATConv, NeighborSampler, SAGEConv
from zoo.training import TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread", "exact_norms")


@st.composite
def llm_models(draw: Any) -> tuple[str, dict[str, Any]]:
    name = draw(one_of("Llama", "Mistral", "Qwen2", "Qwen3"))
    key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width = draw(one_of(2, 4, 6, 16))
    options: dict[str, Any] = {
        "vocab_size": draw(st.integers(8, 40)),
        "hidden_size": key_heads * groups * draw(one_of(2, 4, 6)),
        "intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": key_heads * groups,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 40,
        "rms_norm_eps": draw(one_of(1e-6, 1e-3)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": draw(one_of(None, 0, 3)),
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "gelu" if draw(rarely) else "silu",
    }
    if name in ("Llama", "Qwen3") or draw(st.booleans()):
        options["head_dim"] = width
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw(one_of(100.0, 10000.0))}
    kind = "yarn" if draw(rarely) else draw(one_of("default", "linear", "llama3"))
    if kind != "default":
        rope |= {"rope_type": kind, "factor": draw(one_of(1.5, 8.0))}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    options["rope_parameters"] = rope
    if name == "Llama":
        options |= {"attention_bias": draw(rarely), "mlp_bias": draw(rarely)}
    elif name == "Mistral":
        options["sliding_window"] = draw(one_of(None, 1, 2, 3, 5, 12))
    elif draw(st.booleans()):
        layers = options["num_hidden_layers"]
        options |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 12))}
        options["max_window_layers"] = 1 if draw(rarely) else draw(one_of(0, layers))
    return name, options


def build_llm(name: str, options: dict[str, Any], seed: int) -> Any:
    cls = getattr(transformers, f"{name}ForCausalLM")
    return randomize(cls(cls.config_class(**options)), seed).eval()


@fuzz
@given(data=st.data(), made=llm_models(), dtype=dtypes, rows=st.integers(1, 3), tokens=st.integers(1, 14), seed=seeds)
def test_prompts(data: st.DataObject, made: Any, dtype: torch.dtype, rows: int, tokens: int, seed: int) -> None:
    name, options = made
    theirs = build_llm(name, options, seed)
    named = {"head_dim", "layer_types", "rope_type", *options}
    if convert(theirs, named) is None:
        return
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(options["vocab_size"], (rows, tokens), generator=generator)
    mask = None
    if data.draw(st.booleans()):
        holes = st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)
        mask = torch.tensor(data.draw(holes)).view(rows, tokens).long()
    shift = data.draw(one_of(None, 0, 7))
    positions = None if shift is None else torch.arange(shift, shift + tokens)[None]
    # Of padding nobody reads a logit.
    read = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        logits = model(ids, attention_mask=mask, position_ids=positions)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        assert read.all() or logits.isfinite().all()
        return backward({"logits": logits[read]})

    # Rotary tables are float32 in both, by formulas that differ in the last bit.
    ours = compare(theirs, run, dtype, floor=1e-6)
    round_trips(theirs, ours)


@fuzz
@given(
    made=llm_models(), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), new=st.integers(1, 8), seed=seeds,
    dtype=one_of(torch.float32, torch.float64),
)  # fmt: skip
def test_generation(made: Any, lengths: list[int], new: int, seed: int, dtype: torch.dtype) -> None:
    """Each token is the most likely one after the whole text before it, and logits of one token a time are the same."""
    name, options = made
    theirs = build_llm(name, options, seed).to(dtype)
    model = convert(theirs, {"head_dim", "layer_types", "rope_type", *options})
    if model is None:
        return
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(options["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    answers = model.generate(prompts, max_new_tokens=new)
    tight = 1e-4 if dtype == torch.float32 else 1e-6
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            text = torch.tensor([prompt + answer.tolist()])
            logits = theirs(text).logits[0]
            scale = logits.abs().max()
            for at, token in enumerate(answer.tolist(), start=len(prompt) - 1):
                assert logits[at, token] >= logits[at].max() - tight * scale
            cache = model.make_cache(1, text.shape[1])
            stepped = [
                model(text[:, at : at + 1], position_ids=torch.tensor([[at]]), cache=cache)[0, 0]
                for at in range(text.shape[1])
            ]
            torch.testing.assert_close(torch.stack(stepped), logits, rtol=0, atol=float(tight * scale))


OUTPUTS = ("last_hidden_state", "pooler_output", "logits", "start_logits", "end_logits", "loss")


@st.composite
def bert_models(draw: Any) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    kind, head = draw(one_of("Bert", "Roberta")), draw(one_of(*NAMES))
    heads, pad = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    options = {
        "vocab_size": draw(st.integers(6, 30)),
        "hidden_size": heads * draw(one_of(1, 3, 4, 8)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(1, 20)),
        "max_position_embeddings": 12 + (pad + 1 if kind == "Roberta" else 0) + draw(st.integers(0, 5)),
        "type_vocab_size": draw(st.integers(1, 3)),
        "layer_norm_eps": draw(one_of(1e-12, 1e-5, 1e-2)),
        "pad_token_id": pad,
        "hidden_act": "silu" if draw(rarely) else draw(one_of("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")),
        "is_decoder": kind == "Bert" and draw(rarely),
        "tie_word_embeddings": not draw(rarely),
    }
    if "classification" in head:
        options |= {"num_labels": draw(st.integers(1, 4)), "classifier_dropout": draw(one_of(None, 0.3))}
    extra = {"add_pooling_layer": draw(one_of(True, False))} if head == "pooled" else {}
    return kind, head, options, extra


def build_bert(made: Any, seed: int) -> Any:
    kind, head, options, extra = made
    cls = getattr(transformers, kind + NAMES[head])
    return randomize(cls(cls.config_class(**options), **extra), seed).eval()


@pytest.mark.slow
@fuzz
@given(data=st.data(), made=bert_models(), dtype=dtypes, rows=st.integers(1, 4), tokens=st.integers(1, 12), seed=seeds)
def test_encoders(data: st.DataObject, made: Any, dtype: torch.dtype, rows: int, tokens: int, seed: int) -> None:
    _, head, options, _ = made
    theirs = build_bert(made, seed)
    if convert(theirs, options) is None:
        return
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(options["vocab_size"], (rows, tokens), generator=generator)}
    if data.draw(st.booleans()):
        holes = st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)
        batch["attention_mask"] = torch.tensor(data.draw(holes)).view(rows, tokens).long()
    if data.draw(st.booleans()):
        batch["token_type_ids"] = torch.randint(options["type_vocab_size"], (rows, tokens), generator=generator)
    labels = {}
    if head == "question-answering":
        labels = {f"{end}_positions": torch.randint(tokens, (rows,), generator=generator) for end in ("start", "end")}
    elif head == "sequence-classification" and options["num_labels"] > 1:
        labels = {"labels": torch.randint(options["num_labels"], (rows,), generator=generator)}
    elif head in ("token-classification", "masked-lm"):
        classes = options["num_labels"] if head == "token-classification" else options["vocab_size"]
        labels = {"labels": torch.randint(classes, (rows, tokens), generator=generator)}
    if not data.draw(st.booleans()):
        labels = {}
    seen = batch.get("attention_mask", torch.ones(rows, tokens)).bool()
    # Of a row of nothing but padding nobody asks for a loss.
    ignored = tokens if head == "question-answering" else -100
    for name, value in labels.items():
        labels[name] = value.where(seen if value.dim() == 2 else seen.any(1), ignored)

    def per_token(name: str) -> bool:
        return name != "pooler_output" and head != "sequence-classification"

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        output = model(**batch, **labels)
        found = {name: value for name in OUTPUTS if (value := getattr(output, name, None)) is not None}
        for name, value in found.items():
            assert name == "loss" or value.isfinite().all()
            if value.dim():
                found[name] = value[seen if per_token(name) else seen.any(1)]
        return backward(found)

    ours = compare(theirs, run, dtype)
    round_trips(theirs, ours)
    if seen.any(1).all():
        packed = pack(**batch, config=ours.config)
        with torch.no_grad():
            padded, unpacked = ours(**batch), unpack(ours(packed), packed)
        tight = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
        for name in OUTPUTS[:-1]:
            if (expected := getattr(padded, name, None)) is None:
                continue
            found = getattr(unpacked, name)
            if per_token(name):
                found, expected = found[seen], expected[seen]
            elif not seen[:, 0].all():
                # Padded, it is read off the first column; packed, off the first token.
                continue
            torch.testing.assert_close(found, expected, rtol=tight, atol=tight * float(expected.abs().max()))


def both_refuse(theirs: nn.Module, run: Any, dtype: torch.dtype) -> None:
    """Batch norm of one value a channel, in training."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(theirs, dtype)


GRAPH_PRESETS = {"GCN": "gcn-debug", "GAT": "gat-debug", "GraphSAGE": "graphsage-debug"}


@st.composite
def edges(draw: Any, sources: int, destinations: int) -> Tensor:
    """[2, E], with isolated nodes, loops and duplicates; none at all is likely."""
    pairs = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    drawn = draw(st.lists(pairs, max_size=30))
    return torch.tensor(drawn, dtype=torch.int64).view(-1, 2).t().contiguous()


@st.composite
def gnn_models(draw: Any) -> tuple[str, dict[str, Any]]:
    name = draw(one_of(*GRAPH_PRESETS))
    heads = draw(st.integers(1, 3)) if name == "GAT" else 1
    options = {
        "in_channels": draw(st.integers(1, 9)),
        "hidden_channels": heads * draw(st.integers(1, 5)),
        "num_layers": draw(st.integers(1, 3)),
        "out_channels": draw(one_of(None, 1, 3)),
        "act": draw(one_of("relu", "elu", "gelu", "tanh", None)),
        "act_first": draw(st.booleans()),
        "norm": "graph_norm" if draw(rarely) else draw(one_of(None, "batch", "layer")),
        "jk": "lstm" if draw(rarely) else draw(one_of(None, "last", "cat", "max")),
        "bias": draw(st.booleans()),
    }
    if options["jk"] == "lstm":
        options["num_layers"] = 2  # or it may have no width in torch-geometric
    if options["out_channels"] is not None and name == "GAT":
        options["out_channels"] *= heads
    if name == "GCN":
        options |= {"improved": draw(st.booleans()), "normalize": draw(st.booleans())}
    elif name == "GAT":
        options |= {"heads": heads, "concat": draw(st.booleans()), "negative_slope": draw(one_of(0.2, 0.0, 0.7))}
        options |= {"add_self_loops": draw(st.booleans()), "residual": draw(st.booleans())}
        options |= {"v2": draw(rarely)}
    else:
        options |= {"aggr": "lstm" if draw(rarely) else draw(one_of("mean", "max", "sum"))}
        options |= {name: draw(st.booleans()) for name in ("normalize", "root_weight", "project")}
    return name, options


@fuzz
@given(data=st.data(), made=gnn_models(), dtype=dtypes, nodes=st.integers(1, 12), seed=seeds, training=st.booleans())
def test_graph_models(data, made, dtype, nodes, seed, training):
    name, options = made
    edge_index = data.draw(edges(nodes, nodes))
    if name == "GCN":
        # Of the self-loops of a node the last counts alone; torch-geometric gives the others its gradient.
        pairs = edge_index.t().tolist()
        kept = [index for index, (a, b) in enumerate(pairs) if a != b or [a, b] not in pairs[:index]]
        edge_index = edge_index[:, kept]
    # Multiples of a quarter: a degree is zero in each dtype or in none.
    quarters = st.lists(st.integers(-8, 12), min_size=edge_index.shape[1], max_size=edge_index.shape[1])
    weights = data.draw(st.none() | quarters) if name == "GCN" else None
    scale = data.draw(one_of(0.1, 1.0, 20.0))
    theirs = randomize(getattr(pyg, name)(**options), seed).train(training)
    if convert(theirs, [*options, "convs"]) is None:
        return
    features = scale * torch.randn(nodes, options["in_channels"], generator=torch.Generator().manual_seed(seed))

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        inputs = [features.to(dtype, copy=True).requires_grad_()]
        if weights is not None:
            inputs.append((torch.tensor(weights) / 4).to(dtype, copy=True).requires_grad_())
        return backward({"output": model(inputs[0], edge_index, *inputs[1:])}, *inputs)

    try:
        # Batch norm of rows that are nearly equal divides their rounding by the root of eps; in bfloat16 that is all.
        normed = training and options["norm"] == "batch"
        dtype = torch.float32 if normed and dtype == torch.bfloat16 else dtype
        # GraphSAGE that normalises a single channel returns signs: the outputs' weights, cosines, cancel in gradients.
        widths = options["hidden_channels"], options["out_channels"]
        signs = name == "GraphSAGE" and options["normalize"] and 1 in widths
        floor = 1e-3 if normed and dtype == torch.float32 else 0.0
        ours = compare(theirs, run, dtype, floor=floor, least_gradient=1.0 if signs else 0.0)
    except ValueError:
        both_refuse(theirs, run, dtype)
    else:
        round_trips(theirs, ours, GRAPH_PRESETS[name])


@fuzz
@given(
    data=st.data(), kind=one_of("sage", "gat"), sources=st.integers(1, 9), destinations=st.integers(1, 9),
    dtype=one_of(torch.float64, torch.float32), seed=seeds,
)  # fmt: skip
def test_bipartite_convolutions(data, kind, sources, destinations, dtype, seed):
    edge_index = data.draw(edges(sources, destinations))
    widths, out = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))), data.draw(st.integers(1, 5))
    if kind == "sage":
        options = {name: data.draw(st.booleans()) for name in ("normalize", "root_weight", "project", "bias")}
        options |= {"aggr": data.draw(one_of("mean", "max", "sum"))}
        theirs, ours = pyg.SAGEConv(widths, out, **options), SAGEConv(widths, out, **options)
    else:
        options = {"heads": data.draw(st.integers(1, 3)), "concat": data.draw(st.booleans()), "add_self_loops": False}
        options |= {name: data.draw(st.booleans()) for name in ("bias", "residual")}
        theirs, ours = pyg.GATConv(widths, out, **options), GATConv(widths, out, **options)
    randomize(theirs, seed)
    ours.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(*shape, generator=generator) for shape in zip((sources, destinations), widths, strict=True)]

    def run(conv: nn.Module, graph: Any, dtype: torch.dtype) -> Results:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in features]
        results = backward({"output": conv.to(dtype)(tuple(inputs), graph)}, *inputs)
        return results | {n: p.grad.double() for n, p in conv.named_parameters() if p.grad is not None}

    graph = CSRGraph.from_edge_index(edge_index, num_nodes=(sources, destinations))
    expected, found = run(theirs, edge_index, dtype), run(ours, graph, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for name in found:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@fuzz
@given(
    data=st.data(), nodes=st.integers(1, 30), batch_size=st.integers(1, 9), layers=st.integers(1, 3), seed=seeds,
    dtype=one_of(torch.float64, torch.float32),
)  # fmt: skip
def test_sampled_training(data, nodes, batch_size, layers, seed, dtype):
    edge_index = data.draw(edges(nodes, nodes))
    fanouts = data.draw(st.lists(one_of(-1, 1, 2, 5), min_size=layers, max_size=layers))
    options = {name: data.draw(st.booleans()) for name in ("normalize", "root_weight", "project", "bias")}
    options |= {"aggr": data.draw(one_of("mean", "max", "sum")), "jk": data.draw(one_of(None, "cat", "last"))}
    sizes = {"in_channels": data.draw(st.integers(1, 6)), "hidden_channels": data.draw(st.integers(1, 6))}
    theirs = randomize(pyg.GraphSAGE(**sizes, num_layers=layers, out_channels=3, **options), seed).to(dtype)
    sampler = NeighborSampler(
        edge_index, fanouts=fanouts, batch_size=batch_size, num_nodes=nodes, seed=seed % 1000, workers=0
    )
    x = torch.randn(nodes, sizes["in_channels"], generator=torch.Generator().manual_seed(seed)).to(dtype)
    met = []
    for batch in sampler.epoch(0):
        count = int((batch.seeds >= 0).sum())
        met += batch.seeds[:count].tolist()

        def run(model: nn.Module, graph: Any, x: Tensor, count: int = count) -> list[Tensor]:
            output = model(x, graph)[:count]
            return [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)]

        ours = zoo.from_upstream(theirs)
        found = run(ours, batch.graphs, x[batch.nodes])
        drawn = edges_of(batch)
        plain = run(theirs, drawn, x[batch.nodes])
        named = dict(zip((n for n, _ in theirs.named_parameters()), plain[1:], strict=True))
        expected = zoo.gnn.convert.WEIGHTS.convert_state_dict({**theirs.state_dict(), **named}, ours.config)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(found[0], plain[0], rtol=tolerance, atol=tolerance)
        scale = 1 + max(float(each.norm()) for each in plain[1:] if each is not None)
        for (name, _), gradient in zip(ours.named_parameters(), found[1:], strict=True):
            torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance * scale)
    assert sorted(met) == list(range(nodes))


@st.composite
def resnet_models(draw: Any) -> dict[str, Any]:
    bottleneck = draw(st.booleans())
    options: dict[str, Any] = {
        "block": Bottleneck if bottleneck else BasicBlock,
        "layers": draw(st.lists(one_of(1, 1, 2), min_size=4, max_size=4)),
        "num_classes": draw(st.integers(1, 5)),
    }
    if bottleneck:
        options |= {"groups": draw(one_of(1, 2, 4)), "width_per_group": draw(one_of(1, 4, 6))}
        options["replace_stride_with_dilation"] = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    if draw(rarely):
        return options | {"norm_layer": partial(nn.GroupNorm, 1)}
    kind, own = draw(one_of(nn.BatchNorm2d, FrozenBatchNorm2d)), {"eps": draw(one_of(1e-5, 1e-2))}
    if kind is nn.BatchNorm2d:
        own |= {"momentum": draw(one_of(0.1, 0.5)), "track_running_stats": draw(st.booleans())}
    return options | {"norm_layer": partial(kind, **own)}


@pytest.mark.slow
@fuzz
@given(
    options=resnet_models(), dtype=dtypes, rows=st.integers(1, 3), sides=st.tuples(*[st.integers(1, 40)] * 2),
    channels=one_of(3, 3, 1), last=st.booleans(), training=st.booleans(), seed=seeds,
)  # fmt: skip
def test_resnets(options, dtype, rows, sides, channels, last, training, seed):
    # Not drawn twice: it is most of the time.
    with torch.device("meta"):
        module = ResNet(**options)
        if channels != 3:
            module.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    theirs = randomize(module.to_empty(device="cpu"), seed).train(training)
    if convert(theirs, [*options, "bn1"]) is None:
        return
    images = torch.randn(rows, channels, *sides, generator=torch.Generator().manual_seed(seed))
    if last:
        images = images.contiguous(memory_format=torch.channels_last)

    # On a CPU torch's bfloat16 convolutions read memory that nobody wrote in their backward, for images of one pixel.
    differentiable = dtype != torch.bfloat16

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        x = images.to(dtype, copy=True).requires_grad_(differentiable)
        with torch.set_grad_enabled(differentiable):
            return backward({"logits": model(x)}, x)

    try:
        ours = compare(theirs, run, dtype)
    except ValueError:
        both_refuse(theirs, run, dtype)
    else:
        round_trips(theirs, ours, "resnet-debug")


@st.composite
def unet_models(draw: Any) -> dict[str, Any]:
    levels = draw(st.integers(1, 2))
    attended = draw(st.lists(st.booleans(), min_size=levels, max_size=levels))
    heads = draw(one_of(1, 2))
    options: dict[str, Any] = {
        "in_channels": draw(st.integers(1, 5)),
        "out_channels": draw(st.integers(1, 5)),
        "block_out_channels": tuple(8 * draw(st.integers(1, 2)) for _ in range(levels)),
        "down_block_types": tuple("CrossAttnDownBlock2D" if each else "DownBlock2D" for each in attended),
        "up_block_types": tuple("CrossAttnUpBlock2D" if each else "UpBlock2D" for each in reversed(attended)),
        "layers_per_block": draw(st.integers(1, 2)),
        "transformer_layers_per_block": draw(st.integers(1, 2)),
        "attention_head_dim": heads,
        "cross_attention_dim": draw(st.integers(1, 9)),
        "norm_num_groups": draw(one_of(1, 2, 4)),
        "norm_eps": draw(one_of(1e-5, 1e-3)),
        "use_linear_projection": draw(st.booleans()),
        "upcast_attention": draw(st.booleans()),
        "center_input_sample": draw(rarely),
        "act_fn": "relu" if draw(rarely) else "silu",
        "dual_cross_attention": draw(rarely),
    }
    return options | ({"time_cond_proj_dim": 3} if draw(st.booleans()) else {})


@pytest.mark.slow
@fuzz
@given(
    options=unet_models(), dtype=dtypes, rows=st.integers(1, 2), sides=st.tuples(*[st.integers(1, 5)] * 2),
    tokens=st.integers(1, 5), timestep=st.integers(0, 999), seed=seeds,
)  # fmt: skip
def test_unets(options, dtype, rows, sides, tokens, timestep, seed):
    theirs = randomize(UNet2DConditionModel(**options), seed).eval()
    if convert(theirs, options) is None:
        return
    generator = torch.Generator().manual_seed(seed)
    scale = 2 ** (len(options["block_out_channels"]) - 1)
    sample = torch.randn(rows, options["in_channels"], *(scale * side for side in sides), generator=generator)
    text = torch.randn(rows, tokens, options["cross_attention_dim"], generator=generator)
    condition = torch.randn(rows, options.get("time_cond_proj_dim", 1), generator=generator)

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in (sample, text, condition)]
        given = {"timestep_cond": inputs[2]} if "time_cond_proj_dim" in options else {}
        output = model(inputs[0], torch.tensor(timestep), encoder_hidden_states=inputs[1], **given)
        return backward({"sample": output.sample}, *inputs)

    # A norm over two values amplifies a rounding up to a million times.
    ours = compare(theirs, run, dtype, floor=1e-8)
    round_trips(theirs, ours)


@fuzz
@given(
    kind=one_of("adamw", "sgd", "plain"), counts=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    rows=st.lists(st.integers(1, 7), min_size=18, max_size=18), clip_norm=one_of(None, 1e-3, 0.5, 100.0),
    captured=st.booleans(), warmup=st.integers(2, 4), rate=one_of(0.0, 1e-3, 1e-1),
    dtype=one_of(torch.float32, torch.float64), seed=st.integers(0, 1000),
)  # fmt: skip
def test_updates(kind, counts, rows, clip_norm, captured, warmup, rate, dtype, seed):
    batches = iter([(x.to(dtype), y) for n, size in enumerate(rows) for x, y in draw(1, size, seed=seed + n)])
    updates = [list(itertools.islice(batches, count)) for count in counts]
    expected_model, model = build().to(dtype), build().to(dtype)
    expected = plain_losses(expected_model, optimizer_of(expected_model, kind, rate), updates, clip_norm)
    optimizer = optimizer_of(model, kind, rate)
    step = TrainingStep(
        model, loss_of, optimizer, clip_norm=clip_norm, cuda_graph=captured, warmup=warmup, most_graphs=20
    )
    losses = [step(*update).item() for update in updates]
    assert losses == pytest.approx(expected, rel=1e-4)
    for parameter, wanted in zip(model.parameters(), expected_model.parameters(), strict=True):
        # Adam divides gradients by their own size: one that is nearly zero moves a weight by its rounding.
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5 + 1e-3 * rate)
    assert all(parameter.grad is None for parameter in model.parameters())
