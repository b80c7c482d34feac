"""The operators: kernels are checked by the files of ``CHECKS``, here what compilers and callers need."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import zoo
from tests.dispatched import Dispatched
from tests.kernel_runs import run_checks
from zoo.engine.compile import plan_of
from zoo.engine.graph_log import LEDGER
from zoo.ops import products
from zoo.ops.common import KERNEL_DTYPES
from zoo.training import checkpoint_regions
from zoo.unet import (
    CUTS,
    ResnetBlock,
    Transformer,
    TransformerBlock,
    UNet,
    attention,
    cut,
    fallback,
    glue,
    learning,
    operators,
)

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ("unet_kernel_checks.py", "unet_glue_checks.py", "unet_learning_checks.py", "unet_attention_checks.py")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)
@pytest.mark.parametrize("file", CHECKS)
def test_kernels_in_the_interpreter(file: str) -> None:
    run_checks(file, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("file", CHECKS)
def test_kernels_on_a_gpu(file: str) -> None:
    run_checks(file, "-m", "gpu", interpret=False)


def images(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    drawn = torch.randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return drawn.requires_grad_(grad)


def gated_product(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 8).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(16).bfloat16()


def glue_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, residual, weight, bias = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8), torch.randn(8)
    half = x.bfloat16()
    return {
        "gate": (operators.gated_gelu, (x, bias)),
        "gate of columns": (operators.gated_gelu, (x.t(), bias[:6])),
        "add": (operators.conv_add, (half, bias, half)),
        "add to another dtype": (operators.conv_add, (half, bias, residual)),
        "add and norm": (operators.add_norm, (x, residual, weight, bias, None, 1e-5)),
        "norm": (operators.row_norm, (half, weight.bfloat16(), bias.bfloat16(), 1e-5)),
        "norm and shift": (operators.add_norm, (half, residual, weight, bias, bias, 1e-5)),
        "product and gate": (operators.gated_gelu_product, (x, torch.randn(12, 8), torch.randn(12))),
        "product and gate in one": (operators.gated_gelu_product, gated_product(operators.LEAST_ROWS)),
        "windows": (operators.windows, (torch.randn(2, 3, 5, 8), 1)),
        "every other window": (operators.windows, (torch.randn(2, 5, 4, 8).transpose(1, 2), 2)),
        "bias": (operators.conv_bias, (half, bias)),
        "upsample": (operators.upsample, (torch.randn(2, 3, 5, 8),)),
        "attention": (attention.short_attention, torch.randn(3, 2, 5, 3, 8).bfloat16().unbind()),
        "attention in a product": (attention.short_attention, torch.randn(2, 5, 3, 3, 8).half().unbind(2)),
        "no rows": (operators.add_norm, (x[:0], residual[:0], weight, bias, bias, 1e-5)),
    }


def learning_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    wide, low, bias = torch.randn(6, 8), torch.randn(6, 8).bfloat16(), torch.randn(8)
    statistics, norm = (torch.randn(6), torch.rand(6)), (wide, bias, bias + 1)
    return {
        "gate that learns": (operators.gated_gelu, (wide.clone().requires_grad_(), bias.clone().requires_grad_())),
        "gate before a bias that does not": (operators.gated_gelu, (wide.clone().requires_grad_(), bias)),
        "bias that learns": (operators.conv_bias, (low.clone().requires_grad_(), bias.clone().requires_grad_())),
        "bias and residual that learn": (
            operators.conv_add,
            (low.clone().requires_grad_(), bias.clone().requires_grad_(), wide),
        ),
        "gate's gradients": (learning.gated_gelu_backward, (low[:, :4], low, bias, True)),
        "gate's gradient alone": (learning.gated_gelu_backward, (wide[:, :4], wide, bias, False)),
        "norm that learns": (learning.kept_row_norm, (*(each.clone().requires_grad_() for each in norm), 1e-5)),
        "norm of weights that do not": (learning.kept_row_norm, (low.clone().requires_grad_(), bias, bias + 1, 1e-5)),
        "sum and norm that learn": (
            learning.kept_add_norm,
            (*(each.clone().requires_grad_() for each in (wide, wide, bias, bias, bias)), 1e-5),
        ),
        "low sum": (learning.kept_add_norm, (low.clone().requires_grad_(), low, bias, bias, None, 1e-5)),
        "norm's gradients": (learning.norm_backward, (wide, wide + 1, wide + 2, *statistics, bias, True, True)),
        "norm's gradient alone": (learning.norm_backward, (low, None, low + 1, *statistics, bias, False, False)),
    }


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    weight, bias = torch.randn(12).requires_grad_(), torch.randn(12).requires_grad_()
    x, shift = images(2, 12, 3, 5, grad=True), torch.randn(2, 12).requires_grad_()
    tail = (weight, bias, 4, 1e-5)
    return {
        "plain": (operators.native_group_norm, (x, None, *tail, False)),
        "shift and silu": (operators.native_group_norm, (x, shift, *tail, True)),
        "half": (operators.native_group_norm, (images(2, 12, 3, 5, dtype=torch.bfloat16), None, *tail, True)),
        "large": (operators.native_group_norm, (images(1, 12, 33, 32), shift[:1], *tail, True)),
        **glue_calls(),
        **learning_calls(),
        "two": (
            operators.native_cat_group_norm,
            (images(2, 7, 3, 5, grad=True), images(2, 5, 3, 5, grad=True), *tail, True),
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_what_torch_expects(name: str) -> None:
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("silu", [False, True])
def test_gradients_are_those_of_torchs_own(silu: bool) -> None:
    def plain(x: Tensor, skip: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        joined = torch.cat([x, skip], 1)
        out = F.group_norm(joined, 4, weight, bias, 1e-3)
        moved = F.group_norm(joined + shift[:, :, None, None], 4, weight, bias, 1e-3)
        return (F.silu(out) * joined).sum() + F.silu(moved).square().sum() if silu else (out * joined + moved**3).sum()

    def ours(x: Tensor, skip: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, joined = operators.cat_group_norm(x, skip, weight, bias, 4, 1e-3, silu)
        moved = operators.group_norm(joined, shift, weight, bias, 4, 1e-3, silu)
        return (out * joined).sum() + (moved.square().sum() if silu else (moved**3).sum())

    tensors = [images(2, 7, 3, 5, dtype=torch.float64), images(2, 5, 3, 5, dtype=torch.float64)]
    tensors += [torch.randn(*shape, dtype=torch.float64) for shape in ((2, 12), (12,), (12,))]
    given = [tensor.requires_grad_() for tensor in tensors]
    torch.testing.assert_close(ours(*given), plain(*given))
    for found, expected in zip(
        torch.autograd.grad(ours(*given), given), torch.autograd.grad(plain(*given), given), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_outputs_that_nobody_reads_have_no_gradient() -> None:
    x, skip = images(2, 7, 3, 5, grad=True), images(2, 5, 3, 5, dtype=torch.float64, grad=True)
    weight, bias = torch.randn(12).requires_grad_(), torch.randn(12).requires_grad_()
    given = (x, skip, weight, bias)
    out, joined = operators.cat_group_norm(*given, 4, 1e-3, True)
    found = torch.autograd.grad(joined.square().sum(), given, allow_unused=True)
    assert torch.equal(found[0], 2 * x) and found[1].dtype == torch.float64 and found[2:] == (None, None)
    torch.testing.assert_close(found[1].float(), 2 * skip.float())
    out, _ = operators.cat_group_norm(*given, 4, 1e-3, True)
    with Dispatched() as dispatched:
        torch.autograd.grad(out.sum(), given)
    assert "zoo_unet::group_norm_backward" in dispatched.ran and "aten::zeros" not in dispatched.ran


def test_no_images_leave_no_gradients() -> None:
    x, shift, weight = (
        images(0, 12, 3, 5, grad=True),
        torch.randn(0, 12).requires_grad_(),
        torch.ones(12).requires_grad_(),
    )
    out = operators.group_norm(x, shift, weight, weight, 4, 1e-5, True)
    found = torch.autograd.grad(out.sum(), [x, shift, weight])
    assert [each.shape for each in found] == [x.shape, shift.shape, weight.shape] and not found[2].any()


def test_a_shift_for_all_rows_alike_gets_the_gradient_of_all() -> None:
    x, shift = images(3, 12, 3, 5), torch.randn(1, 12).requires_grad_()
    weight, bias = torch.randn(12), torch.randn(12)
    out = operators.group_norm(x, shift.expand(3, -1), weight, bias, 4, 1e-5, True)
    expected = F.silu(F.group_norm(x + shift[:, :, None, None], 4, weight, bias, 1e-5))
    (found,) = torch.autograd.grad(out.square().sum(), shift)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), shift)[0], rtol=1e-4, atol=1e-4)


def test_half_precision_is_rounded_once() -> None:
    x, shift = images(2, 12, 9, 9, dtype=torch.bfloat16), torch.randn(2, 12)
    weight, bias = torch.randn(12), torch.randn(12)
    out = operators.group_norm(x, shift, weight, bias, 4, 1e-5, True)
    wide = F.silu(F.group_norm(x.float() + shift[:, :, None, None], 4, weight, bias, 1e-5))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())


def test_glue_computes_what_torch_does_where_no_kernel_runs() -> None:
    x, residual, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 8), (6, 8), (8,), (8,)))
    wide = x + bias
    torch.testing.assert_close(operators.gated_gelu(x, bias), wide[:, :4] * F.gelu(wide[:, 4:]))
    torch.testing.assert_close(operators.conv_add(x, bias, residual), x + bias + residual)
    total, normed = operators.add_norm(x, residual, weight, bias, None, 1e-3)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (8,), weight, bias, 1e-3))
    shifted, as_before = operators.add_norm(x, residual, weight, bias, bias, 1e-3)
    torch.testing.assert_close(shifted, x + residual + bias)
    assert torch.equal(as_before, normed)
    product = F.linear(x, torch.stack([weight, bias]))
    found = operators.gated_gelu_product(x, torch.stack([weight, bias]), bias[:2])
    torch.testing.assert_close(found, (product[:, :1] + bias[0]) * F.gelu(product[:, 1:] + bias[1]))
    torch.testing.assert_close(operators.row_norm(x, weight, bias, 1e-3), F.layer_norm(x, (8,), weight, bias, 1e-3))


def glue_that_learns() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Names in ``fallback`` and ``learning``, and arguments."""
    x, residual, weight, bias, shift = torch.randn(5, 6, 8, dtype=torch.float64).unbind()
    vectors = [each[0] for each in (weight, bias, shift)]
    return {
        "gate": ("gated_gelu", (x, vectors[0])),
        "sum and norm": ("add_norm", (x, residual, *vectors[:2], None, 1e-3)),
        "sum, shift and norm": ("add_norm", (x, residual, *vectors, 1e-3)),
        "norm": ("row_norm", (x, *vectors[:2], 1e-3)),
        "bias": ("conv_bias", (x, vectors[0])),
        "bias and residual": ("conv_add", (x, vectors[0], residual)),
    }


