"""Compiled regions in a folder: a new process compiles nothing, and nothing is ever loaded that does not fit."""

import errno
import gc
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zoo
from tests.blocks import Declared, Wired
from tests.test_call import Decorated
from zoo.__main__ import main
from zoo.engine.graph_log import GRAPH_LOG
from zoo.engine.traced import Traced
from zoo.llm import Session

ROOT = Path(__file__).resolve().parent.parent


class Shifted(Wired):
    """A graph with nothing to fuse, of a constant that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - self.shift if self.training else y + self.shift


class Shifts(Declared):
    regions: ClassVar[tuple[zoo.Region, ...]] = (zoo.Region(Shifted, graphs=1),)

    def __init__(self, config: str = "three") -> None:
        super().__init__(*(Shifted(8, shift=0.5) for _ in range(3)))
        self.config = config


def eager(model: nn.Module, x: Tensor) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return model(x)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model that ran on [4, 8] and [2, 8]."""
    model = zoo.compile_regions(Shifts().eval())
    with torch.no_grad():
        zoo.warm_up(model, *(lambda rows=rows: model(torch.randn(rows, 8)) for rows in (4, 2)))
    saved = zoo.save_compiled(model, tmp_path / "compiled", key="secret")
    assert len(saved.entries) == 2 and not saved.skipped and "2 graph(s)" in str(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiled"]
    return tmp_path / "compiled"


def loaded(folder: Path, **options: Any) -> nn.Module:
    return zoo.load_compiled(Shifts().eval(), folder, strict=True, **options)


def test_calls_like_those_saved_compile_nothing_also_where_a_server_refuses_to(folder: Path) -> None:
    before = graphs()
    model = loaded(folder, key="secret")
    with torch.no_grad(), zoo.enforce_budget(model), torch.compiler.set_stance("fail_on_recompile"):
        for x in (torch.randn(4, 8), torch.randn(2, 8)):
            assert torch.equal(model(x), eager(model, x))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            model(torch.randn(3, 8))
    assert graphs() == before
    assert [entry.compile_id for entry in GRAPH_LOG.entries[-2:]] == ["000-Shifted.bin", "001-Shifted.bin"]
    x = torch.randn(5, 8)  # a shape that was not saved
    said = f"blocks.0: compiled in mode eval, no_grad, since {folder} has no graph"
    with pytest.raises(zoo.BudgetError, match=said), torch.no_grad(), zoo.enforce_budget(model):
        assert torch.equal(model(x), eager(model, x))
    assert graphs() == before + 1
    saved = zoo.save_compiled(model, folder)  # what was loaded and what was compiled since
    assert len(saved.entries) == 3
    model.blocks[1].shift = 1.5
    over = pytest.raises(zoo.BudgetError, match="2 graphs in mode eval, no_grad, budget 1")
    with over, torch.no_grad(), zoo.enforce_budget(model):
        model(x)


def transpose_memory(block: Any) -> None:
    block.linear.weight = nn.Parameter(block.linear.weight.detach().t().contiguous().t())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda block: setattr(block, "shift", 1.5),
    "training": lambda block: block.train(),
    "frozen": lambda block: block.requires_grad_(False),
    "strides": transpose_memory,
    "a hook": lambda block: block.linear.register_forward_hook(lambda module, args, output: output * 2),
    "replaced": lambda block: setattr(block, "linear", nn.Sequential(block.linear, nn.ReLU())),
    "no bias": lambda block: setattr(block.linear, "bias", None),
}


