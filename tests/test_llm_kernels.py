"""The operators of the family: kernels by the files of checks, here what compilers and callers need of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import zoo
from tests.kernel_runs import run_checks
from zoo.llm import LLM, LLMLayer, fallback, operators
from zoo.llm.norm import RMSNorm
from zoo.llm.residual import add_linear, add_norm, norm_alone, norm_beside
from zoo.training import checkpoint_regions

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ("llm_kernel_checks.py", "llm_norm_checks.py")


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


def grown(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def calls() -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    x, weight, norm = torch.randn(2, 8), torch.randn(6, 8), torch.randn(8)
    cache, rotary = torch.randn(2, 2, 1, 16, 32), torch.randn(2, 32)
    qkv, positions, head = torch.randn(2, 4 * 32), torch.tensor([3, 15]), torch.randn(32)
    return {
        "norm_linear": (operators.norm_linear, (x, norm, 1e-6, weight, None)),
        "norm_linear with bias": (operators.norm_linear, (x, norm, 1e-6, weight, torch.randn(6))),
        "linear_add": (operators.linear_add, (x, weight, torch.randn(2, 6))),
        "accept_greedy": (
            operators.accept_greedy,
            (
                torch.randn(2, 9),
                *torch.zeros(2, 2, 1, dtype=torch.int64).unbind(),
                torch.tensor([True, False]),
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(3, 2, dtype=torch.int64),
                torch.full((16,), -1),
                torch.tensor(1),
            ),
        ),
        "swiglu": (operators.swiglu, (torch.randn(3, 8, requires_grad=True),)),
        "swiglu's gradient": (operators.swiglu_backward, (torch.randn(3, 4), torch.randn(3, 8))),
        "norm": (operators.rms_norm_rows, (grown(3, 8), grown(8), 1e-6)),
        "add and norm": (operators.add_rms_norm, (grown(2, 3, 8), grown(2, 3, 8), grown(8), 1e-6)),
        "norm's gradient": (
            operators.rms_norm_backward,
            (torch.randn(3, 8), torch.randn(3, 8), norm, torch.rand(3), torch.randn(3, 8)),
        ),
        "parts": (operators.split_rotated, (grown(2, 3, 4 * 32), torch.randn(1, 3, 32), 2, 1)),
        "parts' gradient": (
            operators.join_rotated,
            (torch.randn(2, 3, 2, 32), *torch.randn(2, 2, 3, 1, 32), torch.randn(1, 3, 32)),
        ),
        "swiglu of columns": (operators.swiglu, (torch.randn(8, 3).t(),)),
        "norm of columns": (operators.rms_norm_rows, (torch.randn(8, 3).t(), norm, 1e-6)),
        "add and norm of columns": (operators.add_rms_norm, (*torch.randn(2, 8, 3).mT, norm, 1e-6)),
        "gradient of a norm of columns": (
            operators.rms_norm_backward,
            (*torch.randn(2, 8, 3).mT, norm, torch.rand(3), torch.randn(8, 3).t()),
        ),
        "norm_gate": (operators.norm_gate, (x, norm, 1e-6, weight)),
        "attention": (operators.decode_attention, (qkv, cache, positions, rotary, None, None, 1e-6, 2, None)),
        "rotation": (
            operators.rotate_into,
            (
                torch.randn(2, 3, 4 * 32),
                cache,
                torch.tensor([[3, 4, 5]] * 2),
                torch.randn(1, 3, 32),
                head,
                head,
                1e-6,
                2,
            ),
        ),
        "prefill": (operators.prefill_attention, (torch.randn(2, 3, 2, 32), cache, torch.tensor([[3, 4, 5]] * 2), 4)),
        "attention with norms": (operators.decode_attention, (qkv, cache, positions, rotary, head, head, 1e-6, 2, 5)),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_what_torch_expects(name: str) -> None:
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_importing_the_family_brings_no_triton() -> None:
    code = (
        "import sys, torch, zoo\n"
        "before = 'triton' in sys.modules\n"
        "model = zoo.create('llm-debug'); model(**zoo.example_inputs(model))\n"
        "assert not before and 'triton' not in sys.modules and 'zoo.llm.kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.fixture
def with_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take the operators' way, though what runs in them is torch's own."""
    monkeypatch.setattr(LLMLayer, "_by_kernels", lambda self, x: True)


def decode(model: LLM, tokens: Tensor) -> Tensor:
    """Logits of the last four of eight tokens, one at a time."""
    cache = model.make_cache(tokens.shape[0], 16)
    model(tokens[:, :4], cache=cache)
    steps = [
        model(tokens[:, t : t + 1], position_ids=torch.tensor([[t]]), cache=cache) for t in range(4, tokens.shape[1])
    ]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "sliding_window": 3}, {"qkv_bias": True}], ids=str)