@pytest.mark.parametrize("name", glue_that_learns())
def test_gradients_of_glue_are_those_of_torchs_own(name: str) -> None:
    function, given = glue_that_learns()[name]
    given = tuple(each.clone().requires_grad_() if isinstance(each, Tensor) else each for each in given)
    tensors = [each for each in given if isinstance(each, Tensor)]
    found, expected = (getattr(module, function)(*given) for module in (learning, fallback))
    grads = [torch.randn_like(each) for each in (expected if isinstance(expected, tuple) else (expected,))]
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, tensors, grads), torch.autograd.grad(expected, tensors, grads), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_operators_learn_only_where_kernels_run_and_a_gradient_is_all_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    assert glue._glue_for(x, y) is fallback
    monkeypatch.setattr(operators, "triton_runs_on", lambda device: True)
    assert glue._glue_for(x, y) is learning and glue._glue_for(y, y) is operators
    assert glue._glue_for(x, y.double()) is fallback
    with torch.no_grad():
        assert glue._glue_for(x, y) is operators
    with torch.autograd.forward_ad.dual_level():
        assert glue._glue_for(x, y) is fallback
    chosen: list[Any] = []
    torch.func.grad(lambda x: (chosen.append(glue._glue_for(x, y)), x.sum())[1])(x.detach())
    assert chosen == [fallback]
    stands = TwoTensor(torch.randn(6, 8), torch.randn(6, 8))
    assert glue._glue_for(x, stands) is fallback


