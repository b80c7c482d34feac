"""How often a model that the zoo did not write is compiled: other layers, tokens, sizes and rates."""

import contextlib
import copy
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import compile_regions as accelerate_regions
from torch import Tensor, nn
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils import _pytree as pytree
from torchvision.ops import StochasticDepth

import zoo
from benchmarks.conformance import MODELS
from tests.blocks import Asserting, Block, Sequence, Wired, graphs_of, same_gradients
from zoo.engine.compile import plan_of
from zoo.engine.graph_log import GRAPH_LOG
from zoo.training import checkpoint_regions


def compiled(model: nn.Module, **kwargs: Any) -> nn.Module:
    torch.compiler.reset()  # what another test compiled is not counted here
    return zoo.compile_regions(model, **{"backend": "eager", **kwargs})


def as_uncompiled(model: nn.Module, *given: Any, graphs: dict[str, int], budget: bool = True, **options: Any) -> None:
    """Compiled, a model computes what it did, call by call, with so many graphs, in some cases beyond its budget."""
    with torch.no_grad():
        expected = model(*given)
        compiled(model, **options)
        with zoo.enforce_budget(model) if budget else contextlib.nullcontext():
            for _ in range(2):
                torch.testing.assert_close(model(*given), expected)
    assert graphs_of(model) == graphs


ACTIVATION, LISTED, TABLE = F.gelu, [torch.sigmoid], {"act": F.silu}
HOLDER, KIND, LIBRARY = types.SimpleNamespace(act=torch.tanh), nn.GELU, F


class Activates(Wired):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        chosen = x if KIND is nn.GELU else -x
        return ACTIVATION(x) + LISTED[0](x) + TABLE["act"](x) + HOLDER.act(x) + LIBRARY.softplus(chosen)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["ACTIVATION", "own ACTIVATION", "LISTED", "TABLE", "HOLDER", "KIND", "LIBRARY"])
def test_a_name_that_held_a_function_of_torch_may_hold_another(name: str, backend: str, monkeypatch) -> None:
    model, x = nn.Sequential(Activates(8), Activates(8)).eval(), torch.randn(3, 8)
    eager = copy.deepcopy(model)
    compiled(model, backend=backend)
    new = {
        "ACTIVATION": F.relu, "own ACTIVATION": lambda x: 3 * x, "LISTED": [torch.cos], "TABLE": {"act": F.relu},
        "HOLDER": types.SimpleNamespace(act=torch.sin), "KIND": nn.ReLU,
        "LIBRARY": types.SimpleNamespace(softplus=torch.sin),
    }  # fmt: skip
    with torch.no_grad():
        before = model(x)
        monkeypatch.setitem(globals(), name.split()[-1], new[name])
        torch.testing.assert_close(model(x), eager(x))
    assert not torch.allclose(before, model(x))


def generate(model: nn.Module, tokens: int = 6, **kwargs: Any) -> Tensor:
    ids = torch.arange(3, 3 + 2 * tokens).view(2, tokens)
    how = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "disable_compile": True, **kwargs}
    with torch.no_grad():
        return model.generate(ids, **how)


@pytest.mark.filterwarnings("ignore:.*became symbolic:zoo.RegionWarning")
@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        ("Llama", {}, 3),
        ("Llama", {"cache_implementation": "static"}, 2),
        ("Llama", {"num_beams": 2}, 3),
        # An encoder and a decoder, and in each a first block with the position bias.
        ("T5", {}, 2 * (1 + 3)),
        ("T5", {"cache_implementation": "static"}, 2 * (1 + 2)),
    ],
)
@pytest.mark.slow
def test_generation_costs_no_graph_for_a_layer_or_a_token(name: str, how: dict[str, Any], expected: int) -> None:
    model = MODELS[f"transformers {name}"].make().eval()
    tokens = generate(model, **how)
    compiled(model)
    with zoo.enforce_budget(model):
        assert torch.equal(generate(model, **how), tokens)
        assert sum(graphs_of(model).values()) == expected
        assert torch.equal(generate(model, **how), tokens)
    assert sum(graphs_of(model).values()) == expected


def test_sizes_that_vary_turn_symbolic_once_also_of_layers_that_were_dropped_before() -> None:
    model = compiled(Dropping(nn.Linear(4, 4), *(Block(4) for _ in range(5))), regions=[Block])
    with warnings.catch_warnings(), zoo.enforce_budget(model):
        warnings.simplefilter("ignore", zoo.RegionWarning)
        for rows, model.dropped in ((3, (2, 4)), (5, (1, 3)), (7, (1, 2)), (9, ())):
            model(torch.randn(rows, 4)).sum().backward()
    assert graphs_of(model) == {"Block": 2}


class Overwriting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class FromView(Sequence):
    """Its first block is given a view, which is read again after it, perhaps with what the block wrote."""

    def forward(self, x: Tensor) -> Tensor:
        stem, *blocks = self.blocks
        first = x = stem(x).view(-1, 4)
        for block in blocks:
            x = block(x)
        return x + first.square()


SYMBOLIC = r"blocks\.1 \(\w+\): x\.shape\[0\] differed .*dynamic=False"


