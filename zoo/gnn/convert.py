"""To and from torch-geometric's ``GCN``, ``GAT`` and ``GraphSAGE``. The only file here that imports the library."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation
from torch_geometric.nn.models.basic_gnn import BasicGNN

from zoo.gnn.convs import ACTIVATIONS
from zoo.gnn.model import GATConfig, GCNConfig, GNNConfig, SAGEConfig, build

# {theirs: ours}; {} is the layer's index, {last} the last layer's. No two entries overlap.
KEYS = {
    "convs.{}.lin.weight": "layers.{}.conv.lin.weight",
    "convs.{}.lin.bias": "layers.{}.conv.lin.bias",
    "convs.{}.lin_l.weight": "layers.{}.conv.lin_l.weight",
    "convs.{}.lin_l.bias": "layers.{}.conv.lin_l.bias",
    "convs.{}.lin_r.weight": "layers.{}.conv.lin_r.weight",
    "convs.{}.att_src": "layers.{}.conv.att_src",
    "convs.{}.att_dst": "layers.{}.conv.att_dst",
    "convs.{}.res.weight": "layers.{}.conv.res.weight",
    "convs.{}.bias": "layers.{}.conv.bias",
    "norms.{}.module.weight": "layers.{}.epilogue.norm.weight",
    "norms.{}.module.bias": "layers.{}.epilogue.norm.bias",
    "norms.{}.module.running_mean": "layers.{}.epilogue.norm.running_mean",
    "norms.{}.module.running_var": "layers.{}.epilogue.norm.running_var",
    "norms.{}.module.num_batches_tracked": "layers.{}.epilogue.norm.num_batches_tracked",
    "lin.weight": "head.lin.weight",
    "lin.bias": "head.lin.bias",
}
# Their LayerNorm holds its weights itself, their BatchNorm in a module of its own.
_LAYER_NORM_KEYS = {
    "norms.{}.weight": "layers.{}.epilogue.norm.weight",
    "norms.{}.bias": "layers.{}.epilogue.norm.bias",
}

_CONVS = {pyg.GCN: pyg.GCNConv, pyg.GAT: pyg.GATConv, pyg.GraphSAGE: pyg.SAGEConv}
_CLASSES = {GCNConfig: pyg.GCN, GATConfig: pyg.GAT, SAGEConfig: pyg.GraphSAGE}
_AGGREGATIONS = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max"}
_FUNCTIONS = {torch.relu: "relu", torch.tanh: "tanh", torch.sigmoid: "sigmoid"} | {
    getattr(nn.functional, name): name for name in ("relu", "elu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid")
}


def from_upstream(module: nn.Module) -> nn.Module:
    """The zoo's model with the weights of a torch-geometric ``GCN``, ``GAT`` or ``GraphSAGE``, copied.

    Raises:
        NotImplementedError: If it is another class.
        ValueError: If it uses an option that the zoo does not support; the message names option and value.
    """
    config = config_of(module)
    state = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
    with torch.device("meta"):
        model = build(config)
    model.load_state_dict(convert_state_dict(state, config), strict=True, assign=True)
    theirs = dict(module.named_parameters())
    ours = dict(model.named_parameters())
    for their_name, our_name in _names(config).items():
        if their_name in theirs:
            ours[our_name].requires_grad_(theirs[their_name].requires_grad)
    return model.train(module.training)


def to_upstream(model: nn.Module) -> nn.Module:
    """The torch-geometric model with a zoo model's weights, copied.

    Raises:
        TypeError: If the model is not of this family.
    """
    config: Any = getattr(model, "config", None)
    if type(config) not in _CLASSES:
        raise TypeError(f"{type(model).__name__} is not a GCN, GAT or GraphSAGE of the zoo")
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("act", "act_kwargs", "norm_kwargs")
    }
    options["act"] = None if config.act is None else ACTIVATIONS[config.act](**config.act_kwargs)
    options["norm_kwargs"] = dict(config.norm_kwargs)
    module: nn.Module = _CLASSES[type(config)](**options)
    ours = model.state_dict()
    state = {their_name: ours[our_name].detach().clone() for their_name, our_name in _names(config).items()}
    module.load_state_dict(state, strict=True, assign=True)
    parameters = dict(model.named_parameters())
    for their_name, parameter in module.named_parameters():
        parameter.requires_grad_(parameters[_names(config)[their_name]].requires_grad)
    return module.train(model.training)


def convert_state_dict(state_dict: Mapping[str, Tensor], config: GNNConfig) -> dict[str, Tensor]:
    """Their keys to ours, strictly: every key that the config needs, and no other.

    Raises:
        ValueError: If a key is missing or left over.
    """
    names = _names(config)
    missing, extra = sorted(names.keys() - state_dict.keys()), sorted(state_dict.keys() - names.keys())
    if missing or extra:
        raise ValueError(f"the state dict does not fit the config: missing {missing[:8]}, unexpected {extra[:8]}")
    return {our_name: state_dict[their_name] for their_name, our_name in names.items()}


def _names(config: GNNConfig) -> dict[str, str]:
    """{theirs: ours} for every tensor of a model of this config."""
    with torch.device("meta"):
        wanted = set(build(config).state_dict())
    keys = KEYS if config.norm != "layer" else {k: v for k, v in KEYS.items() if ".module." not in k} | _LAYER_NORM_KEYS
    names = {
        theirs.format(index): ours.format(index)
        for theirs, ours in keys.items()
        for index in (range(config.num_layers) if "{}" in theirs else (0,))
    }
    return {theirs: ours for theirs, ours in names.items() if ours in wanted}


def config_of(module: Any) -> GNNConfig:
    """The config of a torch-geometric model, read from its modules and checked against what the zoo supports."""
    if type(module) not in _CONVS:
        raise NotImplementedError(f"{type(module).__name__} is not torch-geometric's GCN, GAT or GraphSAGE, exactly")
    convs, name = list(module.convs), type(module).__name__
    if not isinstance(module.in_channels, int):
        _refuse(name, "in_channels", module.in_channels, "a pair of widths is for a single SAGEConv or GATConv")
    for conv in convs:
        _check_conv(name, conv, _CONVS[type(module)])
    if len(convs) != module.num_layers:
        _refuse(name, "num_layers", module.num_layers, f"there are {len(convs)} convolutions")
    if module.jk_mode not in (None, "last", "cat", "max"):
        _refuse(name, "jk", module.jk_mode, "None, 'last', 'cat' and 'max' are supported")
    ends_in_conv = module.jk_mode is None and getattr(module, "_is_conv_to_out", False)
    shared: dict[str, Any] = {
        "in_channels": _input_width(name, convs[0]),
        "hidden_channels": module.hidden_channels,
        "num_layers": module.num_layers,
        "out_channels": module.out_channels if ends_in_conv or module.jk_mode is not None else None,
        "dropout": module.dropout.p,
        "act_first": module.act_first,
        "jk": module.jk_mode,
        **_activation(name, module.act),
        **_norm(name, module),
    }
    configs = [_READERS[type(module)](name, module, conv, shared) for conv in convs]
    hidden = [config for conv, config in zip(convs, configs, strict=True) if not (ends_in_conv and conv is convs[-1])]
    config = (hidden or configs)[0]
    for other in configs:
        for field in dataclasses.fields(config):
            first, second = getattr(config, field.name), getattr(other, field.name)
            if first != second and not (field.name == "concat" and other is configs[-1] and ends_in_conv):
                _refuse(name, field.name, second, f"another convolution has {first!r}, and all must agree")
    return config


def _gcn(name: str, module: BasicGNN, conv: Any, shared: Mapping[str, Any]) -> GNNConfig:
    options = {key: getattr(conv, key) for key in ("improved", "add_self_loops", "normalize", "cached")}
    return GCNConfig(**shared, **options, bias=conv.bias is not None)


def _gat(name: str, module: BasicGNN, conv: Any, shared: Mapping[str, Any]) -> GNNConfig:
    if conv.edge_dim is not None:
        _refuse(name, "edge_dim", conv.edge_dim, "edge features are not supported")
    if conv.dropout != module.dropout.p:
        _refuse(name, "dropout", conv.dropout, f"of a convolution, while the model's is {module.dropout.p}")
    options = {key: getattr(conv, key) for key in ("heads", "concat", "negative_slope", "add_self_loops", "residual")}
    return GATConfig(**shared, **options, bias=conv.bias is not None)


def _sage(name: str, module: BasicGNN, conv: Any, shared: Mapping[str, Any]) -> GNNConfig:
    if type(conv.aggr_module) not in _AGGREGATIONS:
        _refuse(name, "aggr", conv.aggr, "'mean', 'max' and 'sum' are supported")
    options = {key: getattr(conv, key) for key in ("normalize", "root_weight", "project")}
    return SAGEConfig(**shared, **options, aggr=_AGGREGATIONS[type(conv.aggr_module)], bias=conv.lin_l.bias is not None)


_READERS = {pyg.GCN: _gcn, pyg.GAT: _gat, pyg.GraphSAGE: _sage}


def _check_conv(name: str, conv: Any, expected: type[nn.Module]) -> None:
    if type(conv) is pyg.GATv2Conv:
        _refuse(name, "v2", True, "only the first version of graph attention is supported")
    if type(conv) is not expected:
        _refuse(name, "convs", type(conv).__name__, f"expected {expected.__name__}")
    if not isinstance(conv.in_channels, int):
        _refuse(name, "in_channels", conv.in_channels, "a pair of widths is for a single SAGEConv or GATConv")
    if expected is not pyg.SAGEConv and type(conv.aggr_module) is not SumAggregation:
        _refuse(name, "aggr", conv.aggr, "only the sum is supported here")
    if conv.flow != "source_to_target":
        _refuse(name, "flow", conv.flow, "swap the rows of edge_index instead")
    if conv.node_dim not in (0, -2):
        _refuse(name, "node_dim", conv.node_dim, "nodes are rows")
    if conv.decomposed_layers != 1:
        _refuse(name, "decomposed_layers", conv.decomposed_layers, "it changes how, not what is computed; drop it")


def _input_width(name: str, conv: Any) -> int:
    linear = conv.lin_l if hasattr(conv, "lin_l") else conv.lin
    if isinstance(linear.weight, nn.UninitializedParameter):
        _refuse(name, "in_channels", -1, "its weights do not exist yet; call the model once first")
    return int(linear.weight.shape[1])


def _activation(name: str, act: Any) -> dict[str, Any]:
    if act is None:
        return {"act": None}
    by_class = {cls: key for key, cls in ACTIVATIONS.items()}
    key = by_class.get(type(act)) or (_FUNCTIONS.get(act) if callable(act) and not isinstance(act, nn.Module) else None)
    if key is None:
        _refuse(name, "act", act, f"supported are {', '.join(ACTIVATIONS)}")
    options: dict[str, Any] = {}
    if isinstance(act, nn.Module):
        for option, parameter in inspect.signature(type(act)).parameters.items():
            value = getattr(act, option, parameter.default)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and value != parameter.default:
                options[option] = value
    return {"act": key, "act_kwargs": options}


def _norm(name: str, module: BasicGNN) -> dict[str, Any]:
    hidden = [norm for norm in module.norms if type(norm) is not nn.Identity]
    if not hidden:
        return {"norm": None}
    norm = hidden[0]
    expected = len(module.norms) - (module.jk_mode is None)
    kinds: set[tuple[Any, ...]] = set()
    for each in hidden:
        if type(each) is pyg.BatchNorm:
            inner, kind = each.module, "batch"
            options = {key: getattr(inner, key) for key in ("eps", "momentum", "affine", "track_running_stats")} | {
                "allow_single_element": each.allow_single_element
            }
        elif type(each) is pyg.LayerNorm:
            kind, options = "layer", {key: getattr(each, key) for key in ("eps", "affine", "mode")}
        else:
            _refuse(name, "norm", type(each).__name__, "torch-geometric's BatchNorm and LayerNorm are supported")
        kinds.add((kind, *options.items()))
    if len(kinds) > 1 or len(hidden) != expected:
        _refuse(name, "norms", [type(each).__name__ for each in module.norms], "all layers must have the same")
    if kind == "batch" and options["momentum"] is None:
        _refuse(name, "norm_kwargs", {"momentum": None}, "a cumulative average reads the device at each step")
    defaults = inspect.signature(type(norm)).parameters
    return {"norm": kind, "norm_kwargs": {k: v for k, v in options.items() if v != defaults[k].default}}


def _refuse(name: str, option: str, value: Any, why: str) -> None:
    raise ValueError(f"torch-geometric's {name} with {option}={value!r} is not supported: {why}")
