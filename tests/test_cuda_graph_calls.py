"""cuda_graph(module) without an example: what is captured, what runs plainly and why, and the libraries around it."""

import copy
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.blocks import Sequence, Stack
from zoo import RegionWarning


def stack(device: str = "cpu", **options: Any) -> Any:
    backend = "eager" if device == "cpu" else "inductor"
    model = zoo.compile_regions(Stack().eval().to(device), backend=backend)
    return zoo.cuda_graph(model, **options)


@pytest.fixture(autouse=True)
def no_gradients(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled("wants_gradients" in request.node.name):
        yield


def test_each_shape_is_captured_at_its_second_call_and_outputs_are_kept(device: str) -> None:
    model = stack(device)
    reference = copy.deepcopy(model)
    kept, expected = [], []
    for _ in range(4):
        for rows in (2, 5):
            x = torch.randn(rows, 4, device=device)
            kept.append(model(x))
            expected.append(reference(x))
    for ours, theirs in zip(kept, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    seen = zoo.captures(model)
    assert len(seen.shapes) == 2 and seen.replays == 6 and not seen.uncaptured


def test_it_is_the_same_module() -> None:
    model = Stack().eval()
    keys = list(model.state_dict())
    graphed = zoo.cuda_graph(model)
    assert graphed is model and type(graphed) is Stack and list(graphed.state_dict()) == keys
    with pytest.raises(ValueError, match="captured already; call zoo.uncompile"):
        zoo.cuda_graph(model)
    with pytest.raises(ValueError, match="most_graphs is 'a', expected a positive number"):
        zoo.cuda_graph(Stack(), most_graphs="a")
    zoo.uncompile(model)
    with pytest.raises(ValueError, match="not captured: call zoo.cuda_graph"):
        zoo.captures(model)
    with pytest.raises(TypeError, match="is a GraphedStep, expected a model given to zoo.cuda_graph without"):
        zoo.captures(zoo.cuda_graph(lambda x: 2 * x, (torch.ones(2),)))  # type: ignore[arg-type]
    pipeline = type("Pipeline", (), {"__call__": None, "__module__": "diffusers.pipelines"})()
    pipeline.unet = model
    with pytest.raises(TypeError, match=r"fn is a Pipeline, .*: pass the model that it holds, \.unet"):
        zoo.cuda_graph(pipeline)


def test_a_model_left_on_the_cpu_is_told_of_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, x = zoo.cuda_graph(Stack().eval()), torch.randn(2, 4)
    with torch.inference_mode(), pytest.warns(zoo.RegionWarning, match="all its tensors are on the CPU"):
        for _ in range(2):
            model(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_without_it(copied: Callable[[Any], Any]) -> None:
    model, x = zoo.cuda_graph(nn.Sequential(nn.Linear(4, 4))), torch.randn(2, 4)
    for _ in range(3):
        model(x)
    other = copied(model)
    with pytest.raises(ValueError, match="not captured"):
        zoo.captures(other)
    torch.testing.assert_close(other(x), model(x))
    torch.testing.assert_close(zoo.cuda_graph(other)(x), model(x))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "loaded": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True),
    "moved": lambda model: model.bfloat16().float(),
    "reordered": lambda model: setattr(model, "blocks", nn.ModuleList(reversed(model.blocks))),
    "replaced": lambda model: setattr(model, "stem", nn.Linear(4, 8, device=model.stem.weight.device)),
    "training": lambda model: model.train(),
    "part in training": lambda model: model.blocks[1].train(),
    "appended": lambda model: model.blocks.append(copy.deepcopy(model.blocks[0])),
    "no bias": lambda model: setattr(model.stem, "bias", None),
    "hook inside": lambda model: model.blocks[0].register_forward_hook(lambda module, args, output: output + 1),
    "forward inside": lambda model: setattr(model.blocks[0], "forward", lambda x: x * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_and_submodules_are_followed(change: Callable[[Any], Any], device: str) -> None:
    model, x = stack(device), torch.randn(2, 4, device=device)
    for _ in range(3):
        model(x)
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegionWarning)  # hooks and replaced forwards run plainly
        for _ in range(3):
            torch.testing.assert_close(model(x), copy.deepcopy(model)(x))


def test_kinds_beyond_the_most_run_plainly() -> None:
    model = stack(most_graphs=2)
    with pytest.warns(RegionWarning, match="2 kinds of call are captured; raise most_graphs") as caught:
        for rows in (1, 2, 3, 4) * 3:
            x = torch.randn(rows, 4)
            torch.testing.assert_close(model(x), copy.deepcopy(model)(x))
    assert len(caught) == 1 and Path(caught[0].filename) == Path(__file__)
    assert sum(zoo.captures(model).uncaptured.values()) == 4


def test_a_call_that_wants_gradients_has_them() -> None:
    model, x = stack(), torch.randn(2, 4)
    with pytest.warns(RegionWarning, match=r"gradients are recorded; call it under torch.no_grad\(\)"):
        for _ in range(3):
            model(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    model.zero_grad()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    assert zoo.captures(model).replays == 2


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Assigns(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x + self.calls


class Collects(nn.Module):
    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        if other is not None:
            other.append(x)
        return x + len(other or ())


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return type("Result", (), {"x": x})()


class Takes(nn.Module):
    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return x + 1


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        (Writes(), {}, "writes to input 0, .*static="),
        (Opaque(), {}, "its output holds a Result, which the next replay overwrites"),
        (Assigns(), {}, "it assigns a buffer, which a replay would leave out"),
        (Collects(), {"other": []}, "it changes a list or a dict that it is given"),
        (Takes(), {"other": {1, 2}}, "an argument is a set, which cannot be copied in"),
        (Takes(), {"other": torch.ones(2, 2).to_sparse()}, "torch.sparse_coo, and only strided"),
    ],
    ids=["writes", "opaque output", "assigns", "collects", "opaque argument", "sparse argument"],
)
def test_calls_that_cannot_be_captured_run_as_before(module: nn.Module, arguments: Any, reason: str) -> None:
    model, reference = zoo.cuda_graph(copy.deepcopy(module)), copy.deepcopy(module)
    with pytest.warns(RegionWarning, match=reason) as caught:
        for _ in range(4):
            # A list of its own each time. A copied sparse tensor would make the next torch.load of the process warn.
            own, others = ({k: [] if isinstance(v, list) else v for k, v in arguments.items()} for _ in range(2))
            x, y = torch.zeros(3), torch.zeros(3)
            ours, theirs = model(x, **own), reference(y, **others)
            assert not isinstance(own.get("other"), list) or len(own["other"]) == 1
            torch.testing.assert_close(getattr(ours, "x", ours), getattr(theirs, "x", theirs))
            torch.testing.assert_close(x, y)
    assert len([each for each in caught if issubclass(each.category, RegionWarning)]) == 1
    assert zoo.captures(model).replays == 0


def test_buffers_are_written_once_a_call_and_inputs_that_require_grad_replay() -> None:
    model = zoo.cuda_graph(Counts())
    for call in range(1, 6):
        assert model(torch.zeros(1)).item() == call
    assert zoo.captures(model).replays == 4
    model, x = stack(), torch.randn(2, 4)
    for given in (x, x, x.clone().requires_grad_(), nn.Parameter(x)):
        torch.testing.assert_close(model(given), copy.deepcopy(model)(x))
    assert zoo.captures(model).replays == 3


def test_hooks_and_errors_are_those_of_the_module() -> None:
    model, x = stack(), torch.randn(2, 4)
    for _ in range(2):
        model(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|size mismatch|must match"):
        for _ in range(3):
            model(torch.randn(2, 5))
    seen = []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(RegionWarning, match="has hooks or a forward of its own"):
        model(x)
        model(x)
    handle.remove()
    assert len(seen) == 2


@pytest.mark.parametrize("value", [float("nan"), -0.0, 1, True, "x"])
def test_constants_are_told_apart(value: Any) -> None:
    model, x = zoo.cuda_graph(Takes()), torch.randn(2)
    for other in (0.0, 1.0, value):
        for _ in range(3):
            model(x, other=other)
            model(other=other, x=x)
    assert len(zoo.captures(model).shapes) == 2 + 2 * 2 and not zoo.captures(model).uncaptured


def test_transforms_and_stances_run_plainly() -> None:
    model, x = zoo.cuda_graph(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)), torch.randn(2, 4)
    expected = model(x)
    model(x)
    torch.testing.assert_close(torch.func.vmap(model)(x), expected)
    _, tangent = torch.func.jvp(model, (x,), (x,))
    torch.testing.assert_close(tangent, x @ model[0].weight.T)
    with torch.compiler.set_stance("force_eager"):
        model(x)
    assert zoo.captures(model).replays == 1


def test_two_threads_get_their_own_results() -> None:
    model, x = stack(), torch.randn(2, 4)
    for _ in range(2):
        model(x)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [model(given) for given in inputs]

    halves = [[torch.randn(2, 4) for _ in range(20)] for _ in range(2)]
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.filterwarnings("ignore", ".*let threads take turns", RegionWarning)
        results = list(pool.map(run, halves))
    for inputs, outputs in zip(halves, results, strict=True):
        torch.testing.assert_close(outputs, [copy.deepcopy(model)(given) for given in inputs])


def test_a_captured_model_is_within_its_budget() -> None:
    model, x = stack(), torch.randn(2, 4)
    with zoo.enforce_budget(model):
        for _ in range(3):
            model(x)
        with zoo.enforce_budget(model):
            model(x)
    with zoo.enforce_budget(model):
        model(x)


def test_modes_are_kinds_of_their_own() -> None:
    model, x = zoo.cuda_graph(Sequence(nn.Linear(4, 4))), torch.randn(2, 4)
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        for _ in range(3):
            with context():
                output, expected = model(x), copy.deepcopy(model)(x)
            assert (output.dtype, output.is_inference()) == (expected.dtype, expected.is_inference())
            torch.testing.assert_close(output, expected)
    assert len(zoo.captures(model).shapes) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapted"), [("sd", False), ("xl", True)], ids=["sd", "xl-lora"])
def test_inside_diffusers_pipelines(kind: str, adapted: bool, device: str, tmp_path: Path) -> None:
    from tests.test_unet_sampler import lora, pipeline

    pipe = pipeline(kind, tmp_path).to(device)
    if adapted:
        pipe.load_lora_weights(lora(pipe.unet, 1))
    backend = "eager" if device == "cpu" else "inductor"

    def images(size: int, guidance: float) -> Any:
        generator = torch.Generator().manual_seed(1)
        return pipe(
            "a cat", height=size, width=size, guidance_scale=guidance, num_inference_steps=4, generator=generator,
            output_type="np",
        ).images  # fmt: skip

    calls = [(32, 5.0), (16, 5.0), (32, 1.0), (32, 5.0)]
    expected = [images(*call) for call in calls]
    pipe.unet = zoo.cuda_graph(zoo.compile_regions(zoo.from_upstream(pipe.unet), backend=backend))
    with zoo.enforce_budget(pipe.unet):
        for call, images_expected in zip(calls, expected, strict=True):
            assert abs(images(*call) - images_expected).max() < 2e-3
    seen = zoo.captures(pipe.unet)
    assert len(seen.shapes) == 3 and seen.replays == 4 * 4 - 3 and not seen.uncaptured


def test_in_an_evaluation_loop_of_torch_geometric(device: str) -> None:
    from torch_geometric.data import Data
    from torch_geometric.nn import GCN

    data = Data(x=torch.randn(20, 8), edge_index=torch.randint(20, (2, 60)), y=torch.randint(3, (20,))).to(device)
    upstream = GCN(8, 16, num_layers=3, out_channels=3).eval().to(device)
    backend = "eager" if device == "cpu" else "inductor"
    model = zoo.cuda_graph(zoo.compile_regions(zoo.from_upstream(upstream), backend=backend))
    for _ in range(4):
        with torch.no_grad():
            logits = model(data.x, data.edge_index)
        torch.testing.assert_close(logits, upstream(data.x, data.edge_index), rtol=1e-4, atol=1e-4)
        for each in (model, upstream):  # as training between two evaluations leaves them
            for weight in each.parameters():
                weight.mul_(1.1)
    assert zoo.captures(model).replays == 3
    other = torch.randint(20, (2, 60), device=device)  # another graph of the same size is another kind
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(data.x, other), upstream(data.x, other), rtol=1e-4, atol=1e-4)
    assert len(zoo.captures(model).shapes) == 2