@pytest.mark.parametrize("training", [False, True], ids=["no gradients", "training"])
@pytest.mark.parametrize("block", [Block, Overwriting])
@pytest.mark.parametrize(("backend", "dynamic"), [("eager", None), ("aot_eager", None), ("aot_eager", True)])
def test_sizes_that_vary_are_a_graph_for_views_and_others_alike(block, backend, dynamic, training):
    model = FromView(nn.Linear(4, 8), *(block(4) for _ in range(3)))
    reference = copy.deepcopy(model)
    compiled(model, backend=backend, dynamic=dynamic)
    warned = contextlib.nullcontext() if dynamic else pytest.warns(zoo.RegionWarning, match=SYMBOLIC)
    with warned, torch.set_grad_enabled(training):
        for rows in (3, 5, 7):
            x = torch.randn(rows, 4)
            ours, theirs = model(x), reference(x)
            torch.testing.assert_close(ours, theirs)
            if training:
                (ours.sum() + theirs.sum()).backward()
    if training:
        same_gradients(model, reference, rtol=1e-4, atol=1e-4)
    assert sum(graphs_of(model).values()) == (1 if dynamic else 2)


@pytest.mark.parametrize("embedded", [False, True], ids=["of the region's input", "of the model's own input"])
@pytest.mark.parametrize(("mark", "needed"), [(torch._dynamo.mark_dynamic, 1), (torch._dynamo.mark_static, 3)])
def test_a_marked_size_is_what_its_mark_says(mark: Callable[..., None], needed: int, embedded: bool) -> None:
    model = compiled(Sequence(*[nn.Embedding(50, 4)] * embedded, Block(4), Block(4)), regions=[Block])
    with torch.no_grad():
        for size in (6, 5, 9):
            x = torch.arange(2 * size).view(2, size) if embedded else torch.randn(size, 4)
            mark(x, int(embedded))
            model(x)
    assert sum(graphs_of(model).values()) == needed


class Rated(Wired):
    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x + self.linear(x)
        return x + self.linear(x) / (1 - self.rate) * (torch.rand(x.shape[0], 1) + (1 - self.rate)).floor()


@pytest.mark.parametrize(("training", "expected"), [(False, 2), (True, 2)], ids=["eval", "train"])
def test_rates_that_differ_are_a_symbol(training: bool, expected: int) -> None:
    model = Sequence(nn.Linear(4, 4), *(Rated(rate=rate / 10) for rate in range(6))).train(training)
    reference, x = copy.deepcopy(model), torch.randn(3, 4)
    assert zoo.find_regions(model, args=(x,)).graphs == "at least 1"
    compiled(model)
    for each, held in ((reference, contextlib.nullcontext()), (model, zoo.enforce_budget(model))):
        torch.manual_seed(0)
        with held:
            each(x).square().sum().backward()
    same_gradients(model, reference)
    assert sum(graphs_of(model).values()) == expected  # a rate of zero is code of its own
    model.blocks[3].rate = 0.9
    reference.blocks[3].rate = 0.9
    torch.manual_seed(0)
    theirs = reference(x)
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), theirs)


