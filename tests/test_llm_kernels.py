"""The operators of the family: kernels by the files of checks, here what compilers and callers need of them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import common as _  # noqa: F401  (what it imports must not be patched)
from torch._functorch import aot_autograd

import zoo
from tests import fake_gpu
from tests.blocks import Doubled
from zoo.engine.direct import has_nothing_to_fuse
from zoo.engine.traced import tracing
from zoo.llm import LLM, LLMLayer
from zoo.llm.generate import DecodeState, accept
from zoo.llm.model import _add_linear
from zoo.ops.attention import MOST_ROWS, attend, decode_attention, few_rows, heads_fit, rotate_into, split_rotated
from zoo.ops.transformer import WIDEST_RMS_NORM, add_rms_norm, rms_norm, swiglu
from zoo.training import checkpoint_regions
from zoo.training.tensor_parallel import RowLinear

# --- what the compiler is given ---

KERNEL = "triton_kernel_wrapper_functional"
LAYOUT = (
    "view", "_unsafe_view", "t", "transpose", "slice", "select", "unsqueeze", "detach", "empty_like", "new_empty",
)  # fmt: skip


def small(batch: int, tokens: int, **options: Any) -> tuple[LLM, Tensor]:
    """A model of one layer, and what its layer gets."""
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=1, dtype=torch.bfloat16, **options)
    return model, torch.randn(batch, tokens, model.config.hidden_size, dtype=torch.bfloat16)


def traced(monkeypatch: pytest.MonkeyPatch, *call: Any) -> list[list[str]]:
    """The nodes that compute something, of each graph that a call is compiled to; none is for Inductor."""
    aot = aot_autograd.aot_module_simplified

    def look(graph: torch.fx.GraphModule, *given: Any, **options: Any) -> Any:
        assert has_nothing_to_fuse(graph)
        return aot(graph, *given, **options)

    monkeypatch.setattr(aot_autograd, "aot_module_simplified", look)
    return [work(graph) for graph in fake_gpu.traced(monkeypatch, *call)]


def work(graph: list[str]) -> list[str]:
    names = {f"aten.{name}.default" for name in LAYOUT} | {"aten.transpose.int", "aten.slice.Tensor", "aten.select.int"}
    return sorted(node for node in graph if "getitem" not in node and node not in names)


@pytest.mark.parametrize("from_start", [False, True])
def test_a_prompt_is_one_graph_of_kernels_and_products(from_start: bool, gpu: Any, monkeypatch: Any) -> None:
    model, x = small(2, 5)
    positions, cache = torch.arange(5).repeat(2, 1), model.make_cache(2, 8).layers[0]
    call = model.layers[0], x, model.rotary(positions), None, positions, cache, from_start
    with torch.inference_mode():
        (graph,) = traced(monkeypatch, *call)
    library = ["aten._scaled_dot_product_flash_attention_for_cpu.default"] if from_start else []
    # Norm, rotation into the cache, attention, add with norm, gate.
    kernels = [KERNEL] * (4 if from_start else 5)
    assert graph == sorted(["aten.mm.default"] * 3 + ["aten.addmm.default"] + library + kernels)


def shared(numbers: int, dtype: torch.dtype) -> Any:
    """What the sums of one process need, which finds its own numbers alone."""
    from zoo.ops.triton import sums

    programs = -(-numbers // sums.WORDS)
    word = torch.int32 if dtype.itemsize == 2 else torch.int64
    memory = torch.zeros(2, 1, programs * sums.WORDS, dtype=word)
    addresses = torch.tensor([memory.data_ptr()] * 2)
    return sums.Shared(memory, addresses, torch.zeros(programs, dtype=torch.int32))


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A call of each operator; their gradients are taken too."""

    def grown(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    cache, rotary, head = torch.randn(2, 2, 1, 16, 32), torch.randn(2, 32), torch.randn(32)
    rows, several = torch.tensor([3, 15]), torch.tensor([[3, 4, 5]] * 2)
    model, x = small(2, 1)
    state = DecodeState(2, 4, torch.device("cpu"))

    def add_up(part: Tensor) -> Tensor:
        from zoo.ops.triton import sums

        return sums.sum_of_parts(part, shared(part.numel(), part.dtype))

    def step(model: LLM, x: Tensor, cache: Tensor) -> Tensor:
        return model.layers[0](x, model.rotary(rows[:, None]), positions=rows[:, None], cache=cache)

    return {
        "swiglu": (swiglu, (grown(3, 8),)),
        "norm": (rms_norm, (grown(3, 8), grown(8), 1e-6)),
        "add and norm": (add_rms_norm, (grown(2, 3, 8), grown(2, 3, 8), grown(8), 1e-6)),
        "parts": (split_rotated, (grown(2, 3, 4 * 32), torch.randn(1, 3, 32), None, None, 0.0, 2, 1)),
        "rotation": (
            rotate_into,
            (torch.randn(2, 3, 4 * 32), cache, several, torch.randn(1, 3, 32), head, head, 1e-6, 2),
        ),
        "prefill": (attend, (torch.randn(2, 3, 2, 32), cache, several, 4)),
        "attention": (decode_attention, (torch.randn(2, 4 * 32), cache, rows, rotary, head, head, 1e-6, 2, 5)),
        "a step": (torch.no_grad()(step), (model, x, model.make_cache(2, 16).layers[0])),
        "head": (torch.no_grad()(lambda model, x: model.head(x, model.output_weight)), (model, x)),
        "sum": (add_up, (torch.randn(3, 100),)),
        "choice": (lambda: (accept(state, torch.randn(2, 9), greedy=True), state.tokens), ()),
    }


def test_a_step_of_few_rows_is_kernels_alone(gpu: Any, monkeypatch: Any) -> None:
    model, x = small(2, 1)
    positions, cache = torch.tensor([[3], [4]]), model.make_cache(2, 8).layers[0]
    with torch.inference_mode():
        (layer,) = traced(monkeypatch, model.layers[0], x, model.rotary(positions), None, positions, cache)
        (head,) = traced(monkeypatch, model.head, x, model.output_weight)
    # Functionalization puts what a kernel writes into the cache.
    assert layer.count(KERNEL) == 6 and head.count(KERNEL) == 1
    assert {each.partition(".")[0] for each in layer + head} <= {KERNEL, "aten"}


def test_a_step_over_several_processes_is_kernels_alone(gpu: Any, monkeypatch: Any) -> None:
    model, x = small(2, 1)
    memory = shared(32 * x.shape[-1], x.dtype)
    for name in ("o_proj", "down_proj"):
        layer: Any = model.layers[0].get_submodule(name)
        layer.__class__, layer.split_over, layer.is_first, layer.shared = RowLinear, None, True, memory
    positions, cache = torch.tensor([[3], [4]]), model.make_cache(2, 8).layers[0]
    with torch.inference_mode():
        (layer,) = traced(monkeypatch, model.layers[0], x, model.rotary(positions), None, positions, cache)
    assert layer.count(KERNEL) == 6 + 2 and {each.partition(".")[0] for each in layer} <= {KERNEL, "aten"}


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_numbers_of_other_processes_are_read_past_all_caches(kind: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from zoo.ops.triton import sums

    constants = {"RANKS": 2, "CAPACITY": 1024, "WORDS": sums.WORDS, "OVERLAP": True}
    tensors = {"part": f"*{kind}", "out": f"*{kind}", "counts": "*i32", "addresses": "*i64"}
    source = ASTSource(
        sums._sum, {**tensors, "n": "i32", **dict.fromkeys(constants, "constexpr")}, constants,
        {(index,): [["tt.divisibility", 16]] for index in range(5)},
    )  # fmt: skip
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "launch_pdl": True}).asm["ptx"]
    words = ["griddepcontrol.wait", "st.global.wt.v", "ld.volatile.global.v"]
    places = [[found.start() for found in re.finditer(re.escape(each), code)] for each in words]
    pieces = 2 if kind == "bf16" else 4
    assert [len(each) for each in places] == [1, pieces, pieces], "16 bytes of a thread for each process, in one or two"
    assert places[0][0] < min(places[1]) and max(places[1]) < min(places[2])
    assert "bar.sync" not in code and "st.shared" not in code, "a warp waits for no other"


