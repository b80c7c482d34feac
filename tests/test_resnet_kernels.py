"""The operators of the glue: kernels by resnet_kernel_checks.py, here what compilers and callers need of them."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.kernel_runs import run_checks
from zoo.resnet import fold_batch_norm, glue, norms, pooling

ROOT = Path(__file__).resolve().parent.parent
EPS = 1e-5


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)
@pytest.mark.parametrize("file", ["resnet_kernel_checks.py", "resnet_pool_checks.py"])
def test_kernels_in_the_interpreter(file: str) -> None:
    run_checks(file, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["resnet_kernel_checks.py", "resnet_pool_checks.py"])
def test_kernels_on_a_gpu(file: str) -> None:
    run_checks(file, "-m", "gpu", interpret=False)


@pytest.fixture
def _operators_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Glue takes the operators, which compute in torch's own on a CPU."""
    monkeypatch.setattr(glue, "kernels_run", lambda *_: True)


def rows(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def norm(grad: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Mean, variance, weight and bias [6]."""
    mean, variance = torch.randn(6, dtype=dtype), torch.rand(6, dtype=dtype) + 0.5
    return mean, variance, rows(6, dtype=dtype, grad=grad), rows(6, dtype=dtype, grad=grad)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, more = rows(4, 6, grad=True), rows(4, 6, grad=True)
    half = rows(4, 6, dtype=torch.bfloat16, grad=True)
    columns, grads = rows(2, 6, 4).mT
    images = rows(2, 6, 7, 4).contiguous(memory_format=torch.channels_last)
    return {
        "statistics": (norms.batch_statistics, (x.detach(), *norm()[:2], 0.1)),
        "statistics alone": (norms.batch_statistics, (half.detach(), None, None, 0.1)),
        "norm": (norms.norm_act, (x, *norm(True), None, EPS, False)),
        "norm of the batch": (norms.norm_act, (x, *norm(True), None, EPS, True)),
        "norm, wider weights": (norms.norm_act, (half, *norm(True), None, EPS, True)),
        "residual": (norms.norm_act, (x, *norm(True), more, EPS, True)),
        "frozen": (norms.norm_act, (x, *norm(), more, EPS, False)),
        "two norms": (norms.norms_add_act, (x, *norm(True), more, *norm(True), EPS, True)),
        "two frozen norms": (norms.norms_add_act, (x, *norm(), more, *norm(), EPS, False)),
        "bias": (norms.bias_act, (x, rows(6, grad=True), None)),
        "bias and residual": (norms.bias_act, (x, rows(6, grad=True), more)),
        "norm of columns": (norms.norm_act, (columns, *norm(), None, EPS, True)),
        "two norms of columns": (norms.norms_add_act, (columns, *norm(), grads, *norm(), EPS, True)),
        "bias of columns": (norms.bias_act, (columns, rows(6), None)),
        "gradients of columns": (norms.norm_act_backward, (grads, columns, *norm(), columns + 1, EPS, True, True)),
        "gradients of two norms of columns": (
            norms.norms_add_act_backward,
            (grads, columns, *norm(), columns + 1, *norm(), grads + 1, EPS, True, True),
        ),
        "pooled norm": (pooling.norm_act_pool, (images, *norm(), EPS)),
        "pooled norm, wider weights": (pooling.norm_act_pool, (images.to(torch.bfloat16), *norm(), EPS)),
        "pooled norm, other layout": (pooling.norm_act_pool, (images.contiguous(), *norm(), EPS)),
        "pooled bias": (pooling.bias_act_pool, (images, rows(6))),
        "pool": (pooling.max_pool, (images.detach().clone().requires_grad_(),)),
        "pool, other layout": (pooling.max_pool, (images.contiguous().requires_grad_(),)),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_what_torch_expects(name: str) -> None:
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.usefixtures("_operators_on_cpu")
def test_glue_computes_what_torchs_functions_do(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    config = zoo.create("resnet-debug").config
    modules = {
        "NormAct": (glue.NormAct(config), 1),
        "NormAddAct": (glue.NormAddAct(config), 1),
        "NormsAddAct": (glue.NormsAddAct(config), 2),
    }
    for name, (module, count) in modules.items():
        module.train(training)
        x, more = rows(9, 6, dtype=torch.float64, grad=True), rows(9, 6, dtype=torch.float64, grad=True)
        given = [norm(True, torch.float64) for _ in range(count)]
        found = []
        for ours in (True, False):
            monkeypatch.setattr(glue, "kernels_run", lambda *_, ours=ours: ours)
            own = [tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in n) for n in given]
            arguments: tuple[Any, ...] = (x, own[0])
            arguments += () if name == "NormAct" else (more,)
            out = module(*arguments, *own[1:])
            wanted = [tensor for n in own for tensor in n[2:]] + [x, *([] if name == "NormAct" else [more])]
            found.append(
                [out, *(tensor for n in own for tensor in n[:2]), *torch.autograd.grad(out.sin().sum(), wanted)]
            )
        torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("_operators_on_cpu")
def test_a_folded_norm_has_gradients_too(dtype: torch.dtype) -> None:
    x, more, bias = (
        rows(5, 6, dtype=dtype, grad=True),
        rows(5, 6, dtype=dtype, grad=True),
        rows(6, dtype=dtype, grad=True),
    )
    found = torch.autograd.grad(glue.BiasAddAct()(x, bias, more).sum() + glue.BiasAct()(x, bias).sum(), (x, bias, more))
    expected = torch.autograd.grad(F.relu(x + bias + more).sum() + F.relu(x + bias).sum(), (x, bias, more))
    torch.testing.assert_close(found, expected)


def test_gradients_of_gradients_are_refused() -> None:
    x = rows(4, 6, grad=True)
    for out in (
        norms.norm_act(x, *norm(), None, EPS, True),
        norms.norms_add_act(x, *norm(), x.detach(), *norm(), EPS, True),
    ):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.usefixtures("_operators_on_cpu")
def test_compiled_glue_moves_statistics_and_has_gradients(backend: str, dynamic: bool) -> None:
    torch.compiler.reset()
    config = zoo.create("resnet-debug").config
    module = glue.NormsAddAct(config).train()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    for channels in (6, 10) if dynamic else (6,):
        own, other = (nn.BatchNorm1d(channels) for _ in range(2))
        found = []
        for call in (module, compiled):
            norms_of = [copy.deepcopy(each) for each in (own, other)]
            tensors = [(n.running_mean, n.running_var, n.weight, n.bias) for n in norms_of]
            x, more = torch.linspace(-1, 2, 7 * channels).view(7, -1), torch.linspace(3, -2, 7 * channels).view(7, -1)
            x, more = x.sin().requires_grad_(), more.cos().requires_grad_()
            for _ in range(2):
                out = call(x, tensors[0], more, tensors[1])
            out.square().sum().backward()
            found.append([out.detach(), x.grad, more.grad, *(t for n in norms_of for t in n.state_dict().values())])
            found[-1] += [parameter.grad for n in norms_of for parameter in n.parameters()]
        torch.testing.assert_close(found[1], found[0])
        assert not torch.equal(found[0][3 + 2], own.running_mean)


@pytest.mark.usefixtures("_operators_on_cpu")
def test_regions_of_a_model_keep_their_budget_and_learn_as_eager_does() -> None:
    model = zoo.create("resnet-debug").train()
    eager = copy.deepcopy(model)
    images = torch.randn(2, 3, 40, 33)
    zoo.compile_regions(model, backend="aot_eager")
    assert zoo.find_regions(model, inputs={"images": images}).graphs_needed == 5
    with zoo.enforce_budget(model):
        for own in (model, eager):
            own(images).square().sum().backward()
    for ours, theirs in ((model.named_parameters(), eager.parameters()), (model.named_buffers(), eager.buffers())):
        for (name, found), expected in zip(ours, theirs, strict=True):
            found, expected = (found, expected) if found.grad is None else (found.grad, expected.grad)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.usefixtures("_operators_on_cpu")
def test_what_pools_computes_what_torchs_functions_do(
    monkeypatch: pytest.MonkeyPatch, memory_format: torch.memory_format
) -> None:
    given = norm(dtype=torch.float64)
    x = rows(2, 6, 7, 10, dtype=torch.float64).contiguous(memory_format=memory_format)
    x[0, 3, 2, 1] = torch.nan
    module = glue.NormActPool(zoo.create("resnet-debug").config).eval()
    found = module(x, given), glue.BiasActPool()(x, given[3])
    assert all(out.is_contiguous(memory_format=torch.channels_last) for out in found)
    monkeypatch.setattr(glue, "kernels_run", lambda *_: False)
    expected = module(x, given), glue.BiasActPool()(x, given[3])
    assert expected[0].isnan().sum() == 2
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.usefixtures("_operators_on_cpu")
def test_compiled_glue_pools_by_an_operator_unless_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    ran: list[str] = []
    pooled = pooling.fallback.norm_act_pool
    monkeypatch.setattr(pooling.fallback, "norm_act_pool", lambda *given: (ran.append("pool"), pooled(*given))[1])
    module = glue.NormActPool(zoo.create("resnet-debug").config).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)
    x = rows(2, 6, 7, 10).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        frozen = norm()
        torch.testing.assert_close(compiled(x, frozen), F.max_pool2d(F.relu(module.normalise(x, frozen)), 3, 2, 1))
    assert ran == ["pool"]
    for learns in (module, compiled):
        weights = norm(True)
        learns(x, weights).sum().backward()
        assert weights[2].grad is not None
    module.train()
    with torch.no_grad():
        given = norm()
        copies = tuple(tensor.clone() for tensor in given)
        expected = F.max_pool2d(F.relu(module.normalise(x, copies)), 3, 2, 1)
        torch.testing.assert_close(compiled(x, given), expected)
        torch.testing.assert_close(given, copies)
    assert ran == ["pool"]


@pytest.mark.parametrize("folded", [False, True], ids=["norms", "folded"])
@pytest.mark.usefixtures("_operators_on_cpu")
def test_regions_predict_with_operators_in_as_many_graphs(monkeypatch: pytest.MonkeyPatch, folded: bool) -> None:
    model = zoo.create("resnet-debug").eval()
    model = fold_batch_norm(model) if folded else model
    images = torch.randn(2, 3, 40, 33)
    with torch.inference_mode():
        zoo.compile_regions(model, backend="aot_eager")
        assert zoo.find_regions(model, inputs={"images": images}).graphs_needed == (4 if folded else 5)
        with zoo.enforce_budget(model):
            found = model(images)
        zoo.uncompile(model)
        monkeypatch.setattr(glue, "kernels_run", lambda *_: False)
        torch.testing.assert_close(found, model(images), rtol=1e-4, atol=1e-5)


def test_what_pools_gives_no_wrong_gradient() -> None:
    x, weight = rows(1, 6, 4, 4), rows(6, grad=True)
    with pytest.raises(RuntimeError, match=r"has no gradient; use torch\.nn\.functional"):
        pooling.bias_act_pool(x, weight).sum().backward()


def test_importing_and_running_the_family_brings_no_triton() -> None:
    code = (
        "import sys, torch, zoo\n"
        "before = 'triton' in sys.modules\n"
        "model = zoo.create('resnet-debug'); model(**zoo.example_inputs(model))\n"
        "assert not before and 'triton' not in sys.modules and 'zoo.resnet.kernels' not in sys.modules\n"
        "assert 'torchvision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.gpu
def test_nothing_but_the_stem_is_compiled_where_kernels_run() -> None:
    report = zoo.find_regions(zoo.create("resnet-debug", device="cuda"))
    assert [found.name for found in report.regions] == ["NormActPool"]
    assert len(zoo.find_regions(zoo.create("resnet-debug")).regions) == 5