class Numbered(Block):
    def forward(self, x: Tensor, place: int, *, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale + place


class Numbering(Sequence):
    """Numbers its blocks, or tells them how many rows there are: of the later ones half as many."""

    def forward(self, x: Tensor, rows: bool) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = x[: len(x) // 2] if rows and place == 3 else x
            x = block(x, len(x)) if rows else block(x, place, scale=0.1 + place)
        return x


@pytest.mark.parametrize(("rows", "said", "symbols"), [(False, "at least 2", {"place", "scale"}), (True, "2", set())])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_that_a_model_gives_its_blocks_are_symbols_but_sizes_are_not(rows, said, symbols, backend):
    model, x = Numbering(*(Numbered(4) for _ in range(6))).eval(), torch.randn(4, 4)
    with torch.no_grad():
        report = zoo.find_regions(model, args=(x, rows))
    assert report.graphs == said and ("differs: inputs[1]: 0 / other numbers" in str(report)) is not rows
    as_uncompiled(model, x, rows, graphs={"Numbered": 2}, backend=backend)  # the first block's numbers are constants
    assert set().union(*(entry.varied for entry in GRAPH_LOG.of(plan_of(model).log_id))) == symbols


@pytest.mark.parametrize(("training", "mode", "said", "graphs"), [
    (False, torch.no_grad, "1", 1), (False, torch.enable_grad, "at least 1", 2), (True, torch.enable_grad, "2", 2),
])  # fmt: skip
def test_an_input_of_the_models_own_has_no_gradient_where_those_of_later_blocks_do(training, mode, said, graphs):
    model, x = Sequence(*(Block(4) for _ in range(3))).train(training), torch.randn(2, 4)
    with mode():
        assert zoo.find_regions(model, args=(x,)).graphs == said
        compiled(model)(x)
    assert graphs_of(model) == {"Block": graphs}


class Bounded(Rated):
    """Computes with its float, and needs it as a number too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.where(y > self.rate, y, self.rate) * self.rate + y.clamp(max=self.rate)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_float_that_is_needed_as_a_number_is_no_other_blocks(backend: str) -> None:
    model, x = Sequence(*(Bounded(rate=rate) for rate in (0.25, 0.5, 1.0))).eval(), torch.randn(4, 4)
    report = zoo.find_regions(model, args=(x,))
    (obstacle,) = report.obstacles
    assert report.graphs == "at least 1" and "rate (0.25, 0.5, 1.0) is given to clamp" in str(obstacle)
    assert not zoo.find_regions(Sequence(*(Rated(rate=rate) for rate in (0.25, 0.5, 1.0))), args=(x,)).obstacles
    as_uncompiled(model, x, graphs={"Bounded": 1 if backend == "eager" else 3}, budget=False, backend=backend)


class Dropped(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.depth(self.linear(x).abs() + 1)


@pytest.mark.filterwarnings("ignore:.*blocks of one structure:zoo.RegionWarning")  # of 2.11
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_stochastic_depth_in_training_is_a_graph_for_all_rates(backend: str) -> None:
    rates = [0.0, 0.1, 0.3, 0.7, 1.0]
    model = nn.ModuleList(Dropped(depth=StochasticDepth(rate, "row")) for rate in rates)
    report = zoo.find_regions(model, [Dropped])
    compiled(model, regions=[Dropped], backend=backend)
    x = torch.randn(4096, 4)
    for block, rate in zip(model, rates, strict=True):
        y = block(x)
        kept = (y != 0).any(1)
        assert kept.float().mean().item() == pytest.approx(1 - rate, abs=0.05)
        torch.testing.assert_close(y[kept], (block.linear(x).abs() + 1)[kept] / (1 - rate))
        y.sum().backward()
    assert report.graphs == "at least 1" and not report.regions[0].differences
    (obstacle,) = report.obstacles
    assert "depth.p is 0.0 in 0 and not in others" in str(obstacle) and "expect 1 graph(s) more" in str(obstacle)
    assert not zoo.find_regions(model.eval(), [Dropped]).obstacles
    # At a rate of zero the code leaves it out, at one it divides by nothing. AOTAutograd of 2.11 takes 1 - rate for a
    # constant.
    assert sum(graphs_of(model).values()) == (3 if backend == "eager" or torch.__version__ >= "2.12" else len(rates))


def test_a_layer_that_training_drops_was_not_bypassed() -> None:
    model, x = Dropping(*(Block(4) for _ in range(4))), torch.randn(2, 4)
    model.dropped = (1, 3)
    compiled(model, kwargs={"x": x})
    with zoo.enforce_budget(model):
        model(x)
    with zoo.enforce_budget(model):
        model.blocks[1](x)
        model(x)
    model.eval()
    with pytest.raises(zoo.BudgetError, match=r"blocks\.3.*never ran"), zoo.enforce_budget(model):
        model.blocks[0](x)


class Dropping(Sequence):
    dropped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index in self.dropped else block(x)
        return x


def collect(place: int, held: Any, y: Tensor) -> Tensor:
    if isinstance(held, dict):
        held[place] = y.detach()
    return y


def oldest(place: int, held: Any, y: Tensor) -> Tensor:
    first = next(iter(held), None)
    y = y if first is None else y + held[first]
    held[place] = y
    return y


def mapped(place: int, held: Any, y: Tensor) -> Tensor:
    return pytree.tree_map(lambda each: each * 2, held)[place] + y


def shorten(held: list[Any], y: Tensor) -> None:
    del held[0]
    held.pop()


def replace(held: list[Any], y: Tensor) -> None:
    held[:] = [each + 1 for each in held]


def empty(held: list[Any], y: Tensor) -> None:
    held.clear()
    held += [y, y + 1, y + 2, y + 3, y + 4]


class Holding(Wired):
    """Does with a list or dict of the caller's what code of one's own may do."""

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return self.use(self.place, held, self.linear(x))


class Moving(Holding):
    """Moves items of the caller's list before it picks one."""

    def forward(self, x: Tensor, held: list[Any]) -> Tensor:
        y = self.linear(x)
        self.use(held, y)
        return y + held[self.place] if self.place < len(held) else y


SORT = lambda held, y: held.sort(reverse=True)  # noqa: E731
MOVES = [lambda held, y: held.insert(0, y), lambda held, y: held.reverse(), SORT, shorten, replace, empty]


@pytest.mark.filterwarnings("ignore:.*cannot be symbols:zoo.RegionWarning")
@pytest.mark.parametrize(
    ("block", "use"), [(Holding, collect), (Holding, oldest), (Holding, mapped), *((Moving, use) for use in MOVES)]
)
def test_a_block_sees_the_callers_list_or_dict_as_it_is(block: type[Holding], use: Any) -> None:
    eager = Sequence(*(block(place=place, use=use) for place in range(4)))
    model = compiled(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    item = 1.0 if use is SORT else torch.ones(2, 4)
    with torch.no_grad():
        for count in (9, 12):
            ours, theirs = ({} if use in (collect, oldest) else [item * k for k in range(count)] for _ in "ab")
            for times in (1, 2):
                if use is not shorten or times == 1:
                    torch.testing.assert_close(model(x * times, ours), eager(x * times, theirs))
            assert type(ours) is type(theirs)
            torch.testing.assert_close(ours, theirs)
            assert list(ours) == list(theirs) if isinstance(ours, dict) else len(ours) == len(theirs)


class Attends(Wired):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x) @ y.mT).softmax(-1) @ y


class Twice(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x, x) if place % 2 else block(x.cos(), x)
        return x


def test_one_tensor_as_two_inputs_is_a_graph_of_its_own_and_announced() -> None:
    model, x = Twice(*(Attends() for _ in range(4))), torch.randn(2, 5, 4)
    with torch.no_grad():
        found = zoo.find_regions(model, args=(x,))
    assert found.graphs_needed == 2 and "inputs[1]: in some calls the tensor that is inputs[0] too" in str(found)
    as_uncompiled(model, x, graphs={"Attends": 2})


class Adds(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.linear(x))


class Views(Sequence):
    """Its blocks are given a view of what its first layer returns."""

    def forward(self, x: Tensor) -> Tensor:
        first, *blocks = self.blocks
        x = first(x)
        y = x.transpose(0, 1)
        for block in blocks:
            y = block(y)
        return y.sin().sum() + x.cos().sum()


def test_writes_of_several_blocks_to_a_view_reach_its_base() -> None:
    eager = Views(nn.Linear(4, 4), *(Adds() for _ in range(3)))
    model = compiled(copy.deepcopy(eager), backend="aot_eager")
    x = torch.randn(3, 5, 4)
    for each in (eager, model):
        each(x).backward()
    same_gradients(model, eager)


class Slot:
    def __init__(self) -> None:
        self.held = torch.ones(2, 4)


class Cache:
    def __init__(self) -> None:
        self.tables = [Slot() for _ in range(5)]
        self.seen: dict[int, bool] = {}


class Picking(Wired):
    """Reads and writes what is its own in the cache, and branches on its place where asked to."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        own = cache.tables[self.place]
        y = self.linear(x) + own.held
        if cache.seen.get(self.place) and self.branch and self.place % 2:
            y = -y
        own.held = torch.cat([own.held, y])[2:]
        cache.seen[self.place] = True
        return y + cache.tables[-1].held.mean() + len(cache.tables)


@pytest.mark.parametrize(("branch", "expected"), [(False, 2 + 2), (True, 2 + 3)])
def test_a_cache_that_each_block_picks_from(branch: bool, expected: int) -> None:
    model = Sequence(*(Picking(place=place, branch=branch) for place in range(5)))
    reference = copy.deepcopy(model)
    compiled(model)
    caches = Cache(), Cache()
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            ours, theirs = (each(x, cache) for each, cache in zip((model, reference), caches, strict=True))
            torch.testing.assert_close(ours, theirs)
            for slots in zip(*(cache.tables for cache in caches), strict=True):
                torch.testing.assert_close(slots[0].held, slots[1].held)
            assert type(caches[0].tables) is list and caches[0].seen == caches[1].seen
    # The last block meets its own slot as the last one too.
    assert sum(graphs_of(model).values()) == expected


class Handing(Wired):
    """Picks from a list or dict, and hands it on."""

    def forward(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        return self.linear(x) + held[self.place], held


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_or_dict_that_blocks_hand_on_stays_the_callers(kind: type[Any]) -> None:
    model, x = Sequence(*(Handing(place=place) for place in range(3))).eval(), torch.randn(2, 4)
    held = kind(enumerate(torch.ones(3, 4))) if kind is dict else list(torch.ones(3, 4))
    compiled(model)
    with torch.no_grad():
        for block in model.blocks:
            x, given = block(x, held)
            assert given is held


def test_the_second_run_of_a_checkpoint_may_compile() -> None:
    model, x = Sequence(*(Block() for _ in range(3))), torch.randn(2, 4)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    checkpoint_regions(compiled(model, backend="aot_eager"), Block)
    loss = model(x).sum()
    torch.compiler.reset()  # the backward, which no module calls, finds no code
    torch.testing.assert_close(torch.autograd.grad(loss, [*model.parameters()]), expected)


class Placed(Block):
    """Reads or writes its part of what all of them are given."""

    def forward(self, x: Tensor, held: Any, how: str) -> Tensor:
        y = super().forward(x)
        if how == "reads":
            return y + held[..., self.place] + held[:, None, ..., self.place][:, 0] * held[:, 1:, self.place].sum()
        if how == "writes":
            held[..., self.place] = y
        else:
            held[self.place] = y
        return y


@pytest.mark.parametrize(("how", "needed"), [("reads", 1), ("writes", 1), ("writes first", 1), ("writes a list", 4)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_place_in_a_tensor_is_a_symbol_and_in_a_list_that_is_written_a_graph(how: str, needed: int, backend: str):
    model, x = Sequence(*(Placed(place=place) for place in range(4))).eval(), torch.randn(4, 4)
    whole = torch.arange(64.0).view(4, 4, 4)

    def held() -> Any:
        return list(whole) if how == "writes a list" else whole.clone()

    theirs, ours = held(), held()
    with torch.no_grad():
        assert zoo.find_regions(model, args=(x, held(), how)).graphs == str(needed)
        expected = model(x, theirs, how)
        compiled(model, backend=backend)
        torch.testing.assert_close(model(x, ours, how), expected)
    torch.testing.assert_close(ours, theirs)
    # Inductor looks whether what is written starts at the first place.
    more = backend == "inductor" and how in ("writes", "writes first")
    assert graphs_of(model) == {"Placed": needed + more}


class Remembering(Wired):
    """Overwrites what it learns from: a buffer or its input, before or after it reads it, or a copy."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.linear(x)))  # which overwrites running statistics
        if self.how == "reads nothing":
            return y
        if self.how == "reads after":
            return y * self.mean.add_(1)
        if self.how == "reads a copy":
            before = self.mean.clone()
            self.mean.mul_(0.5)
            return y * before
        if self.how == "reads a clone of its input":
            before = x.clone()
            x.mul_(0.5)
            return x + torch.tanh(self.linear(before)) * before
        with torch.no_grad():
            self.mean.lerp_(x.abs().mean(0), 0.1)
        return y / self.mean


@pytest.mark.parametrize("how", ["reads after", "reads a copy", "reads a clone of its input", "averages"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_block_learns_from_what_it_overwrites_as_uncompiled(how: str, backend: str) -> None:
    eager = Sequence(*(Remembering(how) for _ in range(3)))
    model = compiled(copy.deepcopy(eager), regions=[Remembering], backend=backend)
    for each in (eager, model):
        torch.manual_seed(0)
        for _ in range(2):
            each(torch.randn(6, 4)).square().sum().backward()
    same_gradients(model, eager, rtol=1e-4, atol=1e-5)
    for name, expected in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), expected)


def test_what_is_learned_from_is_copied_and_running_statistics_are_not() -> None:
    copied = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        copied.append([node.args[0].name for node in graph.graph.nodes if "copy_of_input" in str(node.target)])
        return graph.forward

    for how in ("reads nothing", "averages"):
        compiled(Sequence(Remembering(how), Remembering(how)), backend=backend)(torch.randn(6, 4))
    assert copied[0] == [] and copied[-1] == ["l_self_buffers_mean_"]


class Detached(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach())


def test_a_block_whose_output_is_detached_has_no_gradient() -> None:
    model = compiled(Sequence(*(Detached() for _ in range(3))), backend="inductor")
    model(torch.randn(2, 4)).sum().backward()
    assert [block.linear.weight.grad is None for block in model.blocks] == [True, True, False]


def test_transforms_and_forward_mode_run_uncompiled() -> None:
    model, x = Sequence(*(Block() for _ in range(3))), torch.randn(2, 4)
    expected = torch.func.jvp(model, (x,), (x,)), torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
    compiled(model)
    with torch.no_grad():
        model(x)
        assert graphs_of(model) == {"Block": 1}
        found = torch.func.jvp(model, (x,), (x,)), torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
        torch.testing.assert_close(found, expected)
        with torch.autograd.forward_ad.dual_level():
            dual = model(torch.autograd.forward_ad.make_dual(x, x))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, expected[0][1])


