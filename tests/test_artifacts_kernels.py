"""Compiled kernels travel from one cache of Triton's to another, and are not compiled there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zoo.engine import kernel as kernels


@kernels.kernel
def _copied(x, out):
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


class Utils:
    def __init__(self) -> None:
        """Loads a library that Triton compiled."""


def compiled() -> tuple[Any, bool]:
    """The kernel for a GPU that need not be there, and whether it came from Triton's cache."""
    hits: list[bool] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        source = ASTSource(_copied, signature={"x": "*fp32", "out": "*fp32"}, constexprs={})
        result = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return result, hits == [True]


def test_a_compiled_kernel_is_found_in_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    first, hit = compiled()
    assert not hit

    def launcher(source: Any, metadata: Any) -> None:
        cache = triton.runtime.cache.get_cache_manager("ab" * 32)
        if cache.get_file("launcher.so") is None:
            cache.put(b"library", "launcher.so")
            cache.get_file("launcher.so")

    launcher(None, None)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=Utils(), launcher_cls=launcher))
    monkeypatch.setitem(_copied.device_caches, 0, ({"kind": first},))
    monkeypatch.setattr(kernels, "KERNELS", [_copied])
    files = kernels.cached_files()
    assert sorted(Path(name).suffix for each in files.values() for name in each) == [".cubin", ".json", ".so"]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    kernels.cache_files(files)
    second, hit = compiled()
    assert hit and second.asm["cubin"] == first.asm["cubin"]
    assert [path.read_bytes() for path in (tmp_path / "second").rglob("launcher.so")] == [b"library"]
