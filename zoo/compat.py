"""What only some supported torch releases have, gated here and nowhere else."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

OLDEST_TORCH = (2, 11)

# Dynamo's own limit is a backstop far above any honest budget: on reaching it a frame falls to eager or raises,
# depending on the release and on fullgraph. Our own count is what enforces budgets.
RECOMPILE_LIMIT = 1024


def refuse_old_torch(version: str) -> None:
    """Say in one line what is needed, before something that an old torch does not have fails in words of its own.

    Raises:
        ImportError: If the release is older than the oldest supported.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release < OLDEST_TORCH:
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