class Sums(Wired):
    def forward(self, x: Tensor, sums: list[Tensor]) -> Tensor:
        sums[self.index] = sums[self.index] + x
        return torch.relu(self.linear(x))


class Summed(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        sums = [x, x, x]
        for block in self.blocks:
            x = block(x=x, sums=sums)
        return torch.stack([x, *sums])


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_other_tracers_see_a_model_as_uncompiled() -> None:
    model = Summed(*(Sums(index=index) for index in range(3)))
    x, other = torch.randn(2, 4), torch.randn(3, 4)
    model.blocks[0].register_forward_hook(lambda block, inputs, output: 2 * output)
    expected = model(other)
    compiled(model)
    with torch.no_grad():
        model(x)
        torch.testing.assert_close(torch.jit.trace(model, (x,))(other), expected)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(other), expected)


class Growing(Block):
    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("kept", torch.ones(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.cat([self.kept, super().forward(x)])
        return self.kept.mean(0, keepdim=True)


def test_a_buffer_that_grows_is_a_graph_a_size_and_no_violation() -> None:
    model, x = Sequence(*(Growing() for _ in range(3))).eval(), torch.randn(1, 4)
    compiled(model)
    for graphs in (1, 2, 3):
        with torch.no_grad(), zoo.enforce_budget(model):
            model(x)
        assert graphs_of(model) == {"Growing": graphs}


class Naming(Block):
    """Has a name and a rate of its own, which only others would act on."""

    def __init__(self, index: int) -> None:
        super().__init__(6)  # a graph that no other test compiles: saving fills Inductor's caches
        self.name, self.rate, self.left_out = f"block {index}", 0.1 + 0.1 * index, {"block 9"}

    def forward(self, x: Tensor) -> Tensor:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(self.rate)
        return x if self.name in self.left_out else super().forward(x)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_name_that_each_block_has_is_an_obstacle(backend: str, tmp_path: Path) -> None:
    model, x = Sequence(*map(Naming, range(3))).eval(), torch.randn(2, 6)
    for inputs in (None, {"x": x}):
        (obstacle,) = zoo.find_regions(model, kwargs=inputs).obstacles
        assert "forward reads name" in str(obstacle) and "one graph per layer, 3 in total" in str(obstacle)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", zoo.RegionWarning)
        with pytest.warns(zoo.RegionWarning, match="forward reads name, which differs in every layer"):
            compiled(model, backend="eager", args=(x,))
        with zoo.enforce_budget(model):  # as many as the call has shown
            model(x)
        compiled(zoo.uncompile(model), backend="eager")
        with pytest.raises(zoo.BudgetError, match="recompiled for a signature"), zoo.enforce_budget(model):
            model(x)
    compiled(zoo.uncompile(model), backend=backend)
    with torch.no_grad(), pytest.warns(zoo.RegionWarning, match="2 graphs compiled for .* where one would do: .*name"):
        expected = model(x)
    assert graphs_of(model) == {"Naming": 3}
    if backend == "inductor":
        saved = zoo.save_compiled(model, tmp_path / "compiled")
        assert len(saved.entries) == 3 and not saved.skipped
        with torch.no_grad():
            loaded = zoo.load_compiled(zoo.uncompile(model), tmp_path / "compiled", strict=True)
            torch.testing.assert_close(loaded(x), expected)


class Printing(Wired):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if x.sum().item() > 1e6 else x.relu()


def test_an_error_of_the_compiler_names_the_module_the_line_and_the_remedy() -> None:
    model, x = Sequence(Printing(), Printing()), torch.randn(2, 4)
    expected = model(x)
    compiled(model)
    with pytest.raises(zoo.RegionError) as caught:
        model(x)
    message = str(caught.value)
    assert message.startswith("blocks.0 (Printing) cannot be compiled as one graph")
    assert "test_foreign_calls.py:" in message and "x.sum().item()" in message
    assert "exclude=[Printing]" in message and "zoo.Region(Printing, fullgraph=False)" in message
    zoo.uncompile(model)
    compiled(model, regions=[zoo.Region(Printing, fullgraph=False)])
    with pytest.raises(zoo.BudgetError, match="graph break"), zoo.enforce_budget(model):
        torch.testing.assert_close(model(x), expected)


class Settings(dict[str, Any]):
    """Attributes are its items, so that a missing one is a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_a_block_may_hold_on_to_modules_and_to_objects_with_attributes_of_their_own() -> None:
    import numpy as np

    class Held(Wired):
        def forward(self, x: Tensor, settings: Settings) -> Tensor:
            x = self.linear(x) * settings.scale * float(np.pi) * (self.index + 1)
            return x if type(settings.library.kept) is list else -x

    class Holding(Sequence):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, settings)
            return x

    settings = Settings(scale=2.0)
    settings.library = types.ModuleType("library")
    settings.library.kept = [1, 2, 3]
    as_uncompiled(Holding(*(Held(index=index) for index in range(3))), torch.randn(2, 4), graphs={"Held": 1})


class Picky(Wired):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] % 2:
            raise ValueError(f"{x.shape[-2]} rows are odd")
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*became symbolic:zoo.RegionWarning")
@pytest.mark.parametrize("sizes", [(2,), (2, 4)], ids=["one size", "sizes that are symbols"])
def test_an_error_that_a_block_raises_is_raised_and_changes_nothing(sizes: tuple[int, ...]) -> None:
    model = compiled(Sequence(Picky(), Picky()).eval())
    with torch.no_grad():
        for size in sizes:
            model(torch.randn(size, 4))
        for size in (3, 5):
            with pytest.raises(ValueError, match=f"{size} rows are odd"):
                model(torch.randn(size, 4))
        for size in (2, 4, 6, 8):
            model(torch.randn(size, 4))
    assert graphs_of(model) == {"Picky": 2}


def test_an_assertion_that_fails_is_the_blocks_own() -> None:
    model = compiled(Sequence(Asserting(), Asserting()).eval())
    model.blocks[0].register_forward_hook(lambda *_: None)
    model(torch.randn(2, 4))
    with pytest.raises(AssertionError, match="two rows are expected"):
        model(torch.randn(3, 4))


class Storing(Wired):
    """Keeps each block's state in a store that no graph may hold, as continuous batching of transformers does."""

    def forward(self, x: Tensor, store: Any) -> Tensor:
        return store.update(self.linear(x).relu(), self.index) * 2


class Around(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = Storing(index=index)

    def forward(self, x: Tensor, store: Any) -> Tensor:
        return x + self.inner(x.sin(), store)


class Store:
    @torch.compiler.disable
    def update(self, x: Tensor, index: int) -> Tensor:
        return x + index


def test_blocks_that_break_share_their_graphs_and_prepare_no_symbols_once_nothing_compiles(monkeypatch) -> None:
    def graphs_and_times(blocks: int) -> tuple[int, list[int]]:
        prepared: list[Any] = []
        monkeypatch.setattr("zoo.engine.call.carry_marks", lambda *_: prepared.append(None))
        model, store = Sequence(*map(Around, range(blocks))).eval(), Store()
        inputs = [torch.randn(rows, 4) for rows in (2, 3, 4, 5, 6)]
        expected = [model(x, store) for x in inputs]
        compiled(model, fullgraph=False)
        times = []
        for x, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x, store), wanted)
            times.append(len(prepared))
        return sum(graphs_of(model).values()), times

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", zoo.RegionWarning)
        few, many = graphs_and_times(3), graphs_and_times(9)
    assert few[0] == many[0] > 1
    assert many[1][0] > 0 and many[1][-1] == many[1][-2]


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (OSError(30, "Read-only file system", "/cache/ab"), "TORCHINDUCTOR_CACHE_DIR"),
        (InvalidCxxCompiler(), "in the environment's CXX"),
    ],
)
def test_a_fault_of_the_machine_is_not_laid_on_the_module(fault: Exception, remedy: str) -> None:
    def backend(*_: Any) -> Any:
        raise fault

    model = compiled(Sequence(Block(4), Block(4)), backend=backend)
    with pytest.raises(zoo.RegionError, match=remedy) as caught:
        model(torch.randn(2, 4))
    assert type(fault).__name__ in str(caught.value) and "exclude" not in str(caught.value)


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(range(x.shape[0]))  # a size that is taken for a constant