def test_kernels_of_a_step_overlap_where_their_graph_runs_as_it_is(monkeypatch: Any) -> None:
    from zoo.ops.triton import decode as kernels

    monkeypatch.setattr(kernels, "_has_dependent_launch", lambda device: True)

    def asked(x: Tensor) -> Tensor:
        return x + 1 if kernels.can_overlap(x.device) else x - 1

    for runs in (False, True):
        torch._dynamo.reset()
        step = torch.compile(asked, backend="eager", fullgraph=True)
        with tracing(to_run=runs):
            step(torch.zeros(1))
        # Code is called when nothing is traced, and is not compiled again.
        with torch.compiler.set_stance("fail_on_recompile"):
            assert step(torch.zeros(1)).item() == (1 if runs else -1)


def decode(model: LLM, tokens: Tensor) -> Tensor:
    """Logits of the last four of eight tokens, one at a time, over a cache that a prompt and its end filled."""
    cache = model.make_cache(tokens.shape[0], 16)
    model(tokens[:, :2], cache=cache)
    steps = [
        model(tokens[:, t : t + size], position_ids=torch.arange(t, t + size, device=tokens.device)[None], cache=cache)
        for t, size in ((2, 2), *((t, 1) for t in range(4, tokens.shape[1])))
    ]
    return torch.cat(steps, dim=1)