def test_a_step_by_operators_is_the_same_step(
    options: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.create("llm-debug", **options)
    tokens = torch.randint(model.config.vocab_size, (batch, 8))
    with torch.inference_mode():
        expected = decode(model, tokens)
        monkeypatch.setattr(LLMLayer, "_by_kernels", lambda self, x: True)
        torch.testing.assert_close(decode(model, tokens), expected)


@pytest.mark.usefixtures("with_operators")
@pytest.mark.parametrize("batch", [1, 6])
def test_operators_keep_a_layer_to_one_graph(batch: int) -> None:
    model = zoo.create("llm-debug")
    tokens = torch.randint(model.config.vocab_size, (batch, 8))
    with torch.inference_mode():
        expected = decode(model, tokens)
        zoo.compile_regions(model, backend="aot_eager")
        with zoo.enforce_budget(model):
            torch.testing.assert_close(decode(model, tokens), expected)
            decode(model, tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("with_operators")
def test_inductor_writes_the_cache_in_place() -> None:
    model = zoo.create("llm-debug", num_hidden_layers=2)
    tokens = torch.randint(model.config.vocab_size, (1, 8))
    with torch.inference_mode():
        expected = decode(model, tokens)
        zoo.compile_regions(model)
        torch.testing.assert_close(decode(model, tokens), expected)


# --- where gradients are wanted ---

NORMS = ("rms_norm_rows", "add_rms_norm", "rms_norm_backward")
PARTS = ("split_rotated", "join_rotated")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """As where kernels run; what runs in the operators is torch's own, and is counted."""
    ran: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        inner = getattr(fallback, name)
        return lambda *given: (ran.update([name]), inner(*given))[1]

    for name in NORMS + PARTS:
        monkeypatch.setattr(fallback, name, counting(name))
    monkeypatch.setattr(operators, "_implementation", lambda module, name, x: getattr(fallback, name))
    monkeypatch.setattr(operators, "kernels_run", lambda x: True)
    return ran


def gradients(model: LLM, tokens: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(tokens).square().mean(), list(model.parameters()))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer_that_trains_is_one_graph_with_the_operators_in_it(
    backend: str, checkpointed: bool, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.create("llm-debug")
    layers = len(model.layers)
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    with monkeypatch.context() as without:
        without.setattr(operators, "kernels_run", lambda x: False)
        expected = gradients(model, tokens)
        logits = model(tokens).detach()
    assert not counted
    torch.testing.assert_close(gradients(model, tokens), expected)
    # The sum's is one of torch's norms.
    assert counted == {"add_rms_norm": layers, "rms_norm_rows": 2 * layers + 1, "rms_norm_backward": 2 * layers + 1}
    zoo.compile_regions(model, backend=backend)
    if checkpointed:
        checkpoint_regions(model, LLMLayer)
    with zoo.enforce_budget(model):
        for _ in range(2):
            counted.clear()
            torch.testing.assert_close(gradients(model, tokens), expected, rtol=1e-4, atol=1e-6)
    assert counted["rms_norm_backward"] == 2 * layers + 1
    with torch.no_grad():
        counted.clear()
        # A prompt takes the same operators, one token has others.
        torch.testing.assert_close(model(tokens), logits, rtol=1e-4, atol=1e-5)
        model(tokens[:, :1])
    assert not counted["rms_norm_backward"]


def test_the_gradient_past_a_norm_is_added_in_its_backward(counted: Counter[str]) -> None:
    """And the product's add in the product: what is left are the adds of queries' and keys' rotation."""
    graphs: dict[str, list[str]] = {}

    def compiler(name: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
            graphs[name] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return make_boxed_func(graph.forward)

        return compile_graph

    model = zoo.create("llm-debug")
    layer = model.layers[0]
    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    layer.compile(fullgraph=True, backend=backend)
    x = torch.randn(2, 5, model.config.hidden_size, requires_grad=True)
    layer(x, model.rotary(torch.arange(5)[None])).sum().backward()
    assert graphs["forward"].count("aten.addmm.default") == 1
    assert graphs["forward"].count("aten.add.Tensor") == 2 and graphs["backward"].count("aten.add.Tensor") == 4
    assert graphs["backward"].count("zoo_llm.rms_norm_backward.default") == 2


VIEWS = "view", "_unsafe_view", "t", "transpose", "slice", "select", "detach"


def recorder(ran: set[str]) -> Callable[..., Any]:
    """A compiler that notes what a graph does: all but views, and what an operator's outputs are taken out by."""

    def compile_graph(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        views = [f"aten.{view}" for view in VIEWS]
        ran.update(name for name in names if "getitem" not in name and name.rpartition(".")[0] not in views)
        return make_boxed_func(graph.forward)

    return compile_graph


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}], ids=str)
def test_training_leaves_the_compiler_no_code_to_write(options: dict[str, Any], counted: Counter[str]) -> None:
    forward, backward = set[str](), set[str]()
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=1, **options)
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    with pytest.MonkeyPatch.context() as without:
        without.setattr(operators, "kernels_run", lambda x: False)
        expected = gradients(model, tokens)
    backend = aot_autograd(fw_compiler=recorder(forward), bw_compiler=recorder(backward))
    for module in (model.layers[0], model.head):
        module.compile(fullgraph=True, backend=backend)
    counted.clear()
    torch.testing.assert_close(gradients(model, tokens), expected, rtol=1e-4, atol=1e-6)
    assert counted["split_rotated"] == counted["join_rotated"] == 1
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    products = {"aten.mm.default", "aten.addmm.default"}
    # Of a bias the compiler sums the gradient.
    sums = {"aten.sum.dim_IntList"} if options else set()
    assert forward == products | {
        "zoo_llm.rms_norm_rows.default", "zoo_llm.split_rotated.default", f"{attention}.default",
        "zoo_llm.add_rms_norm.default", "zoo_llm.swiglu.default",
    }  # fmt: skip
    assert backward - {"aten.addmm.default"} == {"aten.mm.default", *sums} | {
        "zoo_llm.swiglu_backward.default", "zoo_llm.rms_norm_backward.default", f"{attention}_backward.default",
        "zoo_llm.join_rotated.default",
    }  # fmt: skip


@pytest.mark.parametrize("options", [{"qk_norm": True, "head_dim": 32}, {"head_dim": 24}], ids=str)
def test_heads_with_norms_or_of_odd_widths_are_rotated_by_torch(options: dict[str, Any], counted: Counter[str]) -> None:
    model = zoo.create("llm-debug", num_hidden_layers=1, **options)
    gradients(model, torch.randint(model.config.vocab_size, (2, 9)))
    assert not counted["split_rotated"] and counted["add_rms_norm"]


def test_a_second_derivative_is_refused(counted: Counter[str]) -> None:
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=1)
    layer, rotary = model.layers[0], model.rotary(torch.arange(5)[None])
    x = torch.randn(2, 5, model.config.hidden_size, requires_grad=True)
    for run in (
        lambda: norm_beside(x, layer.input_layernorm)[1],
        lambda: norm_alone(x, layer.input_layernorm),
        lambda: add_norm(x, x, layer.input_layernorm)[1],
        lambda: layer.gate(x),
        lambda: layer.project(x, rotary)[0].square(),
    ):
        (grad,) = torch.autograd.grad(run().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()
    assert counted["join_rotated"]


def test_functional_transforms_are_torchs(counted: Counter[str]) -> None:
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=1)
    layer, parameters = model.layers[0], dict(model.layers[0].named_parameters())
    x, rotary = torch.randn(2, 5, model.config.hidden_size), model.rotary(torch.arange(5)[None])

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, (x, rotary))
        return out.square().mean()

    found = torch.func.grad(loss)(parameters)
    assert not counted
    loss(parameters).backward()
    assert counted["split_rotated"] == 1
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("from_start", [False, True])
def test_a_prompt_leaves_the_compiler_no_code_to_write(from_start: bool) -> None:
    work = set[str]()
    model = zoo.create("llm-debug", head_dim=32)
    layer, config = model.layers[0], model.config
    backend = aot_autograd(fw_compiler=recorder(work), inference_compiler=recorder(work))
    layer.compile(fullgraph=True, backend=backend)
    x, positions = torch.randn(2, 5, config.hidden_size), torch.arange(5).expand(2, 5)
    cache = torch.zeros(2, 2, config.num_key_value_heads, 8, 32)
    with torch.inference_mode():
        layer(x, model.rotary(positions), positions=positions, cache=cache, from_start=from_start)
    attention = {
        True: "aten._scaled_dot_product_flash_attention_for_cpu.default",
        False: "zoo_llm.prefill_attention.default",
    }
    # Operators of ours (the one that writes to the cache among them), products of the library, attention.
    assert work == {
        "zoo_llm.rms_norm_rows.default", "auto_functionalized_v2", attention[from_start],
        "zoo_llm.add_rms_norm.default", "zoo_llm.swiglu.default", "aten.mm.default", "aten.addmm.default",
    }  # fmt: skip