def test_a_mark_that_cannot_be_kept_is_an_error_with_the_remedy_and_an_error_of_the_models_own_stays() -> None:
    model, x = compiled(Sequence(Counting(4), Counting(4))), torch.randn(2, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(zoo.RegionError, match=r"blocks\.0 \(Counting\).*Constraints violated.*dynamic=False"):
        model(x)
    model = compiled(Sequence(Block(4), Block(4)))
    with pytest.raises(RuntimeError, match="mat1|size") as caught:
        model(torch.randn(2, 3))
    assert not isinstance(caught.value, zoo.RegionError)


def test_options_of_a_region_come_before_those_of_the_call() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    ours, theirs = CompileCounterWithBackend("eager"), CompileCounterWithBackend("eager")
    model = Sequence(Block(4), Rated(rate=0.0))
    compiled(model, regions=[zoo.Region(Block, backend=ours, mode="default"), Rated], backend=theirs)
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert ours.frame_count == theirs.frame_count == 1


def of_torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dense", [False, True], ids=["at first", "after a dense call"])
def test_a_nested_tensor_is_an_error_with_its_remedy(dense: bool) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=3).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    compiled(model)
    refused = pytest.raises(zoo.RegionError, match="layers.0 .*NestedTensor.* once its use_nested_tensor is False")
    with torch.no_grad():
        if dense:
            model(torch.randn(2, 3, 8))
        with refused:
            model(torch.randn(2, 3, 8), src_key_padding_mask=padding)
    model.use_nested_tensor = False
    with torch.no_grad():
        assert model(torch.randn(2, 3, 8), src_key_padding_mask=padding).isfinite().all()


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))