@pytest.mark.parametrize("first", [False, True], ids=["before the first call", "after a call"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_blocks_are_compiled_again(folder: Path, change: Callable[[Any], Any], first: bool) -> None:
    model, x, before = loaded(folder), torch.randn(4, 8), graphs()
    with torch.no_grad():
        if not first:
            model(x)
        for block in model.blocks if first else model.blocks[1:2]:
            change(block)
        assert torch.equal(model(x), eager(model, x)) and graphs() == before + 1


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_another_mode_is_compiled_again(folder: Path, mode: Callable[[], Any]) -> None:
    model, x = loaded(folder), torch.randn(4, 8)
    with torch.no_grad():
        model(x)
        before = graphs()
        with mode():
            out = model(x)
            assert torch.equal(out, eager(model, x)) and graphs() > before
            assert out.requires_grad == torch.is_grad_enabled()


SHIFT, CALLS = torch.ones(8), torch.zeros(())


class OfModule(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + SHIFT


class Counts(OfModule):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS = CALLS + 1
        return self.linear(x) + CALLS


def written_and_loaded(cls: Callable[[int], nn.Module], folder: Path) -> tuple[zoo.SavedRegions, nn.Module]:
    torch.manual_seed(0)
    model = zoo.compile_regions(nn.Sequential(*(cls(8) for _ in range(3))).eval(), dynamic=False)
    with torch.no_grad():
        model(torch.randn(4, 8))
    saved = zoo.save_compiled(model, folder)
    return saved, zoo.load_compiled(nn.Sequential(*(cls(8) for _ in range(3))).eval(), folder)


def test_a_forward_behind_a_decorator_is_compared_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, model = written_and_loaded(partial(Decorated, power=1), tmp_path / "compiled")
    assert len(saved.entries) == 1 and not saved.skipped, saved
    x, before = torch.randn(4, 8), graphs()
    with torch.no_grad():
        assert torch.equal(model(x), eager(model, x)) and graphs() == before
        cell = Decorated.forward.__closure__[0]
        monkeypatch.setattr(cell, "cell_contents", lambda block, x: block.linear(x).relu())
        assert torch.equal(model(x), eager(model, x)) and graphs() == before + 1


class Makes(OrderedDict[str, type[nn.Module]]):
    """Makes a module for a name, as ``ACT2FN`` of transformers."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Makes(relu=nn.ReLU)


class Mapped(OfModule):
    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS["relu"](torch.vmap(self.linear)(x))


def test_blocks_with_vmap_and_a_table_of_modules_are_saved(tmp_path: Path) -> None:
    saved, model = written_and_loaded(Mapped, tmp_path / "compiled")
    assert len(saved.entries) == 1 and not saved.skipped, saved
    x, before = torch.randn(4, 8), graphs()
    with torch.no_grad():
        torch.testing.assert_close(model(x), eager(model, x))
        assert graphs() == before


@pytest.mark.parametrize("first", [False, True], ids=["before the first call", "after a call"])
def test_a_tensor_that_took_the_place_of_a_modules_is_read(tmp_path, monkeypatch, first) -> None:
    saved, model = written_and_loaded(OfModule, tmp_path / "compiled")
    x, before = torch.randn(4, 8), graphs()
    assert not saved.skipped
    with torch.no_grad():
        if not first:
            model(x)
        monkeypatch.setitem(globals(), "SHIFT", torch.full((8,), 5.0))
        assert torch.equal(model(x), eager(model, x)) and graphs() == before


def shifted(x: Tensor) -> Tensor:
    return x + 1


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return by * x


ACTIVATION = torch.sigmoid


class Calls(OfModule):
    OFFSET = 0.5

    def forward(self, x: Tensor) -> Tensor:
        more = self.OFFSET if isinstance(shifted, FunctionType) and x.shape[1:] == (8,) else 0
        return ACTIVATION(shifted(self.twice(self.linear(x))) + scaled(x) + more)

    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


HERE = sys.modules[__name__]
REPLACED: dict[str, tuple[Any, str, Any]] = {
    "a function": (HERE, "shifted", lambda x: x - 1), "a method": (Calls, "twice", lambda self, x: 3 * x),
    "a default": (scaled, "__defaults__", (3.0,)), "a constant of a class": (Calls, "OFFSET", 1.5),
}  # fmt: skip


@pytest.mark.parametrize("what", REPLACED)
def test_what_was_replaced_before_loading_is_not_loaded(tmp_path, monkeypatch, what) -> None:
    written_and_loaded(Calls, tmp_path / "compiled")
    monkeypatch.setattr(*REPLACED[what])
    torch.compiler.reset()
    said = "test_artifacts has changed, or a function, class or constant in it differs"
    with pytest.raises(zoo.ArtifactError, match=said):
        zoo.load_compiled(nn.Sequential(Calls(8), Calls(8), Calls(8)).eval(), tmp_path / "compiled", strict=True)


def test_another_function_of_torch_under_a_name_is_compiled_again(tmp_path, monkeypatch) -> None:
    saved, _ = written_and_loaded(Calls, tmp_path / "compiled")
    assert not saved.skipped
    x = torch.randn(4, 8)
    monkeypatch.setattr(HERE, "ACTIVATION", torch.tanh)
    torch.compiler.reset()
    model = nn.Sequential(Calls(8), Calls(8), Calls(8)).eval()
    zoo.load_compiled(model, tmp_path / "compiled", strict=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x), eager(model, x))
        with pytest.raises(zoo.BudgetError, match="has no graph for these inputs"), zoo.enforce_budget(model):
            model(x[:2])


def test_a_folder_with_anything_else_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    model, path = Shifts().eval(), tmp_path / "with_weights"
    shutil.copytree(folder, path)
    (path / "model.safetensors").write_text("weights")
    zoo.compile_regions(model)
    with torch.no_grad():
        model(torch.randn(4, 8))
    said = "with_weights is not a folder of compiled regions: it holds model.safetensors"
    with pytest.raises(ValueError, match=said):
        zoo.save_compiled(model, path)
    assert (path / "model.safetensors").read_text() == "weights"
    with mock.patch.object(Path, "is_mount", return_value=True), pytest.raises(ValueError, match="is a mount point"):
        zoo.save_compiled(model, tmp_path / "new")


def test_a_folder_of_other_regions_than_the_models_says_so(folder: Path) -> None:
    model = Shifts().eval()
    zoo.compile_regions(model, regions=[nn.Linear])
    with pytest.raises(zoo.ArtifactError, match="test_artifacts.Shifted is no compiled region of this model"):
        zoo.load_compiled(model, folder, strict=True)


def test_code_that_assigns_to_a_global_is_not_saved(tmp_path, monkeypatch) -> None:
    with pytest.warns(zoo.RegionWarning, match="holds no graph .it assigns to the global CALLS"):
        _, model = written_and_loaded(Counts, tmp_path / "compiled")
    monkeypatch.setitem(globals(), "CALLS", torch.zeros(()))
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert CALLS.item() == 3


def edit(folder: Path, **parts: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    for name, value in parts.items():
        index[name] = {**index[name], **value} if isinstance(value, dict) else value
    (folder / "index.json").write_text(json.dumps(index))


def cut(folder: Path) -> None:
    file = folder / "000-Shifted.bin"
    file.write_bytes(file.read_bytes()[:-1])


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def poison(folder: Path) -> None:
    (folder / "000-Shifted.bin").write_bytes(pickle.dumps(Harm()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (partial(edit, fingerprint={"torch": "1.0"}), "torch was 1.0, is " + re.escape(torch.__version__)),
        (partial(edit, fingerprint={"device": ["GPU"]}), "device was .*GPU.*, is "),
        (partial(edit, fingerprint={"model": "nets.Other"}), "it is of a nets.Other, and this is a .*Shifts"),
        (partial(edit, fingerprint={"model": "__main__.Shifts"}), ": let the program that saves import the class, too"),
        (partial(edit, fingerprint={"config": "four"}), "config was four, is three"),
        (partial(edit, fingerprint={"environment": {"TRITON_INTERPRET": "7"}}), "environment's TRITON_INTERPRET was"),
        (partial(edit, fingerprint={"zoo's sources": "0"}, choices={"cut": 1}), "zoo's sources was 0, is "),
        (partial(edit, sources={"tests.test_artifacts": "0"}), "tests.test_artifacts has changed"),
        (cut, "000-Shifted.bin is not what was written"),
        (poison, "000-Shifted.bin is not what was written"),
        (lambda folder: (folder / "001-Shifted.bin").unlink(), "001-Shifted.bin cannot be read"),
        (lambda folder: (folder / "index.json").write_text("{"), "no index that can be read"),
        (lambda folder: (folder / "index.json").unlink(), "no folder that zoo.save_compiled wrote"),
        (lambda folder: (folder / "index.json").write_text("{}"), "another release of the zoo"),
        (partial(edit, entries=[{}]), "another release of the zoo"),
        (partial(edit, files={"kernels": {}}), "another release of the zoo"),
    ],
)
def test_what_does_not_fit_is_named_and_compiled_as_usual(folder, damage, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    damage(folder)
    with pytest.raises(zoo.ArtifactError, match=words):
        loaded(folder)
    with pytest.warns(zoo.RegionWarning, match=words) as seen:
        model = zoo.load_compiled(Shifts().eval(), folder)
    assert len(seen) == 1
    with torch.no_grad(), zoo.enforce_budget(model):
        for x in (torch.randn(4, 8), torch.randn(2, 8)):
            assert torch.equal(model(x), eager(model, x))
    assert not (tmp_path / "harm").exists()


@pytest.fixture
def precision() -> Iterator[None]:
    """Restores what a test sets."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
def test_flags_of_the_process_that_differ_are_named_once(folder: Path) -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(zoo.ArtifactError) as raised:
        loaded(folder)
    assert str(raised.value).count("cuda.matmul.allow_tf32 was False, is True: set it as it was before zoo.load") == 1


def test_regions_of_another_model_are_refused(tmp_path: Path) -> None:
    blocks = nn.Sequential(*Shifts().blocks).eval()
    zoo.compile_regions(blocks, regions=[zoo.Region(Shifted, graphs=1)])
    with torch.no_grad():
        blocks(torch.randn(4, 8))
    zoo.save_compiled(blocks, tmp_path / "compiled")
    with pytest.raises(zoo.ArtifactError, match="how regions of a Linear are chosen; call zoo.compile_regions"):
        zoo.load_compiled(nn.Linear(8, 8), tmp_path / "compiled")
    with pytest.raises(TypeError, match="model is a .*Path, expected an nn.Module"):
        zoo.load_compiled(tmp_path / "compiled", nn.Linear(8, 8))


def test_a_key_refuses_what_was_not_signed_with_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(zoo.ArtifactError, match="another key"):
        loaded(folder, key=b"other")
    edit(folder, skipped={"blocks.0": "no reason"})
    with pytest.raises(zoo.ArtifactError, match="another key"):
        loaded(folder, key="secret")
    model = loaded(folder)
    model(torch.randn(4, 8))
    zoo.save_compiled(model, tmp_path / "unsigned")
    with pytest.raises(zoo.ArtifactError, match="not signed"):
        loaded(tmp_path / "unsigned", key="secret")
    for act in (lambda: loaded(folder, key=""), lambda: zoo.save_compiled(model, tmp_path / "open", key=b"")):
        with pytest.raises(ValueError, match="key is empty"):
            act()


class Placed(Wired):
    """Knows its place and a rate, as blocks of other libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) / (self.place + 1)
        return x + y * self.rate if self.place and 7 % self.place else x - y.relu()


def placed(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Placed(width, place=place, rate=0.1 * place) for place in range(4))).eval()


@pytest.mark.slow
def test_numbers_of_a_block_are_saved_as_symbols(tmp_path: Path) -> None:
    model, x = zoo.compile_regions(placed()), torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        saved = zoo.save_compiled(model, tmp_path / "compiled")
        assert len(saved.entries) == 3 and not saved.skipped  # of places 0, 1, and 2 and 3
        before = graphs()
        fresh = zoo.load_compiled(placed(), tmp_path / "compiled", strict=True)
        assert torch.equal(fresh(x), expected) and graphs() == before
        fresh[2].place = 0  # by which the guards of other places divide
        torch.testing.assert_close(fresh(x), eager(fresh, x))
    with pytest.raises(zoo.ArtifactError, match=r"weights was 288 in 8 tensors .*, is 1,088 in 8 tensors"):
        zoo.load_compiled(placed(16), tmp_path / "compiled", strict=True)


class Limited(Wired):
    """Has a limit that may be no number."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.linear(y) if self.limit > 0.5 else y


def test_a_float_that_is_no_number_is_compared_as_the_compiler_does(tmp_path: Path) -> None:
    blocks, x = nn.Sequential(*(Limited(8, limit=math.nan) for _ in range(2))), torch.randn(2, 8)
    model = zoo.compile_regions(blocks.eval())
    with torch.no_grad():
        model(x)
        assert len(zoo.save_compiled(model, tmp_path / "compiled").entries) == 1
        torch.compiler.reset()
        fresh = zoo.load_compiled(zoo.uncompile(model), tmp_path / "compiled", strict=True)
        before = graphs()
        for limit, compiled in ((math.nan, 0), (1.0, 1), (math.nan, 1)):
            fresh[0].limit = fresh[1].limit = limit
            torch.testing.assert_close(fresh(x), eager(fresh, x))
            assert graphs() == before + compiled


def test_a_full_disk_leaves_the_folder_of_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = loaded(folder)
    with torch.no_grad():
        model(torch.randn(5, 8))
    monkeypatch.setattr(Path, "write_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        zoo.save_compiled(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["compiled"]


def test_what_a_link_leads_to_is_replaced(folder: Path, tmp_path: Path) -> None:
    model, link = loaded(folder), tmp_path / "current"
    link.symlink_to(folder.name)
    with torch.no_grad():
        model(torch.randn(4, 8))
    zoo.save_compiled(model, link)
    assert link.is_symlink() and "hmac" not in json.loads((folder / "index.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiled", "current"]


def test_what_cannot_be_saved_says_why_and_does_not_pass_for_a_loaded_model(tmp_path: Path) -> None:
    model = zoo.compile_regions(Shifts().eval(), backend="eager")
    with pytest.raises(ValueError, match="has run compiled"):
        zoo.save_compiled(model, tmp_path / "compiled")
    with torch.no_grad():
        model(torch.randn(4, 8))
        saved = zoo.save_compiled(model, tmp_path / "compiled")
        assert not saved.entries and "another backend" in str(saved)
        with pytest.raises(zoo.ArtifactError, match="holds no graph .it was compiled by another backend than Inductor"):
            loaded(tmp_path / "compiled")
        zoo.compile_regions(zoo.uncompile(model), dynamic=True)
        model(torch.randn(4, 8))
        saved = zoo.save_compiled(model, tmp_path / "compiled")
    assert any("its sizes are symbols" in each and "use a static cache" in each for each in saved.skipped.values())
    with pytest.raises(ValueError, match="no compiled regions"):
        zoo.save_compiled(Shifts(), tmp_path / "compiled")


def test_regions_that_ran_and_are_not_kept_are_not_said_to_have_never_run(tmp_path: Path) -> None:
    model = zoo.compile_regions(Shifts().eval(), fullgraph=False)
    with torch.no_grad():
        model(torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"its regions ran.* or torch.compiler.reset\(\) was called"):
        zoo.save_compiled(model, tmp_path / "compiled")


def kept() -> int:
    """How many compilations are kept in memory so that they can be saved."""
    gc.collect()
    return sum(type(each) is Traced for each in gc.get_objects())


def test_what_is_kept_to_be_saved_dies_with_the_models_that_run_it(tmp_path: Path) -> None:
    before, x = kept(), torch.randn(4, 8)
    with torch.no_grad():
        model, other = (zoo.compile_regions(Shifts().eval()) for _ in range(2))
        model(x), other(x)
        assert kept() == before + 1
        del model
        assert kept() == before + 1 and len(zoo.save_compiled(other, tmp_path / "compiled").entries) == 1
        traced = graphs()
        zoo.compile_regions(zoo.uncompile(other))(x)  # Dynamo still has the code
        assert graphs() == traced and len(zoo.save_compiled(other, tmp_path / "compiled").entries) == 1
        del other
        assert kept() == before
        # And still has it, when what it was traced from is gone.
        other = zoo.compile_regions(Shifts().eval())
        other(x)
        assert "torch.compiler.reset()" in str(zoo.save_compiled(other, tmp_path / "compiled"))
        torch.compiler.reset()
        other(x)
        assert len(zoo.save_compiled(other, tmp_path / "compiled").entries) == 1


def run(*arguments: str, cache: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.artifact_process", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bert-debug", "gcn-debug", "llm-debug", "bert", "llama", "llama_dynamic", "llama_decode", "vit", "unet", "flux"],
)
def test_a_new_process_with_empty_caches_compiles_nothing(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "compiled")
    run("save", name, folder, cache=Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    run("load", name, folder, cache=tmp_path / "empty")


@pytest.mark.slow
@pytest.mark.parametrize("how", [("gcn-debug",), ("bert-debug", "train")], ids=" ".join)
def test_graphs_of_kernels_load_without_the_compiler(how: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")
    name, *rest = how
    for what in ("save", "load"):
        run(what, name, str(tmp_path / "compiled"), "kernels", *rest, cache=tmp_path / what)


@pytest.mark.slow
def test_the_command_compiles_and_tells(tmp_path, capsys, monkeypatch) -> None:
    folder = str(tmp_path / "compiled")
    with warnings.catch_warnings():
        assert main(["compile", "gcn-debug", "--input", "num_nodes=16,num_edges=32", "--out", folder]) == 0
    assert "3 graph(s)" in capsys.readouterr().out
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert main(["info", folder]) == 0
    told = capsys.readouterr().out
    assert "torch: " + torch.__version__ in told and "GNNLayer, inference_mode" in told
    assert max(map(len, told.splitlines())) < 80
    assert main(["info", str(tmp_path)]) == 2 and "no folder that" in capsys.readouterr().err
    for name, option, words in (
        ("gcn-debug", ["--input", "nodes=16", "--out", folder], "no size 'nodes'"),
        ("gcn-debug", ["--input", "num_nodes", "--out", folder], "'num_nodes' is not NAME=SIZE"),
        ("gcn-debug", ["--input", "num_nodes=8,num_nodes=9", "--out", folder], "a size twice; repeat --input"),
        ("llm-debug", ["--input", "decode-1", "--out", folder], "decode-1: expected rows and slots"),
        ("llm-debug", ["--out", str(tmp_path)], "is not a folder of compiled regions"),
        ("llm-debug", ["--device", "cuda", "--out", folder], "torch finds no usable GPU here"),
    ):
        assert main(["compile", name, *option]) == 2 and words in capsys.readouterr().err
    read_only = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(tempfile, "mkdtemp", mock.Mock(side_effect=read_only))
    assert main(["compile", "gcn-debug", "--out", str(tmp_path / "new")]) == 2
    assert f"new cannot be written: {tmp_path}: Read-only file system" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("precision")
def test_the_command_compiles_what_a_session_calls(tmp_path: Path) -> None:
    folder = str(tmp_path / "compiled")
    words = ["--matmul-precision", "high", "--input", "decode-1x16", "--out", folder]
    assert main(["compile", "llm-debug", *words]) == 0
    assert torch.get_float32_matmul_precision() == "high"
    model = zoo.load_compiled(zoo.create("llm-debug"), folder, strict=True)
    before = graphs()
    Session(model, 1, 16).generate([[1, 2, 3]], max_new_tokens=4)
    assert graphs() == before + 1  # the prompt's, which was not compiled


@pytest.mark.parametrize(
    ("sent", "code", "said"), [("SIGINT", 130, "stopped\n"), ("SIGTERM", 130, "stopped\n"), ("", 1, "")]
)
def test_a_command_that_is_stopped_or_not_read_ends_in_silence(sent, code, said, monkeypatch, capfd) -> None:
    def stop(given: Any) -> None:
        if not sent:
            raise BrokenPipeError
        os.kill(os.getpid(), getattr(signal, sent))
        time.sleep(10)  # the signal comes before

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    monkeypatch.setattr("zoo.__main__._list", stop)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    try:
        assert main(["list"]) == code and capfd.readouterr().err == said
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