def test_norms_that_keep_nothing_say_who_learns() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8)
    with pytest.raises(RuntimeError, match=r"row_norm has no gradient; use zoo\.unet\.learning\.row_norm"):
        operators.row_norm(x, weight, weight, 1e-5).sum().backward()
    with pytest.raises(RuntimeError, match=r"add_norm has no gradient; use zoo\.unet\.learning\.add_norm"):
        operators.add_norm(x, x, weight, weight, None, 1e-5)[0].sum().backward()


def test_a_second_derivative_of_glue_is_refused() -> None:
    x, bias = torch.randn(6, 8, requires_grad=True), torch.randn(8)
    (grad,) = torch.autograd.grad(operators.gated_gelu(x, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_glue_of_shapes_that_do_not_fit_is_refused() -> None:
    x, row = torch.randn(6, 8), torch.randn(8)
    for call in (lambda: operators.conv_add(x, row, x[:1]), lambda: operators.add_norm(x, x[:1], row, row, None, 1e-5)):
        with pytest.raises(ValueError, match=r"residual has shape \(1, 8\), expected that of x, \(6, 8\)"):
            call()
    with pytest.raises(ValueError, match="x has 7 columns, expected an even number"):
        operators.gated_gelu(x[:, :7], row)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\), expected one number a column: \(8,\)"):
        operators.gated_gelu(x, row[:7])
    with pytest.raises(ValueError, match=r"shift has shape \(3,\), expected one number a column: \(8,\)"):
        operators.add_norm(x, x, row, row, row[:3], 1e-5)
    for weight, bias in ((torch.randn(7, 8), row[:7]), (torch.randn(6, 7), row[:6]), (torch.randn(6, 8), row)):
        with pytest.raises(ValueError, match=r"expected \[R, C\], \[2 I, C\] and \[2 I\]"):
            operators.gated_gelu_product(x, weight, bias)
    with pytest.raises(ValueError, match="stride is 0, expected at least 1"):
        operators.windows(torch.randn(1, 2, 2, 8), 0)
    one = torch.randn(2, 5, 2, 8)
    for key, value in ((one[:1], one[:1]), (one, one[:, :3]), (one[..., :4], one[..., :4])):
        with pytest.raises(ValueError, match=r"expected \[B, T, N, D\] and twice \[B, L, N, D\]"):
            attention.short_attention(one, key, value)


def test_windows_are_what_a_convolution_multiplies() -> None:
    for stride, height, width in ((1, 4, 6), (2, 4, 6), (2, 5, 3), (3, 7, 7), (1, 1, 1)):
        x, weight = torch.randn(2, 8, height, width), torch.randn(4, 8, 3, 3)
        expected = F.conv2d(x, weight, stride=stride, padding=1)
        rows = operators.windows(x.permute(0, 2, 3, 1), stride) @ weight.permute(0, 2, 3, 1).flatten(1).t()
        torch.testing.assert_close(rows.view(2, *expected.shape[2:], 4).permute(0, 3, 1, 2), expected)


def test_convolutions_of_few_pixels_and_many_channels_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "glue_kernels_run", lambda *_: True)
    weight = torch.empty(8, 640, 3, 3, memory_format=torch.channels_last)
    for shape, stride, expected in (
        ((2, 640, 8, 8), 1, True), ((4, 640, 8, 8), 1, True), ((5, 640, 8, 8), 1, False), ((1, 640, 32, 32), 2, True),
        ((1, 640, 33, 32), 2, False), ((2, 639, 8, 8), 1, False),
    ):  # fmt: skip
        assert operators.windows_run(torch.empty(shape), weight, stride) == expected
    # Of another layout the weight would be copied in every call.
    assert not operators.windows_run(torch.empty(2, 640, 8, 8), weight.contiguous(), 1)