class Repeating(nn.Module):
    def __init__(self, width: int = 8, around: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.groups = nn.ModuleList([Block(width)])
        self.around = nn.ModuleList(around() for _ in range(2)) if around else ()

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.around, *[self.groups[0]] * 4):
            x = block(x)
        return x


REPEATED = {of_torch: "TransformerEncoderLayer", sequential: "Sequential", Repeating: "Block"}


@pytest.mark.parametrize(("make", "name"), [*REPEATED.items(), (lambda: nn.Sequential(*[Block(8)] * 3), "Block")])
def test_blocks_of_torch_and_a_block_that_repeats_are_one_graph(make: Callable[[], nn.Module], name: str) -> None:
    as_uncompiled(make().eval(), torch.randn(2, 3, 8), graphs={name: 1}, backend="aot_eager")


@pytest.mark.parametrize("given", [False, True])
def test_a_block_that_a_call_repeats_is_found_by_its_inputs(given: bool) -> None:
    model, x = Repeating(4, partial(Shifted, 0)).eval(), torch.randn(2, 4)
    inputs, names = ({"x": x}, {"Shifted", "Block"}) if given else (None, {"Shifted"})
    assert {found.name for found in zoo.find_regions(model, kwargs=inputs).regions} == names
    compiled(model, kwargs=inputs)
    with torch.no_grad(), zoo.enforce_budget(model):
        model(x)
    assert graphs_of(model) == dict.fromkeys(names, 1)