def gradients(model: LLM, tokens: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(tokens).square().mean(), list(model.parameters()))


OPTIONS = [{}, {"qk_norm": True, "sliding_window": 3}, {"qkv_bias": True}]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [1, 6])
def test_compiled_regions_decode_as_uncompiled_on_a_gpu(options: dict[str, Any], batch: int) -> None:
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=2, device="cuda", **options)
    tokens = torch.randint(model.config.vocab_size, (batch, 8), device="cuda")
    with torch.inference_mode():
        expected = decode(model, tokens)
        zoo.compile_regions(model)
        torch.testing.assert_close(decode(model, tokens), expected, rtol=1e-4, atol=1e-4)
        with zoo.enforce_budget(model):
            decode(model, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_regions_train_as_uncompiled_on_a_gpu(options: dict[str, Any], checkpointed: bool) -> None:
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=2, device="cuda", **options)
    tokens = torch.randint(model.config.vocab_size, (2, 9), device="cuda")
    expected = gradients(model, tokens)
    zoo.compile_regions(model)
    if checkpointed:
        checkpoint_regions(model, LLMLayer)
    with zoo.enforce_budget(model):
        for _ in range(2):
            for found, wanted in zip(gradients(model, tokens), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


# --- when kernels run ---


def test_unsupported_norms_run_without_kernels(gpu: Any) -> None:
    x, weight = torch.randn(2, 3, 8), torch.ones(8)
    rms_norm(x, weight, 1e-6), add_rms_norm(x, x, weight, 1e-6)
    assert gpu.launches == ["_norm"] * 2
    rms_norm(x.double(), weight.double(), 1e-6), rms_norm(x.bfloat16(), weight, 1e-6)
    add_rms_norm(x, x.bfloat16(), weight, 1e-6), add_rms_norm(x, x[:1], weight, 1e-6)
    rms_norm(torch.randn(1, WIDEST_RMS_NORM + 1), torch.ones(WIDEST_RMS_NORM + 1), 1e-6)
    with pytest.raises(RuntimeError, match="must match the size"):
        rms_norm(x, weight[:4], 1e-6)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("width", [4, 16, 48])
def test_unsupported_head_widths_run_without_kernels(width: int, gpu: Any) -> None:
    cache, rotary = torch.randn(2, 2, 1, 16, width), torch.randn(2, width)
    qkv, query = torch.randn(2, 4 * width), torch.randn(2, 3, 2, width)
    decode_attention(qkv, cache, torch.tensor([3, 15]), rotary, None, None, 1e-6, 2, None)
    attend(query, cache, torch.tensor([[3, 4, 5]] * 2), None)
    tokens, turns = qkv[:, None].expand(2, 3, 4 * width), rotary[:1, None].expand(1, 3, width)
    rotate_into(tokens, cache, torch.tensor([[3, 4, 5]] * 2), turns, None, None, 1e-6, 2)
    split_rotated(tokens.clone().requires_grad_(), turns, None, None, 0.0, 2, 1)
    assert not gpu.launches


def test_rounded_weights_many_rows_and_gradients_go_the_ordinary_way(gpu: Any) -> None:
    weight, x = torch.randn(4, 8), torch.randn(MOST_ROWS, 8)
    assert few_rows(x, weight)
    assert not few_rows(torch.randn(MOST_ROWS + 1, 8), weight)
    with torch.autocast("cpu", torch.bfloat16):  # whose products are in half precision
        assert not few_rows(x, weight) and few_rows(x.bfloat16(), weight.bfloat16())
    assert not few_rows(x.bfloat16(), weight) and not few_rows(x, weight.requires_grad_())
    with torch.no_grad():
        assert few_rows(x, weight)
    assert heads_fit(64) and not heads_fit(80) and not heads_fit(16)


def test_only_a_plain_linear_layer_is_added_in_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[Tensor] = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *given: (products.append(given[0]), addmm(*given))[1])
    x, hidden = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    plain, bias, other = nn.Linear(4, 8, bias=False), nn.Linear(4, 8), Doubled(4, 8, bias=False)
    torch.testing.assert_close(_add_linear(x, hidden, plain), x + plain(hidden))
    assert len(products) == 1
    torch.testing.assert_close(_add_linear(x, hidden, bias), x + bias(hidden))
    torch.testing.assert_close(_add_linear(x, hidden, other), x + other(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        _add_linear(x, hidden, plain)
    torch.testing.assert_close(_add_linear(x.double(), hidden, plain), x.double() + plain(hidden))
    assert len(products) == 1
