"""What only some supported torch releases have, gated here and nowhere else."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

OLDEST_TORCH = (2, 11)
FALLBACKS_ARE_LAZY = (2, 15)  # the first release seen to
GUARDS_SEE_TENSORS = (2, 14)  # the first release seen to
ATTENTION_KEEPS_STRIDES = (2, 14)  # the first release seen to

# Dynamo's own limit is a backstop far above any honest budget: on reaching it a frame falls to eager or raises,
# depending on the release and on fullgraph. Our own count is what enforces budgets.
RECOMPILE_LIMIT = 1024


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_TORCH = _release(torch.__version__)


def refuse_old_torch(version: str) -> None:
    """ImportError that says in one line what is needed, before what an old torch lacks fails in words of its own."""
    if _release(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"zoo needs torch {oldest} or newer, this is torch {version}; pip install --upgrade torch")


refuse_old_torch(torch.__version__)


def compile_limit_kwargs() -> dict[str, Any]:
    """Raise Dynamo's recompile limit for one ``torch.compile`` call.

    From 2.13 the limit is a keyword. Before, it exists only as process-wide configuration that is read at the first
    call, so patching it around ``.compile()`` would have no effect: there it is raised for the process.
    """
    # Importing Dynamo takes a second and brings Triton in: not before something is compiled.
    from torch._dynamo import config

    # The accumulated limit has no keyword in any release.
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, RECOMPILE_LIMIT)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": RECOMPILE_LIMIT}
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    return {}


def name_fallbacks_alone() -> None:
    """Let Inductor name an operator that it has no lowering of, and leave out what the operator is called with.

    2.11 writes that out for a log, shown or not, and with each argument what it is computed of. Where operators take
    the one before twice, as residuals do, that doubles with each: a chain of thirty is never done. 2.15 writes when
    somebody reads. Nothing is done before Inductor is there.
    """
    exc = sys.modules.get("torch._inductor.exc")
    if exc is not None and _TORCH < FALLBACKS_ARE_LAZY:
        exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def full_guards() -> dict[str, Any]:
    """Settings of Dynamo under which guards see that a parameter was cast, frozen or unfrozen in place.

    2.11 looks at no tensor of a module whose dicts are as they were (pytorch 177525): a layer that is unfrozen after
    its first steps would get no gradients, without a word.
    """
    return {} if _TORCH >= GUARDS_SEE_TENSORS else {"skip_tensor_guards_with_matching_dict_tags": False}


@contextlib.contextmanager
def strides_as_compiled() -> Iterator[None]:
    """Give what ``nn.MultiheadAttention`` returns the strides that it has in compiled code.

    Before 2.14 they differ where eager code takes its fast path.
    """
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(before and _TORCH >= ATTENTION_KEEPS_STRIDES)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)