@pytest.mark.parametrize("windows", [(), ("windows",)])
@pytest.mark.parametrize(("name", "needed"), [("unet-debug", 4), ("unet-xl-debug", 3)])
def test_operators_in_regions_cost_no_graph(
    name: str, needed: int, windows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if windows:
        monkeypatch.setattr(operators, "LEAST_CHANNELS", 1)
    # As on a GPU, with what the operators run elsewhere.
    monkeypatch.setattr(operators, "glue_kernels_run", lambda *_: not torch.is_grad_enabled())
    ran: list[str] = []
    inner = operators.run_glue
    monkeypatch.setattr(operators, "run_glue", lambda name, *given: (ran.append(name), inner(name, *given))[1])
    model = zoo.create(name)
    inputs = [zoo.example_inputs(model, batch=batch, size=16) for batch in (2, 1, 3)]
    graphs = []
    with torch.inference_mode():
        expected = [model(**given).sample for given in inputs]
        assert set(ran) == {"gated_gelu", "conv_add", "add_norm", "row_norm", "conv_bias", "upsample", *windows}
        zoo.compile_regions(model, backend="aot_eager")
        for given, wanted in zip(inputs, expected, strict=True):
            graphs.append(zoo.warm_up(model, **given).graphs)
            torch.testing.assert_close(model(**given).sample, wanted)
    assert graphs == [needed, 0, 0]
    # Training stays the compiler's.
    count = len(ran)
    zoo.warm_up(model, **inputs[0])
    assert len(ran) == count


# --- in a model that learns ---


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """As where kernels run; what runs in the operators is torch's own, and is counted."""
    ran: Counter[str] = Counter()

    def run(name: str, *given: Any, module: str = "glue") -> Any:
        ran.update([name])
        return getattr(fallback, name)(*(each.contiguous() if isinstance(each, Tensor) else each for each in given))

    monkeypatch.setattr(operators, "run_glue", run)
    monkeypatch.setattr(operators, "kernels_take", lambda *given: all(x.dtype in KERNEL_DTYPES for x in given))
    return ran


def outputs_and_gradients(model: nn.Module, inputs: dict[str, Any], autocast: bool) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**inputs).sample
    above = torch.linspace(-1, 1, out.numel()).view(out.shape)
    learning = [each for each in model.parameters() if each.requires_grad]
    return [out.detach(), *torch.autograd.grad((out.float() * above).sum(), learning)]


