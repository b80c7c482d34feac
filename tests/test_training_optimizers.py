"""AdamW of the zoo against torch's fused one. What its kernel computes, training_kernel_checks.py holds to."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops import training as updates
from zoo.training import AdamW, TrainingStep


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


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}])
def test_what_is_not_fused_is_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=r"see torch\.optim\.AdamW"):
        AdamW(weights(), **options)
    with pytest.raises(RuntimeError, match="differentiable"):
        AdamW(weights(), differentiable=True)


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


# --- on a GPU ---


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

    sizes: list[tuple[int, ...]] = []
    launch = kernel.adamw

    def count(params: list[Tensor], *rest: Any) -> None:
        sizes.append(tuple(each.numel() for each in params))
        launch(params, *rest)

    monkeypatch.setattr(kernel, "adamw", count)
    ours, theirs = (losses_of(kind, dtype, captured, bad) for kind in (AdamW, torch.optim.AdamW))
    rows = updates.LARGE // 128 + 1
    assert sizes and set(sizes) == {((updates.LARGE // 64 + 1) * 64,), (rows * 64,) * 2}
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4 if dtype is torch.float32 else 2e-2, nan_ok=True)
    for found, expected in zip(ours[1], theirs[1], strict=True):
        error = float((found - expected).norm() / expected.norm())
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)
    # The bad step, and all after it, are no steps.
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_scaler_of_torch_drives_it(device: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
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