def test_a_change_inside_a_block_of_torch_is_noticed() -> None:
    model, x = sequential(), torch.randn(3, 8)
    compiled(model)
    with torch.no_grad():
        model(x)
        model[2][1] = nn.Tanh()
        handle = model[1].register_forward_hook(lambda module, args, output: output + 1)
        torch.testing.assert_close(model(x), copy.deepcopy(model)(x))
        handle.remove()
        torch.testing.assert_close(model(x), copy.deepcopy(model)(x))


class Strict(Wired):
    scale = 2.0

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Named(Sequence):
    """Calls something else its regions, and an input ``model``."""

    @property
    def regions(self) -> list[str]:
        return ["EU", "US"]

    def forward(self, model: Tensor) -> Tensor:
        return super().forward(model)


def test_names_that_are_the_models_own() -> None:
    model, x = Named(Strict(), Strict()).eval(), torch.randn(2, 4)
    assert zoo.find_regions(model, kwargs={"model": x}).graphs_needed == 1
    as_uncompiled(model, x, graphs={"Strict": 1})
    with torch.no_grad():
        assert zoo.warm_up(model, model=x).graphs == 0


class Keyed(Sequence):
    def forward(self, args: Tensor, kwargs: Tensor) -> Tensor:
        return super().forward(args + kwargs)


def test_warm_up_takes_arguments_in_every_form_and_functions() -> None:
    model = compiled(Sequence(Block(4), Block(4)), dynamic=False)
    with torch.no_grad():
        assert zoo.warm_up(model, torch.randn(2, 4)).graphs == 1
        assert zoo.warm_up(model, *(partial(model, torch.randn(rows, 4)) for rows in (3, 5))).graphs == 2
        assert zoo.warm_up(model, lambda: model(x=torch.randn(7, 4)).sum()).graphs == 1
        keyed, x = compiled(Keyed(Block(4), Block(4))), torch.randn(2, 4)
        assert zoo.warm_up(keyed, args=x, kwargs=x).graphs == 1
        assert zoo.warm_up(keyed, args=x, kwargs=x).graphs == 0  # all is compiled
    with pytest.warns(zoo.RegionWarning, match="no region of Sequence was called: give functions"):
        zoo.warm_up(compiled(Sequence(Block(4), Block(4))), lambda: model(torch.randn(2, 4)))
    model, x = compiled(Scaled(Block(4), Block(4)), dynamic=False), torch.randn(2, 4)
    with torch.no_grad():
        assert zoo.warm_up(model, args=(x,), kwargs={"scale": 2.0}).graphs == 1
        assert zoo.warm_up(model, args=(x,)).graphs == zoo.warm_up(model, kwargs={"x": x}).graphs == 0
        with pytest.raises(TypeError, match="args is a Tensor, expected a tuple of arguments"):
            zoo.warm_up(model, args=x)
        for inputs, remedy in (((x,), "(model, *inputs)"), ({"y": x}, "(model, **inputs)")):
            with pytest.raises(zoo.RegionError) as refused:
                zoo.warm_up(model, inputs)
            assert refused.value.__notes__[-1].endswith(remedy)
        for function in (zoo.warm_up, zoo.cuda_graph):
            with pytest.raises(TypeError, match=r"^args is a dict, expected a tuple .*: \(x,\), or kwargs=\{'x': x\}$"):
                function(model, {"x": x})
        batch = compiled(Batched(Block(4), Block(4)))  # whose forward takes a dict, and may fail for other reasons
        assert zoo.warm_up(batch, {"x": x}).graphs == zoo.warm_up(batch, {"batch": x, "x": x}).graphs + 1 == 1
        with pytest.raises(KeyError, match="'x'"):
            zoo.warm_up(batch, {"z": x})


