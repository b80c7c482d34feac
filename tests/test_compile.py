"""Compiling in place: what is refused, what stays as it was, what is spent; every way to be slow is a violation."""

import copy
import dataclasses
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.blocks import MODES, Block, Disabled, Dropping, IndexedBlock, Sequence, Stack, Wired, declared, graphs_of
from zoo import BudgetError, Region
from zoo.engine.compile import plan_of
from zoo.engine.graph_log import GRAPH_LOG


def compiled(model: nn.Module, **kwargs: object) -> nn.Module:
    return zoo.compile_regions(model, backend=kwargs.pop("backend", "eager"), **kwargs)


def test_uncompile_restores_eager_also_of_a_model_inside_and_of_one_that_lost_a_block() -> None:
    model = compiled(Stack())
    model(torch.randn(2, 4))
    assert zoo.uncompile(model) is model
    assert plan_of(model) is None and all(m._compiled_call_impl is None for m in model.modules())
    before = len(GRAPH_LOG.entries)
    model(torch.randn(7, 4))
    assert len(GRAPH_LOG.entries) == before
    zoo.uncompile(nn.Sequential(compiled(model)))
    assert plan_of(model) is None
    lost = compiled(model).blocks.pop(2)
    assert not any("_compiled_call_impl" in vars(module) for module in zoo.uncompile(model).modules())
    assert lost not in GRAPH_LOG._watched
    compiled(model)  # and it can be compiled again


def test_a_per_layer_int_is_an_error_in_a_declared_model() -> None:
    with pytest.raises(ValueError, match="forward reads index .* differs in every layer"):
        compiled(declared(Region(IndexedBlock))(*(IndexedBlock(index=i) for i in range(3))))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_compiled_model_are_eager_and_can_be_compiled(again: object) -> None:
    plain = again(Stack())
    compiled(plain)(torch.randn(2, 4))
    model = compiled(Stack())
    expected = model(x := torch.randn(2, 4))
    copied = again(model)
    assert plan_of(copied) is None and all(m._compiled_call_impl is None for m in copied.modules())
    torch.testing.assert_close(copied(x), expected)
    compiled(copied)
    torch.testing.assert_close(copied(x), expected)
    assert plan_of(model) is not None


@pytest.mark.parametrize("make", [Stack, lambda: Block(4)], ids=["a model of regions", "a model that is a region"])
def test_a_compiled_model_is_freed_with_its_last_reference(make: object) -> None:
    model = compiled(make(), regions=[Block])
    model(torch.randn(2, 4))
    alive = weakref.ref(model)
    del model
    torch.compiler.reset()
    gc.collect()
    assert alive() is None