def near(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours.float() - theirs.float()).norm() <= relative * theirs.float().norm() + 1e-5


def wanted_of(model: UNet) -> dict[str, int]:
    """Operators of a step: of each resnet block, transformer, and convolution with a bias of its own."""
    blocks = sum(isinstance(each, TransformerBlock) for each in model.modules())
    resnets = sum(isinstance(each, ResnetBlock) for each in model.modules())
    convs = 1 + sum("sample" in name and isinstance(each, nn.Conv2d) for name, each in model.named_modules())
    there = {"gated_gelu": blocks, "kept_add_norm": 2 * blocks, "kept_row_norm": blocks}
    back = {"gated_gelu_backward": blocks, "norm_backward": 3 * blocks}
    return {**there, **back, "conv_add": resnets, "conv_bias": convs}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("name", "needed"), [("unet-debug", 4), ("unet-xl-debug", 3)])
def test_a_model_trains_by_operators_in_the_graphs_that_it_declares(
    name: str, needed: int, autocast: bool, counted: Counter[str]
) -> None:
    torch.manual_seed(0)
    model = zoo.create(name).train()
    inputs = [zoo.example_inputs(model, batch=batch, size=16, tokens=5) for batch in (2, 1, 3)]
    eager = [outputs_and_gradients(model, given, autocast) for given in inputs]
    assert counted == {kind: 3 * times for kind, times in wanted_of(model).items()}
    zoo.compile_regions(model, backend="aot_eager")
    with zoo.enforce_budget(model):
        for given, expected in zip(inputs, eager, strict=True):
            counted.clear()
            near(outputs_and_gradients(model, given, autocast), expected, 1e-2 if autocast else 1e-5)
            assert counted == wanted_of(model)
    plan = plan_of(model)
    assert plan is not None and sum(entry.graphs for entry in LEDGER.of(plan.ledger_id)) == needed


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_model_trains_as_without_operators(
    autocast: bool, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = zoo.create("unet-debug").train()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    ours = outputs_and_gradients(model, inputs, autocast)
    monkeypatch.setattr(operators, "kernels_take", lambda *given: False)
    counted.clear()
    plain = outputs_and_gradients(model, inputs, autocast)
    wide = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
    exact = outputs_and_gradients(copy.deepcopy(model).double(), wide, False)
    assert not counted
    for one, other, wanted in zip(ours, plain, exact, strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        errors = [float((each - wanted).norm() / wanted.norm().clamp(min=1e-6)) for each in (one, other)]
        assert errors[0] < 1.5 * errors[1] + (1e-2 if autocast else 1e-5)


def test_products_learn_in_float32_under_autocast(counted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = zoo.create("unet-debug").train()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    ran: Counter[str] = Counter()
    for name in ("weight_gradient", "column_sums"):
        operator = getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda *given, name=name, operator=operator: (ran.update([name]), operator(*given))[1]
        )
    outputs_and_gradients(model, inputs, False)
    assert not ran, "there is nothing to lower"
    _, *found = outputs_and_gradients(model, inputs, True)
    kinds = Counter(type(each) for each in model.modules())
    shortcuts = sum(each.shortcut is not None for each in model.modules() if isinstance(each, ResnetBlock))
    # Of transformers both ends and six in each block; and those of all timesteps and of all texts.
    assert ran["weight_gradient"] == 2 * kinds[Transformer] + 6 * kinds[TransformerBlock] + shortcuts + 2
    assert ran["column_sums"] == 2 * kinds[Transformer] + kinds[TransformerBlock] + shortcuts + 1
    for (name, _), grad in zip(model.named_parameters(), found, strict=True):
        if name.endswith(("qkv.weight", "mlp_out.weight", "proj_in.weight", "text_projections.weight")):
            assert not torch.equal(grad, grad.bfloat16().float()), f"{name} was rounded on its way"


@pytest.mark.parametrize("name", ["qkv", "self_out", "query", "text_out", "mlp_in", "mlp_out"])
def test_products_that_somebody_listens_to_are_called_where_they_learn(name: str, counted: Counter[str]) -> None:
    torch.manual_seed(0)
    block, x, key = TransformerBlock(8, 2), torch.randn(6, 8), torch.randn(2, 5, 8)
    heard: list[str] = []
    layer = getattr(block, name)
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(x.bfloat16(), key.bfloat16(), key.bfloat16(), None, None)
        layer.register_full_backward_hook(lambda *_: heard.append("back"))
        layer.register_forward_hook(lambda *_: heard.append("there"))
        found = block(x.bfloat16(), key.bfloat16(), key.bfloat16(), None, None)
    found.float().sum().backward()
    assert heard == ["there", "back"] and counted["kept_add_norm"] == 4
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [name for name in CUTS if name != "glue"])
def test_other_cuts_hold_the_operators_as_well(name: str, counted: Counter[str]) -> None:
    torch.manual_seed(0)
    model = zoo.create("unet-xl-debug").train()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    expected = outputs_and_gradients(model, inputs, True)
    zoo.compile_regions(model, regions=cut(model, name), backend="aot_eager")
    counted.clear()
    with zoo.enforce_budget(model):
        near(outputs_and_gradients(model, inputs, True), expected, 1e-2)
    assert counted == wanted_of(model)


def test_frozen_weights_have_no_gradients_and_cost_no_sums(counted: Counter[str]) -> None:
    torch.manual_seed(0)
    model = zoo.create("unet-debug").train()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    names = [name for name, _ in model.named_parameters()]
    expected = dict(zip(names, outputs_and_gradients(model, inputs, True)[1:], strict=True))
    trained = [name for name in expected if ".qkv." in name or ".norm2." in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    summed: list[tuple[bool, ...]] = []
    asked = operators.run_glue
    counted.clear()

    def note(name: str, *given: Any, **module: str) -> Any:
        if "backward" in name:
            summed.append(tuple(each for each in given if isinstance(each, bool)))
        return asked(name, *given, **module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "run_glue", note)
        patch.setattr(learning, "column_sums", lambda *_: pytest.fail("summed for a bias that does not learn"))
        found = outputs_and_gradients(model, inputs, True)[1:]
    near(found, [expected[name] for name in trained], 1e-6)
    # Of the norms every third, which is the second of a block; of the gates none.
    assert summed and {each for each in summed if len(each) == 1} == {(False,)}
    assert {each for each in summed if len(each) == 2} == {(False, False), (True, False)}


def test_checkpoints_compute_again_what_operators_kept(counted: Counter[str]) -> None:
    torch.manual_seed(0)
    model = zoo.create("unet-debug").train()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    expected = outputs_and_gradients(model, inputs, False)
    zoo.compile_regions(model, regions=cut(model, "transformers"), backend="aot_eager")
    checkpoint_regions(model, TransformerBlock)
    counted.clear()
    near(outputs_and_gradients(model, inputs, False), expected, 1e-5)
    wanted = wanted_of(model)
    twice = {name: 2 * wanted[name] for name in ("gated_gelu", "kept_add_norm", "kept_row_norm")}
    assert counted == {**wanted, **twice}


def test_convolutions_that_somebody_listens_to_are_called(counted: Counter[str]) -> None:
    model, heard = zoo.create("unet-debug").train(), list[int]()
    inputs = zoo.example_inputs(model, size=8, tokens=5)
    expected = outputs_and_gradients(model, inputs, False)
    before = counted["conv_bias"]
    counted.clear()
    model.conv_in.register_forward_hook(lambda *_: heard.append(1))
    near(outputs_and_gradients(model, inputs, False), expected, 1e-6)
    assert heard == [1] and counted["conv_bias"] == before - 1


def test_importing_and_running_the_family_brings_no_triton() -> None:
    code = (
        "import sys, torch, zoo\n"
        "before = 'triton' in sys.modules\n"
        "model = zoo.create('unet-debug'); model(**zoo.example_inputs(model))\n"
        "assert not before and 'triton' not in sys.modules and 'zoo.unet.kernels' not in sys.modules\n"
        "assert 'diffusers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_upsample_of_no_images_is_no_alias() -> None:
    torch.library.opcheck(torch.ops.zoo_unet.upsample.default, (torch.randn(0, 3, 5, 8),))
