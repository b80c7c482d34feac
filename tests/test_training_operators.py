"""The loss of some rows at a time and AdamW, against torch's; training_kernel_checks.py holds what kernels compute."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.fake_gpu import Gpu, traced
from tests.noted import noted
from zoo.engine.graphed_step import synchronising_raises
from zoo.llm.model import RMSNorm
from zoo.ops import training as updates
from zoo.ops.training import cross_entropy_rows, float8_linear, judge_step, scale_
from zoo.training import AdamW, LinearCrossEntropy, TrainingStep, float8_products
from zoo.training.fused import CrossEntropyRows, Float8Linear


def draw(rows: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(37, rows, generator=generator).to(device)
    return x, weight, labels


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 100])
@pytest.mark.parametrize("ignored", [0, 1, 5, 12])
def test_loss_and_gradients_match_torch(device: str, chunk: int, ignored: int):
    x, weight, labels = draw((3, 4), torch.float64, device)
    labels.view(-1)[:ignored] = -100
    loss = LinearCrossEntropy(chunk)(x, weight, labels)
    logits = F.linear(x, weight).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum") / max(12 - ignored, 1)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected.float())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="frees its gradients in the backward; compute the loss again"):
        loss.backward()
    loss = LinearCrossEntropy(chunk)(x, weight, labels)
    for got, wanted in zip(gradients(3 * loss, x, weight), gradients(3 * expected, x, weight), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_its_inputs(device: str, dtype: torch.dtype):
    x, weight, labels = draw((50,), dtype, device)
    # 49 rows that count: a scale that half precision cannot hold.
    labels[0] = -100
    loss = LinearCrossEntropy(16)(x, weight, labels)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels)
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    for got, wanted in zip(gradients(loss, x, weight), gradients(expected, *exact), strict=True):
        assert got.dtype is dtype
        assert float((got.double() - wanted).norm() / wanted.norm()) < 8 * torch.finfo(dtype).eps


def test_autocast_multiplies_in_half_precision_and_gives_float32_gradients():
    x, weight, labels = draw((20,), torch.float32)
    seen = []
    loss_module = LinearCrossEntropy(8)
    loss_module.rows.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_module(x, weight, labels)
        expected = F.cross_entropy(F.linear(x, weight), labels)
    assert set(seen) == {torch.bfloat16}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for got, wanted in zip(gradients(loss, x, weight), gradients(expected, x, weight), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=2e-3)


def test_no_more_than_a_chunk_of_logits_exists_and_its_region_is_one_graph_whatever_is_left_over():
    x, weight, labels = draw((50,), torch.float32)
    shapes = []
    module = LinearCrossEntropy(8)
    handle = module.rows.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    module(x, weight, labels)
    assert shapes == [(8, 37)] * 7
    handle.remove()
    zoo.compile_regions(module, backend="aot_eager")
    with zoo.enforce_budget(module):
        first = module(x, weight, labels)
        module(x, weight, labels).backward()
    torch.testing.assert_close(first, F.cross_entropy(F.linear(x, weight), labels))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_computes_no_gradients(mode: Any, monkeypatch: pytest.MonkeyPatch):
    x, weight, labels = draw((20,), torch.float32)
    expected = LinearCrossEntropy(8)(x, weight, labels).detach()
    monkeypatch.setattr(torch, "empty_like", lambda _: pytest.fail("memory is taken for a gradient"))
    with mode():
        loss = LinearCrossEntropy(8)(x, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    labels, one = torch.tensor([3, -100, 8]), torch.ones(())

    def rows(logits: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy_rows(logits.clone(), *rest)  # their gradient takes their place

    return {
        "rows": (rows, (torch.randn(3, 9), labels, one)),
        "rows of half precision": (rows, (torch.randn(3, 16).bfloat16(), labels, one)),
        "scale": (scale_, (torch.randn(5, 4), one)),
        "adamw": (adamw_step, (torch.randn(1 << 19, requires_grad=True),)),
        "a step": (judged, (one,)),
        "float8": (float8_linear, (torch.randn(32, 48, requires_grad=True), torch.randn(16, 48, requires_grad=True))),
    }


def judged(loss: Tensor) -> tuple[Tensor, ...]:
    count, last, last_loss, skip = (loss.new_zeros((), dtype=dtype) for dtype in [torch.int64] * 2 + [loss.dtype] * 2)
    judge_step(loss, None, count, last, last_loss, skip)
    return count, last, last_loss, skip


def adamw_step(param: Tensor) -> None:
    param.grad = torch.zeros_like(param)
    AdamW([param]).step()


def test_the_region_is_one_graph_with_the_kernel_in_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, scale = torch.tensor([1, 2, -100, 8]), torch.tensor(0.25)
    (graph,) = traced(monkeypatch, CrossEntropyRows(), torch.randn(4, 9), labels, scale)
    assert sum("triton_kernel_wrapper" in each for each in graph) == 1
    assert not any("exp" in each or "clone" in each for each in graph)


@pytest.mark.gpu
def test_rows_of_a_whole_vocabulary_match_torch() -> None:
    logits, labels = 4 * torch.randn(64, 128_256, device="cuda").bfloat16(), torch.arange(64, device="cuda") * 2003
    exact = logits.float().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (slope,) = torch.autograd.grad(expected.mean(), exact)
    found, grad = cross_entropy_rows(logits, labels, torch.tensor(1 / 64, device="cuda"))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.float(), slope, rtol=2**-7, atol=1e-9)


@pytest.mark.gpu
def test_the_gradient_of_rows_takes_the_logits_place_where_they_are_compiled() -> None:
    rows = CrossEntropyRows()
    rows.compile(fullgraph=True, backend="inductor")
    logits, labels = torch.randn(2048, 4096, device="cuda"), torch.randint(4096, (2048,), device="cuda")
    scale = torch.tensor(0.25, device="cuda")
    losses_apart, expected = cross_entropy_rows(logits.clone(), labels, scale)
    with torch.no_grad():
        rows(logits.clone(), labels, scale)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found, grad = rows(logits, labels, scale)
    assert grad.data_ptr() == logits.data_ptr()
    assert torch.cuda.max_memory_allocated() - held < logits.nbytes // 2, "the logits were copied"
    torch.testing.assert_close((found, logits), (losses_apart, expected))


def in_float8(x: Tensor) -> Tensor:
    """The numbers that a matrix has after each of its rows was rounded, in float64."""
    greatest = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (x.float() * (greatest.reciprocal() * 448)).to(torch.float8_e4m3fn).double() * greatest / 448


@pytest.mark.parametrize(
    "sizes",
    [(32, 48, 64), (5, 48, 64), (5, 20, 24)],
    ids=["torch has a product", "odd rows", "widths it does not take"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_float8_are_those_of_rounded_rows_and_columns(device: str, dtype: torch.dtype, sizes: Any):
    rows, out, width = sizes
    x, weight, grad = (
        torch.randn(shape).to(device, dtype) for shape in ((2, rows, width), (out, width), (2, rows, out))
    )
    weight[3], weight[4] = 0, 1e-35
    flat, flat_grad = x.flatten(0, 1), grad.flatten(0, 1)
    expected = [
        in_float8(flat) @ in_float8(weight).t(),
        in_float8(flat_grad) @ in_float8(weight.t()).t(),
        in_float8(flat_grad.t()) @ in_float8(flat.t()).t(),
    ]
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    assert float8_linear(x[:0], weight).shape == (0, rows, out)
    result = float8_linear(*leaves)
    found = [result.detach().flatten(0, 1), *gradients((result * grad).sum(), *leaves)]
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype is dtype
        assert float((got.double().view_as(wanted) - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.parametrize("dynamic", [None, True])
def test_linear_layers_of_blocks_are_trained_in_float8_under_their_names(dynamic: bool | None):
    model, ids = zoo.create("llm-debug", qkv_bias=True).train(), torch.arange(32).view(2, 16)
    plain, cls = copy.deepcopy(model), type(model.layers[0])
    assert float8_products(model, cls) is model
    assert sum(type(module) is Float8Linear for module in model.modules()) == 4 * len(model.layers)
    assert model.state_dict().keys() == plain.state_dict().keys()
    zoo.compile_regions(model, backend="aot_eager", dynamic=dynamic)
    optimizer, loss_of, losses = AdamW(model.parameters(), lr=1e-2), LinearCrossEntropy(8), []
    with zoo.enforce_budget(model):
        for _ in range(6):
            loss = loss_of(*model.output_product(ids), ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    exact = loss_of(*plain.output_product(ids), ids).item()
    assert losses[0] != exact and losses[0] == pytest.approx(exact, rel=0.02) and losses[-1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match=r"call float8_products before zoo\.compile_regions"):
        float8_products(model, cls)
    with pytest.raises(ValueError, match=r"is compiled or captured: zoo\.uncompile\(model\) undoes it"):
        float8_products(zoo.cuda_graph(copy.deepcopy(plain)), cls)
    for given, words in (
        (nn.Conv2d, "has no Conv2d; its modules are of .*LLMLayer"),
        (RMSNorm, "no nn.Linear in its RMS"),
    ):
        with pytest.raises(ValueError, match=words):
            float8_products(plain, given)
    with pytest.raises(TypeError, match="cls is 'LLMLayer', expected the class"):
        float8_products(plain, "LLMLayer")  # type: ignore[arg-type]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((7, 5), (3,), (2, 3, 4, 4))]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.2, "maximize": True}, {"amsgrad": True}, {"lr": torch.tensor(1e-2)}],
    ids=["plain", "decay, maximize", "amsgrad", "rate as a tensor"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_triton_it_matches_torch(dtype: torch.dtype, options: dict[str, Any]):
    ours, theirs = weights(dtype), weights(dtype)
    mine, torchs = AdamW(ours, **options), torch.optim.AdamW(theirs, fused=True, **options)
    train(mine, ours, 4)
    train(torchs, theirs, 4)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(mine.state_dict(), torchs.state_dict(), rtol=0, atol=0)


def test_groups_have_options_of_their_own_and_the_rest_no_gradient():
    ours, theirs = weights(), weights()
    groups = [[{"params": w[:1], "lr": 0.1}, {"params": w[1:], "weight_decay": 0.5}] for w in (ours, theirs)]
    mine, torchs = AdamW(groups[0]), torch.optim.AdamW(groups[1], fused=True)
    train(mine, ours[:2], 3)
    train(torchs, theirs[:2], 3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(mine.state) == 2


def test_hooks_run_once_and_a_closure_is_called_with_gradients_on():
    torch.optim.AdamW(weights(), fused=True)  # whose step torch wraps for all of its class
    params = weights()
    optimizer = AdamW(params)
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))

    def closure() -> Tensor:
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert ran == ["before", "after"]


def test_a_state_of_an_optimizer_that_is_not_fused_is_taken_over():
    theirs, ours = weights(), weights()
    plain = torch.optim.AdamW(theirs, foreach=True)
    train(plain, theirs, 2)
    train(torch.optim.AdamW(ours, foreach=True), ours, 2)
    optimizer = AdamW(ours)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.param_groups[0]["fused"] and not optimizer.param_groups[0]["foreach"]
    train(plain, theirs, 2, seed=1)
    train(optimizer, ours, 2, seed=1)
    torch.testing.assert_close(ours, theirs)
    assert all(state["step"] == 4 for state in optimizer.state.values())


def test_what_is_selected_of_aligned_pointers_is_read_16_bytes_at_a_time(gpu, monkeypatch):
    import triton
    from triton.compiler.compiler import compile as compile_for_a_gpu

    monkeypatch.setattr(updates, "SMALLEST", 1)
    monkeypatch.setattr(updates, "LARGE", 64)
    code: list[str] = []

    def compile_and_keep(source: Any, **options: Any) -> Any:
        code.append(compile_for_a_gpu(source, **options).asm["ptx"])
        return gpu.compile(source)

    monkeypatch.setattr(triton.compiler, "compile", compile_and_keep)
    params = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (32, 32, 64)]
    for param in params:
        param.grad = torch.zeros_like(param)
    AdamW(params).step()
    assert gpu.launches == ["_adamw"] * 2 and len(code) == 1
    assert "ld.global.v4.b32" in code[0] and "st.global.v4.b32" in code[0]
    assert ".global.b16" not in code[0] and ".global.v4.b16" not in code[0]


class Words(nn.Module):
    """A table that is large, two that are together, and weights that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(updates.LARGE // 64 + 1, 64)
        self.halves = nn.ModuleList(nn.Embedding(updates.LARGE // 128 + 1, 64) for _ in range(2))
        self.out = nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for half in self.halves:
            x = x + half(ids % half.num_embeddings)
        return self.out(x)


def losses_of(kind: type[torch.optim.Optimizer], dtype: torch.dtype, captured: bool, bad: int | None) -> list[Any]:
    torch.manual_seed(0)
    model = Words().to("cuda", dtype).train()
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = kind(model.parameters(), lr=rate, fused=True, capturable=True)
    generator = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).float(), batch["labels"]) * batch["times"]

    step = TrainingStep(model, loss, optimizer, cuda_graph=captured, warmup=2, report_every=1000)
    found = []
    for index in range(8):
        ids = torch.randint(model.table.num_embeddings, (512,), generator=generator)
        labels = torch.randint(8, (512,), generator=generator)
        times = torch.tensor(float("nan") if index == bad else 1.0)
        found.append(step({"ids": ids.cuda(), "labels": labels.cuda(), "times": times.cuda()}).item())
    assert bool(step.captured) == captured
    counts = {float(state["step"]) for state in optimizer.state.values()}
    return [found, [param.detach().float().cpu() for param in model.parameters()], counts]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [None, 5])