class Batched(Sequence):
    """Takes its inputs in one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["x"])


def by_block(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


OTHERS = {
    partial(torch.compile, backend="eager"): ("the model", "torch.compile around"),
    in_place: ("the model", "torch.compile around"),
    partial(accelerate_regions, backend="eager"): ("blocks.0", "torch.compile around"),
    by_block: ("blocks.0", "took the place of its region"),
}


@pytest.mark.parametrize(("compile_again", "said"), OTHERS.items())
def test_regions_that_another_compilation_leaves_out_are_told_of(compile_again, said):
    model, x = compiled(Sequence(Block(4), Block(4), Block(4))), torch.randn(2, 4)
    expected = copy.deepcopy(model)(x)
    again = compile_again(model)
    warned = pytest.warns(zoo.RegionWarning, match=f"a helper that calls it, compiles {said[0]},")
    with warned as caught, pytest.raises(zoo.BudgetError, match=said[1]), zoo.enforce_budget(model):
        for _ in range(2):
            torch.testing.assert_close(again(x), expected)
    assert len(caught) == 1


class Helped(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(torch.tanh, backend="eager")(super().forward(x))


def test_code_that_a_model_compiles_itself_is_not_the_models_compilation() -> None:
    model = compiled(Helped(Block(4), Block(4), Block(4)))
    with zoo.enforce_budget(model):
        model(torch.randn(2, 4))


class Scaled(Sequence):
    """Is called as many models of libraries are: with arguments that it hands on."""

    def forward(self, x: Tensor, scale: float = 1.0, **kwargs: Any) -> Tensor:
        assert not kwargs
        return super().forward(x) * scale


class Shifted(nn.Module):
    """Every second one rolls its input; with a rate it drops some of it in training."""

    def __init__(self, index: int, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.shift = index % 2
        self.rate = 0.1 * (index % 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)[..., :4]
        if self.shift > 0:
            x = x.roll(self.shift, (1,))
        return x * (1 - self.rate) if self.training and self.rate > 0 else x


# Of four blocks alike, and of two in each of two widths. No call shows whether the rate is read.
@pytest.mark.parametrize(
    ("widths", "train", "said", "graphs"),
    [((4,), False, "at least 2", 2), ((4,), True, "at least 2", 3), ((4, 5), False, "at least 4", 4)],
)
def test_a_choice_of_code_is_within_the_budget(widths: tuple[int, ...], train: bool, said: str, graphs: int) -> None:
    model = Sequence(*(Shifted(index, width) for width in widths for index in range(4 // len(widths)))).train(train)
    report = zoo.find_regions(model)
    assert len(report.obstacles) == train and report.graphs == said
    compiled(model)
    with zoo.enforce_budget(model), torch.set_grad_enabled(train):
        model(torch.randn(2, 4, requires_grad=train))
    assert graphs_of(model) == {"Shifted": graphs}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [sharded, nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("regions", [None, [Block]])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_fsdp_and_ddp_come_before_or_after(wrap, regions, compiled_first):
    compile_regions = partial(compiled, regions=regions, backend="aot_eager")
    plain, x = Sequence(nn.Linear(4, 4), Block(4), Block(4)), torch.randn(2, 4)
    expected = plain(x)
    model = wrap(compile_regions(plain)) if compiled_first else compile_regions(wrap(plain))
    with zoo.enforce_budget(model):
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
        model(x).sum().backward()
    assert graphs_of(plain) == {"Block": 1}
    assert zoo.find_regions(model).graphs_needed == 1 and zoo.warm_up(model, x).graphs == 0


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_all_blocks_are_regions_where_some_are_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Sequence(nn.Linear(4, 4), Block(4), Block(4))
    fully_shard(model.blocks[2])
    report = zoo.find_regions(model)
    assert [found.modules for found in report.regions] == [("blocks.1", "blocks.2")] and not report.obstacles


class Masked(Wired):
    """Leaves out self-loops and adds one to each node, as graph convolutions do: how many edges depends on the data."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(x.shape[0]).repeat(2, 1)
        source, destination = torch.cat([edges[:, edges[0] != edges[1]], loops], 1)
        degree = torch.zeros(x.shape[0]).index_add(0, destination, torch.ones(len(destination)))
        factor = degree.rsqrt()[source] * degree.rsqrt()[destination]
        return torch.zeros_like(x).index_add(0, destination, self.linear(x)[source] * factor[:, None])


@pytest.mark.slow
def test_sizes_that_depend_on_data_train() -> None:
    model = Sequence(Masked(), Masked(), Masked())
    reference, x, edges = copy.deepcopy(model), torch.randn(10, 4), torch.randint(10, (2, 40))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        zoo.compile_regions(model)
        for each in (model, reference):
            each(x, edges).square().sum().backward()
    same_gradients(model, reference, rtol=1e-4, atol=1e-4)