def test_norms_take_the_ordinary_way_where_operators_do_not_fit(counted: Counter[str]) -> None:
    norm, x = RMSNorm(8, 1e-6), torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        norm_alone(x, norm), norm_beside(x, norm), add_norm(x, x, norm)
    norm_alone(x.bfloat16(), norm), norm_beside(x.bfloat16(), norm), add_norm(x, x.bfloat16(), norm)
    with torch.no_grad():
        # A single token, and rows of many.
        for one in (x[:, :1], x[:, 0]):
            norm_alone(one, norm), norm_beside(one, norm), add_norm(one, one, norm)
    wide = RMSNorm(operators.WIDEST_NORM + 1, 1e-6)
    norm_alone(torch.randn(1, 1, operators.WIDEST_NORM + 1), wide)
    norm_alone(x, nn.LayerNorm(8))  # type: ignore[arg-type]
    assert not counted


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_hooks_of_norms_and_of_the_last_product_are_heard(counted: Counter[str]) -> None:
    model = zoo.create("llm-debug")
    layer, heard = model.layers[0], Counter[str]()
    names = "input_layernorm", "post_attention_layernorm", "down_proj"
    for name in names:
        getattr(layer, name).register_forward_pre_hook(lambda *_, name=name: heard.update([name]))
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    model(tokens)
    with torch.no_grad():
        model(tokens)
    assert heard == dict.fromkeys(names, 2)
    assert counted["add_rms_norm"] == 2 * (len(model.layers) - 1)


