"""A layer where own kernels run: kernels by the file of checks, here what layers, compilers and callers need."""

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
import zoo.ops.common
from tests.blocks import Doubled
from tests.fake_gpu import traced
from zoo.bert import BertLayer, pack
from zoo.ops import transformer
from zoo.training import checkpoint_regions

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Launches of all kernels that the family uses."""

    def grown(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    low, norm = torch.bfloat16, transformer.add_layer_norm
    return {
        "norm": (norm, (grown(2, 3, 8), grown(2, 3, 8), None, grown(8), grown(8), 1e-6)),
        "norm and its copy": (norm, (grown(2, 8), grown(2, 8, dtype=low), grown(8), grown(8), grown(8), 1e-6, low)),
        "norm of a low sum": (norm, (grown(2, 8), grown(2, 8, dtype=low), None, grown(8), grown(8), 1e-6)),
        "norm of low rows": (norm, (*grown(2, 2, 8, dtype=low).unbind(), None, *grown(2, 8, dtype=low).unbind(), 1e-6)),
        "GELU": (transformer.bias_gelu, (grown(2, 3, 8), grown(8), False)),
        "GELU by tanh": (transformer.bias_gelu, (grown(3, 8, dtype=low), grown(8), True)),
        "bias of a product": (transformer.column_sums, (torch.randn(2, 3, 8), low)),
    }


@pytest.mark.parametrize("shifted", [False, True])
def test_a_norm_matches_torchs_without_kernels(shifted: bool) -> None:
    x, added = torch.randn(2, 2, 3, 8, dtype=torch.float64).unbind()
    weight, bias, shift = torch.randn(3, 8, dtype=torch.float64).unbind()
    out, low = transformer.add_layer_norm(x, added, shift if shifted else None, weight, bias, 1e-6, torch.bfloat16)
    torch.testing.assert_close(out, F.layer_norm(x + added + shift * shifted, (8,), weight, bias, 1e-6))
    assert out.dtype == torch.float64 and torch.equal(low, out.bfloat16())


# --- in a layer ---

NORM, ACTIVATION = "add_layer_norm", "bias_gelu"
KERNEL = "triton_kernel_wrapper_functional"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """As where kernels run; what they would compute torch does, and it is counted."""
    ran: Counter[str] = Counter()

    def count(name: str) -> None:
        if not torch.compiler.is_compiling():
            ran.update([name])

    class Norm:
        @staticmethod
        def apply(x: Tensor, added: Tensor, shift: Tensor | None, *rest: Any) -> Any:
            count(NORM)
            weight, bias, eps, low_dtype, _ = rest
            total = x + added if shift is None else x + added + shift
            out = F.layer_norm(total, x.shape[-1:], weight, bias, eps).to(x.dtype)
            return out if low_dtype is None else (out, out.to(low_dtype))

    class Activation:
        @staticmethod
        def apply(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
            count(ACTIVATION)
            return F.gelu(x.float() + bias.float(), approximate="tanh" if tanh else "none").to(x.dtype)

    monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: True)
    monkeypatch.setattr(transformer, "_Norm", Norm)
    monkeypatch.setattr(transformer, "_BiasGelu", Activation)
    sums = lambda x, dtype: (count("column_sums"), x.flatten(0, -2).float().sum(0).to(dtype))[1]  # noqa: E731
    monkeypatch.setattr(transformer, "column_sums", sums)
    return ran


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: False)


def outputs_and_gradients(model: Any, inputs: Any, autocast: bool = False) -> list[Tensor]:
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model(**inputs)[0]
    above = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
    loss = (hidden.float() * above).sum()
    return [hidden.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def near(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= relative * theirs.norm() + 1e-6


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_layer_that_trains_runs_the_kernels(autocast, packed, counted, monkeypatch):
    model = zoo.create("bert-debug", head="none", **STILL).train()
    layers = len(model.layers)
    inputs: Any = zoo.example_inputs(model)
    if packed:
        inputs = pack(inputs["input_ids"], inputs["attention_mask"], config=model.config)
    with monkeypatch.context() as without:
        leave_to_torch(without)
        expected = outputs_and_gradients(model, inputs, autocast)
    assert not counted
    # Sums in another order, or rounded at other places.
    relative = 3e-2 if autocast else 2e-6
    near(outputs_and_gradients(model, inputs, autocast), expected, relative)
    wanted = {NORM: 2, ACTIVATION: 1} | ({"column_sums": 1} if autocast else {})
    assert counted == {name: times * layers for name, times in wanted.items()}
    zoo.compile_regions(model, backend="aot_eager")
    with zoo.enforce_budget(model):
        for _ in range(2):
            near(outputs_and_gradients(model, inputs, autocast), expected, relative)


@needs_triton
def test_under_autocast_a_layer_is_one_graph_each_way_with_all_kernels_in_it(gpu, monkeypatch):
    layer = zoo.create("bert-debug", **STILL).train().layers[0]
    with torch.autocast("cpu", torch.bfloat16):
        forward, backward = traced(monkeypatch, layer.__call__, torch.randn(2, 5, 32, requires_grad=True))
    # Two norms and the activation; backward each has a pass that adds parts of sums up, as has the bias of one product.
    assert forward.count(KERNEL) == 3 and backward.count(KERNEL) == 8
    # A gradient of the layer's input is all that is left to add.
    assert "aten.add.Tensor" not in forward and backward.count("aten.add.Tensor") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_compiled_layers_train_as_uncompiled_on_a_gpu(kind: str, packed: bool) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model: Any = zoo.create("bert-debug", device="cuda", dtype=dtype, **STILL).train()
    inputs: Any = {name: value.cuda() for name, value in zoo.example_inputs(model).items()}
    if packed:
        ids, mask = inputs["input_ids"].cpu(), inputs["attention_mask"].cpu()
        inputs = {"input_ids": pack(ids, mask, config=model.config).to("cuda")}
    found = []
    for compiled in (False, True):
        budget = zoo.enforce_budget(zoo.compile_regions(model)) if compiled else contextlib.nullcontext()
        with budget, torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            hidden = model(**inputs)[0]
        loss = (hidden.float() * torch.linspace(-1, 1, hidden.numel(), device="cuda").view(hidden.shape)).sum()
        found.append([hidden.detach(), *torch.autograd.grad(loss, list(model.layers.parameters()))])
    near(found[1], found[0], 1e-5 if kind == "float32" else 2e-2)


def test_dropout_and_checkpoints(counted: Counter[str]) -> None:
    model = zoo.create("bert-debug", head="none", num_hidden_layers=2).train()
    inputs = zoo.example_inputs(model)
    torch.manual_seed(1)
    expected = outputs_and_gradients(model, inputs)
    assert counted[NORM] == 4 and counted[ACTIVATION] == 2
    torch.manual_seed(1)
    # What is kept is as it was without operators: the same numbers are drawn in the same places.
    with pytest.MonkeyPatch.context() as without:
        leave_to_torch(without)
        near(expected, outputs_and_gradients(model, inputs), 2e-6)
    still = zoo.create("bert-debug", head="none", **STILL).train()
    expected = outputs_and_gradients(still, inputs)
    zoo.compile_regions(still, backend="aot_eager")
    checkpoint_regions(still, BertLayer)
    near(outputs_and_gradients(still, inputs), expected, 2e-6)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
def test_every_activation(act: str, counted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create("bert-debug", head="none", hidden_act=act, num_hidden_layers=1, **STILL).train()
    found = outputs_and_gradients(model, zoo.example_inputs(model))
    assert counted[ACTIVATION] == (act != "relu") and counted[NORM] == 2
    leave_to_torch(monkeypatch)
    near(found, outputs_and_gradients(model, zoo.example_inputs(model)), 2e-6)


def test_kernels_take_what_they_know(counted: Counter[str]) -> None:
    layer = zoo.create("bert-debug", **STILL).layers[0].eval()
    x = torch.randn(2, 5, 32)
    layer(x)
    assert counted == {NORM: 2, ACTIVATION: 1}, "gradients are wanted, in evaluation too"
    counted.clear()
    layer.train().double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        # What autocast would widen for the norm.
        layer.bfloat16()(x.bfloat16())
    assert NORM not in counted
    counted.clear()
    layer(x.bfloat16())
    assert counted == {NORM: 2, ACTIVATION: 1}


@pytest.mark.parametrize("change", ["subclass", "hook on gradients", "forward"])
@pytest.mark.parametrize("name", ["qkv", "attention_output", "intermediate", "output", "attention_norm", "output_norm"])
def test_a_modified_submodule_is_called(name, change, counted, monkeypatch):
    model = zoo.create("bert-debug", head="none", num_hidden_layers=1, **STILL).train()
    layer, heard, autocast = model.layers[0], Counter[str](), change == "subclass"
    module = getattr(layer, name)
    if change == "hook on gradients":
        module.register_full_backward_hook(lambda *_: heard.update([name]))
    elif change == "forward":
        before = module.forward
        monkeypatch.setattr(module, "forward", lambda x: (heard.update([name]), 2 * before(x))[1], raising=False)
    else:
        if isinstance(module, nn.Linear):
            scaled = Doubled(module.in_features, module.out_features)
            scaled.load_state_dict(module.state_dict())
            setattr(layer, name, scaled)
        getattr(layer, name).register_forward_pre_hook(lambda *_: heard.update([name]))
    found = outputs_and_gradients(model, zoo.example_inputs(model), autocast)
    assert heard == {name: 1} and counted[NORM] == (1 if "norm" in name else 2)
    assert counted[ACTIVATION] == (name != "intermediate")
    leave_to_torch(monkeypatch)
    near(found, outputs_and_gradients(model, zoo.example_inputs(model), autocast), 3e-2 if autocast else 2e-6)


def test_forward_mode_runs_without_kernels(counted: Counter[str]) -> None:
    layer, x = zoo.create("bert-debug", **STILL).layers[0].train(), torch.randn(2, 5, 32, requires_grad=True)
    with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None
    assert not counted


def test_functional_transforms_run_without_kernels(counted: Counter[str]) -> None:
    layer, x = zoo.create("bert-debug", **STILL).layers[0].train(), torch.randn(2, 5, 32)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, (x,))
        return out.square().mean()

    found = torch.func.grad(loss)(parameters)
    assert not counted
    loss(parameters).backward()
    assert counted[NORM] == 2
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@needs_triton
def test_tokens_lie_along_the_axis_of_the_grid_that_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.ops.triton import norms, tiles

    grids: dict[str, tuple[int, ...]] = {}

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids[self.name] = grid
            return lambda *_, **__: None

    names = {
        tiles: ["_bias_gelu", "_bias_gelu_backward", "_column_sums", "_add_parts"],
        norms: ["_norm", "_norm_backward"],
    }
    for module, kernels in names.items():
        for name in kernels:
            monkeypatch.setattr(module, name, Noting(name))
    tokens = 1 << 21
    x, vector, row = (torch.empty(shape, device="meta") for shape in ((tokens, 1024), (1024,), (tokens,)))
    tiles.bias_gelu(x, vector, False)
    tiles.bias_gelu_backward(x, x, vector, False)
    norms.norm(x, x, None, vector, vector, 1e-6)
    norms.norm_backward(x, row, row, vector, x, None, None, None, 2)
    tiles.column_sums(x, torch.float32)
    assert len(grids) == 6 and all(size < 1 << 16 for grid in grids.values() for size in grid[1:])
    assert grids["_bias_gelu"][0] * tiles.ROWS == tokens
