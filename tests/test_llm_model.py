"""The decoder: regions in every way they are called, its static cache, operators and generation; padding never seen."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.backends.common  # what it imports must not be patched
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import zoo
from tests import fake_gpu
from tests import llm_reference as reference
from tests.blocks import Doubled, graphs_of
from tests.noted import noted
from zoo.engine.captured import WeightsMovedError
from zoo.engine.direct import has_nothing_to_fuse
from zoo.llm import LLM, LLMLayer, Session
from zoo.llm.generate import DecodeState, accept, sample
from zoo.llm.model import _add_linear, token_mask, weight_of
from zoo.ops import attention
from zoo.ops.attention import attend, decode_attention, dequantized, few_rows, quantized, rotate_into, split_rotated
from zoo.ops.common import converts_float8
from zoo.ops.transformer import WIDEST_RMS_NORM, add_rms_norm, rms_norm, swiglu
from zoo.training import checkpoint_regions
from zoo.training.tensor_parallel import RowLinear


@pytest.fixture
def model() -> LLM:
    return zoo.create("llm-debug")


def ids(batch: int = 2, tokens: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "mode"), [(1, torch.no_grad), (6, torch.inference_mode)])
def test_prefill_decode_and_scoring_are_a_graph_each_at_any_depth(depth, mode):
    model = zoo.compile_regions(zoo.create("llm-debug", num_hidden_layers=depth), backend="aot_eager")
    eager = zoo.create("llm-debug", num_hidden_layers=depth)
    eager.load_state_dict(model.state_dict())
    tokens = ids(2, 12)
    with mode(), zoo.enforce_budget(model):
        expected = eager(tokens)
        cache = model.make_cache(2, 16)
        torch.testing.assert_close(model(tokens), expected)
        got = model(tokens[:, :8], cache=cache, logits_to_keep=1)
        torch.testing.assert_close(got, expected[:, 7:8])
        for at in range(8, 12):
            got = model(tokens[:, at : at + 1], position_ids=torch.full((2, 1), at), cache=cache, logits_to_keep=1)
            torch.testing.assert_close(got, expected[:, at : at + 1])
    # The head sees one position in prefill and in decoding, and shares that graph.
    assert graphs_of(model) == {"LLMLayer": 3, "LLMHead": 2}


def test_a_mask_is_one_more_graph(model: LLM) -> None:
    zoo.compile_regions(model, backend="eager")
    with torch.inference_mode(), zoo.enforce_budget(model):
        for seed in range(3):
            mask = torch.ones(2, 12)
            mask[0, : seed + 1] = 0
            model(ids(seed=seed), attention_mask=mask)
            model(ids(seed=seed))
    assert graphs_of(model) == {"LLMLayer": 2, "LLMHead": 1}


def test_norms_that_are_listened_to_or_replaced_are_called() -> None:
    model = zoo.create("llm-debug", num_hidden_layers=1, qk_norm=True).eval()
    tokens, heard = ids(2, 7), list[str]()
    layer = model.layers[0]
    expected = model(tokens)
    for name in ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: heard.append(name))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), expected)
        cache = model.make_cache(2, 8)
        torch.testing.assert_close(model(tokens[:, :6], cache=cache), expected[:, :6])
        last = model(tokens[:, 6:], position_ids=torch.full((2, 1), 6), cache=cache)
        torch.testing.assert_close(last, expected[:, 6:])
    assert heard == 3 * ["input_layernorm", "q_norm", "k_norm", "post_attention_layernorm"]
    layer.input_layernorm = nn.Identity()
    layer.q_norm = nn.Identity()
    assert model(tokens).isfinite().all()


def test_each_row_keeps_its_own_positions(model: LLM) -> None:
    tokens = ids(3, 10)
    with torch.inference_mode():
        everything = model(tokens)
        which = torch.tensor([[9, 0], [4, 4], [1, 8]])
        got = model(tokens, logits_to_keep=which)
        torch.testing.assert_close(model(tokens, logits_to_keep=which[0]), everything[:, which[0]])
        torch.testing.assert_close(model(tokens, logits_to_keep=2), everything[:, -2:])
    torch.testing.assert_close(got, torch.stack([everything[row, which[row]] for row in range(3)]))


def test_the_rotary_table_stays_in_float32_wherever_the_model_goes(model: LLM) -> None:
    table = model.rotary.table.clone()
    assert not [key for key in model.state_dict() if "rotary" in key]
    assert model.to(torch.bfloat16).rotary.table.dtype is torch.float32
    torch.testing.assert_close(model.float().rotary.table, table, rtol=0, atol=0)
    empty = zoo.create("llm-debug", device="meta").to_empty(device="cpu")
    torch.testing.assert_close(empty.rotary.table, table, rtol=0, atol=0)


def test_the_paddings_vector_gets_no_gradient() -> None:
    model = zoo.create("llm-debug", pad_token_id=3, tie_word_embeddings=False)
    assert model.embed_tokens.weight[3].abs().sum() == 0
    tokens = ids()
    tokens[0, 0] = 3
    model(tokens).square().sum().backward()
    gradient = model.embed_tokens.weight.grad
    assert gradient is not None and gradient[3].abs().sum() == 0 and gradient[int(tokens[0, 1])].abs().sum() > 0


def test_positions_of_masked_tokens_are_not_checked_and_one_behind_the_cache_is_named(model: LLM) -> None:
    tokens = torch.randint(model.config.vocab_size, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    positions = mask.cumsum(-1) - 1
    assert positions.min() == -1
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, position_ids=positions)
        expected = model(tokens[:1, 2:])
        torch.testing.assert_close(found[:1, 2:], expected)
        positions[1, 3] = -1
        with pytest.raises(ValueError, match="position_ids has values from -1 to 5"):
            model(tokens, attention_mask=mask, position_ids=positions)
    cache = model.make_cache(2, 16)
    with pytest.raises(ValueError, match="from 5 to 16, but cache.slots is 16: .* more slots"), torch.inference_mode():
        model(ids(), position_ids=torch.arange(5, 17)[None], cache=cache)
    assert not any(layer.any() for layer in cache.layers)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_values_that_torch_transforms_are_not_looked_at(model: LLM) -> None:
    tokens = torch.randint(model.config.vocab_size, (3, 2, 4))
    with torch.no_grad():
        found = torch.vmap(model)(tokens)
        torch.testing.assert_close(found, torch.stack([model(ids) for ids in tokens]))
        make_fx(model)(tokens[0])


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_a_second_turn_goes_on_and_sees_nothing_of_who_had_the_cache_before(window: int | None) -> None:
    model, tokens = zoo.create("llm-debug", sliding_window=window), ids(2, 16)
    with torch.inference_mode():
        expected = model(tokens)
        cache = model.make_cache(2, 16)
        model(ids(2, 16, seed=5), cache=cache)
        model(tokens[:, :7], cache=cache)
        got = model(tokens[:, 7:], position_ids=torch.arange(7, 16)[None], cache=cache)
        torch.testing.assert_close(got, expected[:, 7:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"sliding_window": 9}, {"qk_norm": True}], ids=str)
def test_a_prompt_from_the_start_is_one_at_those_positions(options: dict[str, Any]) -> None:
    model, tokens = zoo.create("llm-debug", **options), ids(2, 9)
    with torch.inference_mode():
        expected, cache = model(tokens), model.make_cache(2, 16)
        torch.testing.assert_close(model(tokens, cache=cache), expected)
        other = model.make_cache(2, 16)
        torch.testing.assert_close(model(tokens, position_ids=torch.arange(9)[None], cache=other), expected)
    torch.testing.assert_close(cache.layers, other.layers)
    # A window as wide as the text needs no mask.
    window = model.config.sliding_window
    assert (token_mask(9, None, window, tokens.device) is None) == (window != 4)


def test_sizes_and_dtypes_of_a_cache_which_is_one_kind_of_input_wherever_it_is_made(model: LLM) -> None:
    cache = model.make_cache(2, 32, dtype=torch.bfloat16)
    assert (cache.batch, cache.slots, cache.dtype, cache.device.type) == (2, 32, torch.bfloat16, "cpu")
    assert "3 layers of [2, 2, 2, 32, 16]" in repr(cache)
    assert zoo.create("llm-debug", dtype=torch.bfloat16).make_cache(1, 8).dtype is torch.bfloat16
    zoo.compile_regions(model, backend="eager")
    with torch.inference_mode():
        inside = model.make_cache(2, 16)
    outside = model.make_cache(2, 16)
    assert not inside.layers[0].is_inference()
    with torch.inference_mode(), zoo.enforce_budget(model):
        model(ids(2, 4), cache=inside)
        model(ids(2, 4), cache=outside)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate([[1, 2]], max_new_tokens=3).shape == (1, 3)
        assert model.make_cache(1, 8).dtype is torch.bfloat16


def test_caches_that_do_not_fit_are_refused() -> None:
    model, other = zoo.create("llm-debug"), zoo.create("llm-debug", num_hidden_layers=2, num_key_value_heads=1)
    one_head = zoo.create("llm-debug", num_key_value_heads=1)
    cache, narrow, given = model.make_cache(2, 8), model.make_cache(2, 8, dtype=torch.bfloat16), ids(2, 4)
    autocast = torch.autocast("cpu", torch.bfloat16)
    for call, words in (
        (lambda: model.make_cache(0, 8), "batch is 0"),
        (lambda: model.make_cache(1, 513), "slots is 513, but the model has 512"),
        (lambda: model(ids(3, 4), cache=cache), "cache has 3 layers of 2 rows, .* need 3 layers of 3 rows"),
        (lambda: model(ids(2, 9), cache=cache), "9 tokens, but the cache 8 slots"),
        (lambda: other(given, cache=cache), "cache has 3 layers of 2 rows, .* need 2 layers"),
        (lambda: one_head(given, cache=cache), "2 heads of width 16, .* 1 heads of width 16"),
        (lambda: model(given, cache=narrow), "bfloat16 on cpu, but the model and input_ids need .*float32 on cpu"),
        (lambda: autocast(model.forward)(given, cache=cache), "float32 on cpu, but .*bfloat16.*dtype=torch.bfloat16"),
        (lambda: model(given, attention_mask=torch.ones(2, 4), cache=cache), "attention_mask and cache"),
    ):
        with pytest.raises(ValueError, match=words), torch.inference_mode():
            call()
    with torch.inference_mode(), autocast:
        assert model(given, cache=narrow).isfinite().all()
    for learns in (True, False):  # the norms still learn
        model.embed_tokens.requires_grad_(learns)
        with pytest.raises(ValueError, match="a cache has no gradients"):
            model(given, cache=cache)
    assert all(layer.abs().sum() == 0 for layer in cache.layers)


LAYOUT = (
    "view", "_unsafe_view", "t", "transpose", "slice", "select", "unsqueeze", "detach", "empty_like", "new_empty",
)  # fmt: skip


def small(batch: int, tokens: int, **options: Any) -> tuple[LLM, Tensor]:
    """A model of one layer, and what its layer gets."""
    model = zoo.create("llm-debug", head_dim=32, num_hidden_layers=1, dtype=torch.bfloat16, **options)
    return model, torch.randn(batch, tokens, model.config.hidden_size, dtype=torch.bfloat16)


def traced(monkeypatch: pytest.MonkeyPatch, *call: Any) -> list[list[str]]:
    """The nodes that compute something, of each graph that a call is compiled to; none is for Inductor."""

    def look(graph: torch.fx.GraphModule) -> None:
        assert has_nothing_to_fuse(graph)

    views = {f"aten.{name}.default" for name in LAYOUT} | {"aten.transpose.int", "aten.slice.Tensor", "aten.select.int"}
    graphs = fake_gpu.traced(monkeypatch, *call, look=look)
    return [sorted(node for node in graph if "getitem" not in node and node not in views) for graph in graphs]


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
@pytest.mark.parametrize("from_start", [False, True])
def test_a_prompt_is_one_graph_of_kernels_and_products(from_start, weight_dtype, gpu, monkeypatch) -> None:
    model, x = small(2, 5, weight_dtype=weight_dtype)
    positions, cache = torch.arange(5).repeat(2, 1), model.make_cache(2, 8).layers[0]
    call = model.layers[0], x, model.rotary(positions), None, positions, cache, from_start
    with torch.inference_mode():
        (graph,) = traced(monkeypatch, *call)
    library = ["aten._scaled_dot_product_flash_attention_for_cpu.default"] if from_start else []
    # Norm, rotation into the cache, attention, add with norm, gate; and the weight of each product, if it is quantized.
    kernels = [fake_gpu.LAUNCH] * ((4 if from_start else 5) + (4 if weight_dtype else 0))
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
        where = torch.arange(len(x))[:, None] % 16
        return model.layers[0](x, model.rotary(where), positions=where, cache=cache)

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
        "a step": (torch.no_grad()(step), (model, x, model.make_cache(2, 128).layers[0])),
        "a step of many": (torch.no_grad()(step), (*small(17, 1), small(17, 1)[0].make_cache(17, 16).layers[0])),
        "head": (torch.no_grad()(lambda model, x: model.head(x, model.output_weight)), (model, x[:1])),
        "sum": (add_up, (torch.randn(3, 100),)),
        "dequantized": (dequantized, (torch.ones(4, 8, dtype=torch.int8), torch.ones(4))),
        "choice": (lambda: (accept(state, torch.randn(2, 9), greedy=True), state.tokens), ()),
    }


@pytest.mark.parametrize(("processes", "weight_dtype"), [(1, None), (2, None), (1, "int8"), (1, "float8_e4m3fn")])
def test_a_step_of_few_rows_is_kernels_alone(processes, weight_dtype, gpu, monkeypatch) -> None:
    model, x = small(2, 1, weight_dtype=weight_dtype)
    memory = shared(32 * x.shape[-1], x.dtype)
    for name in ("o_proj", "down_proj") if processes > 1 else ():
        layer: Any = model.layers[0].get_submodule(name)
        layer.__class__, layer.split_over, layer.is_first, layer.shared = RowLinear, None, True, memory
    positions, cache = torch.tensor([[3], [4]]), model.make_cache(2, 128).layers[0]
    with torch.inference_mode():
        (layer,) = traced(monkeypatch, model.layers[0], x, model.rotary(positions), None, positions, cache)
        (head,) = traced(monkeypatch, model.head, x, *weight_of(model.embed_tokens))
    # Attention over more than 64 slots ends in a kernel that merges. Functionalization puts what a kernel writes into
    # the cache. Sums of two processes are kernels too.
    assert layer.count(fake_gpu.LAUNCH) == (8 if processes == 1 else 8 + 2) and head.count(fake_gpu.LAUNCH) == 2
    assert {each.partition(".")[0] for each in layer + head} <= {fake_gpu.LAUNCH, "aten"}


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


def test_unsupported_norms_rounded_weights_many_rows_and_gradients_run_without_kernels(gpu: Any) -> None:
    x, weight = torch.randn(2, 3, 8), torch.ones(8)
    rms_norm(x, weight, 1e-6), add_rms_norm(x, x, weight, 1e-6)
    assert gpu.launches == ["_norm"] * 2
    rms_norm(x.double(), weight.double(), 1e-6), rms_norm(x.bfloat16(), weight, 1e-6)
    add_rms_norm(x, x.bfloat16(), weight, 1e-6), add_rms_norm(x, x[:1], weight, 1e-6)
    rms_norm(torch.randn(1, WIDEST_RMS_NORM + 1), torch.ones(WIDEST_RMS_NORM + 1), 1e-6)
    with pytest.raises(RuntimeError, match="must match the size"):
        rms_norm(x, weight[:4], 1e-6)
    assert len(gpu.launches) == 2
    weight, scale, numbers = torch.randn(4, 8), torch.ones(4), torch.ones(4, 8, dtype=torch.int8)
    half, x = weight.half(), torch.randn(attention.MOST_QUANTIZED_ROWS + 1, 8).half()
    assert few_rows(x[: attention.MOST_ROWS], (half, None)) and not few_rows(x[: attention.MOST_ROWS + 1], (half, None))
    assert few_rows(x[:-1], (numbers, scale.half())) and not few_rows(x, (numbers, scale.half()))
    assert not few_rows(x[:2].float(), (weight, None)) and not few_rows(x[:2].float(), (numbers, scale))
    x = x[:1].float()
    with torch.autocast("cpu", torch.bfloat16):  # whose products are in half precision
        assert not few_rows(x, (weight, None)) and few_rows(x.bfloat16(), (weight.bfloat16(), None))
    assert not few_rows(x.bfloat16(), (weight, None)) and not few_rows(x, (weight.requires_grad_(), None))
    with torch.no_grad():
        assert few_rows(x, (weight, None))
    assert attention.heads_fit(64) and not attention.heads_fit(80) and not attention.heads_fit(16)


@pytest.mark.parametrize(("capability", "launched"), [((8, 6), []), ((8, 9), ["_dequantize"])])
def test_float8_is_read_by_kernels_where_triton_converts_it(capability, launched, gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "converts_float8", lambda _: converts_float8(SimpleNamespace(type="cuda")))
    weight, x = torch.randn(4, 8).half(), torch.randn(1, 8).half()
    numbers, scale = quantized(weight, torch.float8_e4m3fn)
    assert few_rows(x, (numbers, scale)) == bool(launched)
    dequantized(numbers, scale)
    assert gpu.launches == launched
    assert few_rows(x, quantized(weight, torch.int8))


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False, "qkv_bias": True, "qk_norm": False}], ids=str)
@pytest.mark.parametrize("weight_dtype", ["int8", "float8_e4m3fn"])
def test_a_quantized_model_is_saved_loaded_and_near_the_original(weight_dtype, options, tmp_path) -> None:
    model = zoo.create("llm-debug", **options).eval()
    given = {"input_ids": ids(2, 9)}
    bytes_before = sum(each.nbytes for each in model.parameters())
    with torch.inference_mode():
        exact = model(**given)
        assert zoo.llm.quantize(model, weight_dtype) is model
        logits = model(**given)
        # int8 has about seven bits, float8_e4m3fn four.
        assert (logits - exact).norm() < exact.norm() * (0.02 if weight_dtype == "int8" else 0.1)
        assert sum(each.nbytes for each in model.parameters()) < 0.35 * bytes_before
        zoo.llm.save(model, tmp_path, max_shard_size="30KB")
        for again in (zoo.llm.load(tmp_path), zoo.create("llm-debug", weights=tmp_path, **options).eval()):
            assert torch.equal(again(**given), logits) and again.config == model.config
        low = zoo.llm.load(tmp_path, dtype=torch.bfloat16)
        assert low(**given).dtype == torch.bfloat16
        torch.testing.assert_close(low(**given).float(), logits, rtol=0.05, atol=0.05)
        assert torch.equal(again.to(torch.bfloat16)(**given), low(**given))
    zoo.compile_regions(model, backend="aot_eager")
    with zoo.enforce_budget(model):  # with gradients on, which nothing has
        torch.testing.assert_close(model(**given), logits)
        again = zoo.llm.load(tmp_path).generate(given["input_ids"], max_new_tokens=5)
        assert torch.equal(model.generate(given["input_ids"], max_new_tokens=5), again)
    with pytest.raises(ValueError, match="does not recognize this architecture"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    other = "float8_e4m3fn" if weight_dtype == "int8" else "int8"
    for wrong in (other, None):
        with pytest.raises(ValueError, match=f"weight_dtype|for torch.{other}"):
            zoo.llm.load(tmp_path, weight_dtype=wrong)


def test_what_cannot_be_quantized_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    model = zoo.create("llm-debug")
    with pytest.raises(TypeError, match=r"model is a Linear, expected a language model of the zoo"):
        zoo.llm.quantize(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_dtype is 'int4', expected 'int8' or 'float8_e4m3fn'"):
        zoo.llm.quantize(model, "int4")
    for name in ("layers.1.o_proj", "embed_tokens"):
        handle = model.get_submodule(name).register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=f"{re.escape(name)} is a .* that was changed"):
            zoo.llm.quantize(model)
        handle.remove()
    zoo.compile_regions(model)
    with pytest.raises(ValueError, match=r"compiled or captured: .* call zoo\.uncompile\(model\) first"):
        zoo.llm.quantize(model)
    zoo.uncompile(model)
    zoo.llm.save(model, tmp_path)
    said = r"weight_dtype is 'int8', but the weights are not quantized: .* zoo\.llm\.quantize"
    with pytest.raises(ValueError, match=said):
        zoo.llm.load(tmp_path, weight_dtype="int8")
    assert all(type(layer.down_proj) is nn.Linear for layer in model.layers) and model.config.weight_dtype is None
    zoo.llm.quantize(model)
    with pytest.raises(ValueError, match="weights are int8 already"):
        zoo.llm.quantize(model, "float8_e4m3fn")
    with pytest.raises(ValueError, match="transformers' classes have no weight_dtype='int8'"):
        zoo.to_upstream(model)


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


def test_only_a_plain_linear_layer_is_added_in_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products = noted(monkeypatch, torch, "addmm")
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


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [40, 41, 42]]


def theirs_says(theirs: Any, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    with torch.no_grad():
        whole = theirs.generate(input_ids=ids, attention_mask=mask, do_sample=False, **options)
    return whole[:, longest:]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", ["llama-tied-llama3", "mistral-window", "qwen2", "qwen3"])
def test_greedy_is_transformers_greedy_token_for_token(kind: str, captured: bool) -> None:
    theirs = reference.make(kind)
    expected = theirs_says(theirs, PROMPTS, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
    got = zoo.from_upstream(theirs).generate(PROMPTS, max_new_tokens=24, cuda_graph=captured, stride=5)
    assert expected.shape == (3, 24) and expected.unique().numel() > 5
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_rows_end_as_in_transformers(stride: int) -> None:
    theirs = reference.make("llama")
    free = theirs_says(theirs, PROMPTS, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    # Tokens that end the rows at different places, all before the limit.
    ends = sorted({int(free[0, 3]), int(free[1, 9]), int(free[2, 6])})
    expected = theirs_says(theirs, PROMPTS, max_new_tokens=20, eos_token_id=ends, pad_token_id=95)
    assert 1 < expected.shape[1] < 20 and (expected == 95).any()
    model = zoo.from_upstream(reference.make("llama", pad_token_id=95))
    model.load_state_dict(zoo.from_upstream(theirs).state_dict())
    for captured in (False, True):
        got = model.generate(PROMPTS, max_new_tokens=20, eos=ends, stride=stride, cuda_graph=captured)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    chunks = list(model.stream(PROMPTS, max_new_tokens=20, eos=ends, stride=stride))
    widths = [chunk.shape[1] for chunk in chunks]
    assert widths[0] == 1 and set(widths[1:-1]) <= {stride} and 1 <= widths[-1] <= stride
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=0, atol=0)


GREEDY = ({"temperature": 1e-4}, {"temperature": 5.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6})
SAME = [*({"buckets": each} for each in ((4,), (1, 3, 64), (128,))), *({**each, "seed": 3} for each in GREEDY)]


def test_the_configs_end_tokens_are_the_default() -> None:
    theirs = reference.make("llama")
    free = zoo.from_upstream(theirs).generate([[5, 6]], max_new_tokens=12)
    theirs.config.eos_token_id = int(free[0, 5])
    model = zoo.from_upstream(theirs)
    first = free[0].tolist().index(int(free[0, 5]))
    assert model.generate([[5, 6]], max_new_tokens=12).shape == (1, first + 1)
    assert model.generate([[5, 6]], max_new_tokens=12, eos=()).shape == (1, 12)


@pytest.mark.parametrize("options", SAME, ids=str)
def test_what_does_not_change_the_answer(model: LLM, options: dict[str, Any]) -> None:
    expected = model.generate(PROMPTS, max_new_tokens=8)
    torch.testing.assert_close(model.generate(PROMPTS, max_new_tokens=8, **options), expected, rtol=0, atol=0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_turns_and_prompts_of_any_length_recompile_nothing(captured: bool) -> None:
    model = zoo.compile_regions(zoo.create("llm-debug"), backend="aot_eager")
    eager = zoo.create("llm-debug")
    eager.load_state_dict(model.state_dict())
    session = Session(model, 2, 128, buckets=(16,), cuda_graph=captured)
    with zoo.enforce_budget(model):
        for seed in range(3):
            session.reset()
            texts: list[list[int]] = [[], []]
            for turn, settings in enumerate([{}, {"temperature": 0.8, "seed": seed, "top_k": 9, "top_p": 0.5}, {}]):
                prompt = [[seed, turn, 5][: 1 + turn], [7] * (3 + 5 * seed)]
                answer = session.generate(prompt, max_new_tokens=6 + turn, **settings)
                texts = [text + row for text, row in zip(texts, prompt, strict=True)]
                if "temperature" not in settings:
                    # What a model that starts over says to the whole text.
                    expected = eager.generate(texts, max_new_tokens=6 + turn)
                    torch.testing.assert_close(answer, expected, rtol=0, atol=0)
                texts = [text + row for text, row in zip(texts, answer.tolist(), strict=True)]
    assert graphs_of(model) == {"LLMHead": 1, "LLMLayer": 2}


def test_a_row_that_ends_early_goes_on_from_its_end(model: LLM) -> None:
    free = model.generate(PROMPTS, max_new_tokens=10)
    end = int(free[0, 2])
    session = Session(model, 3, 64)
    first = session.generate(PROMPTS, max_new_tokens=10, eos=end)
    texts = []
    for prompt, row in zip(PROMPTS, first.tolist(), strict=True):
        answer = row[: row.index(end) + 1] if end in row else row
        texts.append(prompt + answer + [1, 2])
    assert len({len(text) for text in texts}) > 1
    second = session.generate([[1, 2]] * 3, max_new_tokens=7, eos=())
    torch.testing.assert_close(second, model.generate(texts, max_new_tokens=7, eos=()), rtol=0, atol=0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_leaving_a_stream_early_cuts_the_answer_there(model: LLM, captured: bool) -> None:
    session = Session(model, 1, 64, cuda_graph=captured)
    answer: list[int] = []
    for chunk in session.stream([[4, 5]], max_new_tokens=30, stride=3):
        answer += chunk[0].tolist()
        if len(answer) >= 4:
            break
    assert len(answer) == 4 and session.lengths == [5]
    second = session.generate([[8]], max_new_tokens=5)
    torch.testing.assert_close(second, model.generate([[4, 5, *answer, 8]], max_new_tokens=5), rtol=0, atol=0)


def test_a_session_captures_again_after_weights_have_moved() -> None:
    model: Any = zoo.create("llm-debug").eval()
    session = Session(model, 1, 64, cuda_graph=True)
    options: dict[str, Any] = {"max_new_tokens": 4, "eos": ()}
    session.generate([[1, 2]], **options)
    model.load_state_dict({name: 2 * each for name, each in model.state_dict().items()}, assign=True)
    session.reset()
    with pytest.raises(WeightsMovedError, match="next answer captures again"):
        session.generate([[1, 2]], **options)
    session.reset()
    expected = Session(model, 1, 64, cuda_graph=False).generate([[1, 2]], **options)
    assert torch.equal(session.generate([[1, 2]], **options), expected)


def test_a_session_has_one_stream_at_a_time_and_texts_must_fit_into_it(model: LLM) -> None:
    session = Session(model, 1, 64)
    first = session.stream([[4, 5]], max_new_tokens=30, stride=3)
    next(first)
    session.reset()
    with pytest.raises(RuntimeError, match="cannot continue"):
        next(first)
    late = session.stream([[4, 5]], max_new_tokens=3)
    session.generate([[4]], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="cannot continue"):
        next(late)
    session = Session(model, 2, 16)
    with pytest.raises(ValueError, match="tokens has 3 rows, but the cache 2"):
        session.generate(PROMPTS, max_new_tokens=3)
    session.generate([[1, 2], [3]], max_new_tokens=8)
    with pytest.raises(ValueError, match="row 0 has 11 tokens and max_new_tokens is 6, but the cache has 16"):
        session.generate([[1], [1]], max_new_tokens=6)
    session.generate([[1], [1]], max_new_tokens=5)
    with pytest.raises(TypeError, match="model is a Linear"):
        Session(torch.nn.Linear(1, 1), 1, 1)


def test_draws_follow_the_seed_and_leave_the_global_state_alone(model: LLM) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5, "top_k": 50, "top_p": 0.95}
    before = torch.get_rng_state()
    first = model.generate(PROMPTS, seed=1, **settings)
    torch.manual_seed(99)
    torch.testing.assert_close(model.generate(PROMPTS, seed=1, **settings), first, rtol=0, atol=0)
    torch.testing.assert_close(model.generate(PROMPTS, seed=1, cuda_graph=True, **settings), first, rtol=0, atol=0)
    assert not torch.equal(model.generate(PROMPTS, seed=2, **settings), first)
    torch.set_rng_state(before)
    assert not torch.equal(model.generate(PROMPTS, **settings), model.generate(PROMPTS, **settings))
    assert torch.equal(torch.get_rng_state(), before)


def draws(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, count: int = 20000) -> torch.Tensor:
    uniform = (torch.arange(count) + 0.5) / count
    scalars = torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p)
    return torch.bincount(sample(logits.expand(count, -1), *scalars, uniform), minlength=logits.numel()) / count


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 50, 2.0), (0.5, 50, 2.0), (2.0, 7, 2.0), (1.0, 50, 0.6), (1.3, 9, 0.7)]
)
def test_draws_have_the_distribution_of_transformers_processors(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    logits = torch.randn(1, 50) * 2
    processors = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(min(top_p, 1.0))]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    expected = LogitsProcessorList(processors)(ids, logits.clone()).softmax(-1)[0]
    got = draws(logits, temperature, top_k, top_p)
    assert ((got > 0) <= (expected > 0)).all()
    # Evenly spread numbers give every token its share, but for the rounding at its two ends.
    torch.testing.assert_close(got, expected, rtol=0, atol=1.5e-4)


@pytest.mark.parametrize("uniform", [1 - 2**-24, 1 - 2**-26], ids=["largest", "rounded to one"])
def test_the_largest_uniform_number_stays_among_the_kept(uniform: float) -> None:
    logits = torch.tensor([[0.0, 3.0, -50.0, 2.0]])
    most = torch.tensor([uniform])
    scalars = torch.tensor(1.0), torch.tensor(2), torch.tensor(2.0)
    assert int(sample(logits, *scalars, most)) == 3
    assert 0 <= int(sample(logits * math.nan, *scalars, most)) < 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tokens": []}, ValueError, "no rows"),
        ({"tokens": [[1], []]}, ValueError, "row 1 of tokens is empty"),
        ({"tokens": [[1, 256]]}, ValueError, "row 0 of tokens holds 256, expected integers from 0 to 255"),
        ({"tokens": [[-1]]}, ValueError, "holds -1"),
        ({"tokens": [1, 2]}, TypeError, "row 0 of tokens is a int"),
        ({"tokens": [[1.5]]}, ValueError, "holds 1.5, expected integers"),
        ({"tokens": "hello"}, TypeError, "tokens is a str"),
        ({"tokens": torch.ones(2, 3)}, TypeError, "tokens is torch.float32"),
        ({"tokens": torch.ones(3, dtype=torch.int64)}, ValueError, r"tokens has shape \[3\]"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"temperature": -0.1}, ValueError, "temperature is -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature is nan"),
        ({"temperature": 1e-40}, ValueError, "temperature is 1e-40, expected 0 for greedy, or a number from 1e-6"),
        ({"eos": 2.0}, ValueError, "eos is 2.0, expected token ids"),
        ({"buckets": 16}, ValueError, "buckets is 16, expected a list"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"top_p": 0.0}, ValueError, "top_p is 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p is 1.1"),
        ({"top_k": 5}, ValueError, "top_k is 5, but temperature 0 does not sample: give one"),
        ({"eos": 256}, ValueError, "eos is 256"),
        ({"eos": list(range(17))}, ValueError, "eos has 17 tokens"),
        ({"stride": 0}, ValueError, "stride is 0"),
        ({"buckets": ()}, ValueError, "buckets is"),
        ({"max_length": 6}, TypeError, "max_length"),
        ({"seed": "a"}, TypeError, "seed is 'a', expected an integer"),
    ],
)
def test_bad_calls_are_named_before_anything_runs(model, options, error, words):
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    call = {"tokens": [[1, 2]], "max_new_tokens": 4, **options}
    with pytest.raises(error, match=words):
        model.generate(**call)
    with pytest.raises(error, match=words):
        # Not only when the first chunk is asked for.
        model.stream(**call)