@pytest.mark.usefixtures("counted")
def test_only_a_plain_linear_layer_is_added_in_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[Tensor] = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *given: (products.append(given[0]), addmm(*given))[1])
    x, hidden = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    plain, bias, other = nn.Linear(4, 8, bias=False), nn.Linear(4, 8), _Scaled(4, 8, bias=False)
    torch.testing.assert_close(add_linear(x, hidden, plain), x + plain(hidden))
    assert len(products) == 1
    torch.testing.assert_close(add_linear(x, hidden, bias), x + bias(hidden))
    torch.testing.assert_close(add_linear(x, hidden, other), x + other(hidden))
    add_linear(x.double(), hidden, plain)
    with torch.autocast("cpu", torch.bfloat16):
        add_linear(x, hidden, plain)
    with torch.no_grad():
        add_linear(x[:, :1], hidden[:, :1], plain)
        assert len(products) == 1
        torch.testing.assert_close(add_linear(x, hidden, plain), x + plain(hidden))
        assert len(products) == 2


def test_norms_refuse_what_does_not_fit() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"residual is \[2, 8\].*expected it like x: \[3, 8\]"):
        operators.add_rms_norm(x, x[:2], weight, 1e-6)
    with pytest.raises(ValueError, match=r"residual is .* of torch.bfloat16"):
        operators.add_rms_norm(x, x.bfloat16(), weight, 1e-6)
    with pytest.raises(ValueError, match=r"a weight \[4\] .* does not fit x \[3, 8\]"):
        operators.rms_norm_rows(x, weight[:4], 1e-6)
    wide = torch.randn(1, operators.WIDEST_NORM + 1)
    with pytest.raises(ValueError, match=f"at most {operators.WIDEST_NORM}"):
        operators.rms_norm_rows(wide, wide[0], 1e-6)


def test_rounded_weights_and_many_rows_go_the_ordinary_way() -> None:
    weight = torch.randn(4, 8)
    assert operators.few_rows(torch.randn(operators.MOST_ROWS, 8), weight)
    assert not operators.few_rows(torch.randn(operators.MOST_ROWS + 1, 8), weight)
    assert not operators.few_rows(torch.randn(1, 8, dtype=torch.bfloat16), weight)
    assert operators.attention_fits(64) and not operators.attention_fits(80) and not operators.attention_fits(16)


@pytest.mark.parametrize("width", [4, 16, 48])
def test_heads_that_no_kernel_takes_go_the_ordinary_way(width: int, gpu: Any) -> None:
    cache, rotary = torch.randn(2, 2, 1, 16, width), torch.randn(2, width)
    qkv, query = torch.randn(2, 4 * width), torch.randn(2, 3, 2, width)
    operators.decode_attention(qkv, cache, torch.tensor([3, 15]), rotary, None, None, 1e-6, 2, None)
    operators.prefill_attention(query, cache, torch.tensor([[3, 4, 5]] * 2), None)
    tokens, turns = qkv[:, None].expand(2, 3, 4 * width), rotary[:1, None].expand(1, 3, width)
    operators.rotate_into(tokens, cache, torch.tensor([[3, 4, 5]] * 2), turns, None, None, 1e-6, 2)
    parts = operators.split_rotated(tokens, turns, 2, 1)
    assert operators.join_rotated(*parts, turns).shape == tokens.shape
    assert not gpu.launches