def test_warm_up_says_what_was_spent_by_its_own_model_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled(Sequence(Block(4), Block(4), Block(4)), backend="aot_eager").eval()
    with torch.no_grad():
        spent = zoo.warm_up(model, x=torch.randn(2, 4))
        assert spent.graphs == 1 and [cost.first_module for cost in spent.costs] == ["blocks.0"]
        assert 0 < spent.costs[0].seconds < spent.seconds
        assert "1 graph(s)" in str(spent) and "eval, no_grad" in str(spent)
        assert zoo.warm_up(model, x=torch.randn(2, 4)).graphs == 0
    assert "compiling regions" in capsys.readouterr().err
    teacher = compiled(Sequence(IndexedBlock(index=0)), regions=[IndexedBlock])

    class Student(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(teacher(x))

    student = compiled(Student().eval())
    with torch.no_grad():
        cost = zoo.warm_up(student, x=torch.randn(2, 4))
    assert {each.region: each.graphs for each in cost.costs} == {"Block": 1}


def test_warm_up_in_training_compiles_the_backward_and_leaves_state_alone() -> None:
    model = compiled(Sequence(Dropping(4), Dropping(4)), backend="aot_eager").train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, state = torch.randn(8, 4), torch.get_rng_state()
    zoo.warm_up(model, x=x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    entries = len(GRAPH_LOG.entries)
    model(x).sum().backward()
    assert len(GRAPH_LOG.entries) == entries, "the backward was compiled by warm_up"
    model = compiled(Wrapping().train(), backend="aot_eager")
    zoo.warm_up(model, x=torch.randn(2, 4))
    assert any(entry.backward for entry in GRAPH_LOG.of(plan_of(model).log_id))


def test_a_regions_own_options_reach_inductor_and_the_callers_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    seen: list[tuple[int | None, bool, bool]] = []

    def spy(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_: object) -> object:
        assert config.size_asserts is (config.compile_threads == 2)  # Dynamo's guards have compared the sizes
        seen.append((config.compile_threads, config.coordinate_descent_tuning, config.triton.autotune_pointwise))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx._compile_fx_inner", lambda *args, **kwargs: spy(*args, **kwargs))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *args, **kwargs: spy(*args, **kwargs))
    threads, first = {"compile_threads": 3}, {"triton.autotune_pointwise": False}
    for own, kwargs, expected in (
        (threads, {}, (3, False, True)),
        (threads, {"mode": "max-autotune-no-cudagraphs"}, (3, True, True)),
        (threads, {"options": {"compile_threads": 2, "size_asserts": True}}, (2, False, True)),
        ({**threads, **first}, {}, (3, False, False)),
        (first, {"mode": "max-autotune-no-cudagraphs"}, (config.compile_threads, True, False)),
        (first, {"options": {"triton.autotune_pointwise": True}}, (ANY, False, True)),
    ):
        cls, x = declared(Region(Block, options=own)), torch.randn(2, 4)
        torch.compiler.reset()
        with torch.no_grad():
            zoo.compile_regions(cls(Block(4), Block(4)), **kwargs)(x)
        assert seen == [expected]
        seen.clear()


def test_code_that_was_compiled_with_breaks_serves_no_model_that_allows_none() -> None:
    x = torch.randn(2, 4)
    zoo.compile_regions(Sequence(BreakingBlock(4), BreakingBlock(4)), regions=[BreakingBlock], fullgraph=False)(x)
    model = zoo.compile_regions(Sequence(BreakingBlock(4), BreakingBlock(4)), regions=[BreakingBlock])
    with pytest.raises(zoo.RegionError, match="cannot be compiled as one graph"):
        model(x)


class Widening(nn.Module):
    """Twice the width, then what holds no weight: another size in each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.glue = Glue()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.glue(torch.cat([x, x], dim=1), torch.arange(2.0 * x.shape[1]))


class Glue(nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (x + bias).relu()


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 3)])
def test_a_region_of_symbolic_sizes_is_one_graph(dynamic: bool | None, graphs: int) -> None:
    region = Region(Glue, graphs=3, dynamic=dynamic)
    model, x = declared(region)(*(Widening() for _ in range(3))), torch.randn(5, 2)
    expected = model(x)
    assert zoo.find_regions(model, kwargs={"x": x}).graphs_needed == graphs
    compiled(model, backend="aot_eager")
    with zoo.enforce_budget(model):
        torch.testing.assert_close(model(x), expected)
        assert zoo.warm_up(model, x=x).graphs == 0
        assert zoo.warm_up(model, x=torch.randn(7, 2)).graphs == (0 if dynamic else 3)
    assert sum(graphs_of(model).values()) == (1 if dynamic else 6)


def test_without_any_region_a_model_runs_and_a_refusal_leaves_nothing_compiled() -> None:
    model = declared(Region(Block))(nn.Linear(4, 4))
    with pytest.warns(zoo.RegionWarning, match="nothing to compile in this configuration"):
        compiled(model)
    with zoo.enforce_budget(model):
        model(torch.randn(2, 4))
    assert zoo.warm_up(model, x=torch.randn(2, 4)).graphs == 0
    model = declared(Region(Block), Region(Dropping, mode="reduce-overhead"))(Block(4), Dropping(4))
    with pytest.raises(ValueError, match="records a CUDA graph for every region"):
        zoo.compile_regions(model)
    assert not any(module._compiled_call_impl for module in model.modules())
    zoo.compile_regions(model, exclude=[Dropping], backend="eager")


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class Wrapping(Stack):
    def forward(self, x: torch.Tensor) -> Output:
        return Output(super().forward(x))


@dataclasses.dataclass
class Linked:
    """An input with a way back to itself, and a field that is not set."""

    x: torch.Tensor
    back: Any = None
    later: int = dataclasses.field(init=False)


class Unpacking(Wired):
    def forward(self, given: Linked) -> torch.Tensor:
        return self.linear(given.x)


def test_an_input_that_leads_back_to_itself_compiles() -> None:
    model = Sequence(Unpacking())
    given = Linked(torch.randn(2, 4))
    given.back = given
    expected = model(given)
    compiled(model, regions=[Unpacking])
    with zoo.enforce_budget(model):
        torch.testing.assert_close(model(given), expected)


def violations(model: nn.Module, *calls: Callable[[], object]) -> list[str]:
    with pytest.raises(BudgetError) as caught, zoo.enforce_budget(model):
        for call in calls:
            call()
    return caught.value.violations


def test_budgets_hold_for_each_mode_and_each_shape_apart() -> None:
    model = compiled(Stack())
    with zoo.enforce_budget(model):
        for context in MODES.values():
            for training in (True, False):
                for batch in (2, 3):
                    with context():
                        model.train(training)(torch.randn(batch, 4))


def test_over_budget_names_the_region_the_mode_and_the_reason() -> None:
    class Odd(Stack):
        """The same block meets two shapes in one call: two graphs where one was declared."""

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.stem(x))
            return self.blocks[2](self.blocks[1](x.repeat(2, 1)))

    model = compiled(Odd().train())
    with torch.autocast("cpu", torch.bfloat16):
        (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    said = "Block: 2 graphs in mode train, grad, autocast(cpu:bfloat16), budget 1"
    assert said in violation and "blocks.1" in violation
    assert "size mismatch" in violation


class NamedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(self.name)


def test_a_region_without_a_budget_has_a_graph_for_each_structure() -> None:
    model = compiled(Sequence(NamedBlock(name="b"), NamedBlock(name="b")), regions=[NamedBlock])
    with torch.no_grad(), zoo.enforce_budget(model):
        model(torch.randn(2, 4))
    model = compiled(Sequence(NamedBlock(name="c" * 5), NamedBlock(name="c" * 6)), regions=[NamedBlock])
    with torch.no_grad():
        (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    assert "NamedBlock (blocks.1): recompiled" in violation and "name" in violation


def test_a_recompile_of_the_same_kind_is_a_violation_unless_it_has_a_budget() -> None:
    model = compiled(Sequence(Scaled()), regions=[Scaled])

    def change() -> None:
        model.blocks[0]._scale = 2
        model(x)

    x = torch.randn(2, 4)
    found = violations(model, lambda: model(x), change)
    assert any("recompiled" in v and "_scale" in v for v in found), found
    # It is still one after a warm-up that had it.
    assert violations(model, lambda: model(x)) == found
    model = zoo.compile_regions(Sequence(Scaled()), regions=[Region(Scaled, graphs=2)], backend="eager")
    x = torch.randn(2, 4)
    model(x)
    model.blocks[0]._scale = 2
    model(x)
    with zoo.enforce_budget(model):
        model(x)


@pytest.mark.parametrize("bypass", ["forward", "checkpoint"])
def test_a_bypassed_region_is_a_violation(bypass: str) -> None:
    class Bypass(Sequence):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if bypass == "checkpoint":
                return torch.utils.checkpoint.checkpoint(self.blocks[1].forward, x, use_reentrant=False)
            return self.blocks[1].forward(x)

    model = compiled(Bypass(Block(4), Block(4)).eval())  # in training a layer may be dropped
    (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    assert "blocks.1" in violation and "never ran" in violation


class BreakingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break("on purpose")
        return x.relu()


@pytest.mark.parametrize(("cls", "words"), [(Disabled, "ran eagerly"), (BreakingBlock, "graph break.*on purpose")])
def test_what_runs_eagerly_in_whole_or_in_part_is_a_violation(cls: type[nn.Module], words: str) -> None:
    model = compiled(Sequence(cls(4), cls(4)), fullgraph=False)
    found = violations(model, lambda: model(torch.randn(2, 4)))
    assert any(re.search(words, violation, re.DOTALL) for violation in found), found
    # Also where a warm-up has compiled everything before.
    assert violations(model, lambda: model(torch.randn(2, 4)))


def test_a_module_in_the_place_of_a_region_is_a_violation() -> None:
    model = compiled(Sequence(Block(4), Block(4)).eval())
    model.blocks[1] = Block(4)
    (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    assert "(blocks.1): it took the place of a compiled region, and ran eagerly" in violation


def test_a_branch_on_data_is_a_graph_break_with_its_line() -> None:
    class Branching(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, width)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if x.sum() > 0:
                x = x + 1
            return x.relu()[..., :4]

    # More compilations than Dynamo remembers by default.
    model = compiled(Sequence(*map(Branching, (4, 4, *range(5, 36)))), regions=[Branching], fullgraph=False)
    found = violations(model, lambda: [model(sign * torch.ones(2, 4)) for sign in (-9, 9)])
    assert any("graph break" in each and "if x.sum() > 0:" in each for each in found), found
    assert not any("recompiled" in each for each in found), found


def test_nothing_run_is_a_violation_an_error_passes_through_and_a_block_that_was_taken_out_is_named() -> None:
    assert all("never ran" in violation for violation in violations(compiled(Stack())))
    model = compiled(Stack())
    with pytest.raises(KeyError), zoo.enforce_budget(model):
        raise KeyError("mine")
    assert all(m._compiled_call_impl.on_call == [] for m in model.blocks)
    model = zoo.compile_regions(Stack(), backend="eager")
    del model.blocks[2]
    lost = pytest.raises(ValueError, match=r"Stack has lost blocks\.2 since .*zoo\.uncompile\(model\)")
    with lost, zoo.enforce_budget(model):
        pass


class Scaled(Wired):
    """Reads a private attribute, which is not part of its signature: changing it is a recompile."""

    _scale = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self._scale