def test_large_parameters_train_as_by_torchs_on_a_gpu(dtype, captured, bad, monkeypatch):
    from zoo.ops.triton import training as kernel

    launches = noted(monkeypatch, kernel, "adamw")
    ours, theirs = (losses_of(kind, dtype, captured, bad) for kind in (AdamW, torch.optim.AdamW))
    rows, sizes = updates.LARGE // 128 + 1, {tuple(each.numel() for each in params) for params, *_ in launches}
    assert sizes == {((updates.LARGE // 64 + 1) * 64,), (rows * 64,) * 2}
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4 if dtype is torch.float32 else 2e-2, nan_ok=True)
    for found, expected in zip(ours[1], theirs[1], strict=True):
        error = float((found - expected).norm() / expected.norm())
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)
    assert ours[2] == theirs[2] == {8.0 if bad is None else 5.0}


@pytest.mark.gpu
def test_a_step_waits_for_nothing():
    sizes = (updates.LARGE, updates.LARGE // 2, updates.LARGE // 2)
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    optimizer = AdamW(params, lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    optimizer.step()
    with synchronising_raises():
        optimizer.step()


def test_a_scaler_of_torch_drives_it(device: str, monkeypatch: pytest.MonkeyPatch):
    # On a GPU all of it is the kernel's then.
    monkeypatch.setattr(updates, "LARGE", 1)
    monkeypatch.setattr(updates, "SMALLEST", 1)
    launched: list[int] = []
    inner = updates._launches
    monkeypatch.setattr(updates, "_launches", lambda *given: (found := inner(*given), launched.extend(found))[0])
    model = nn.Linear(8, 4).to(device)
    optimizer, scaler = AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler(device, init_scale=2.0**10)
    before = model.weight.detach().clone()
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8, device=device)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert model.weight.isfinite().all() and not torch.equal(model.weight, before)
    assert bool(launched) == (device == "cuda")
