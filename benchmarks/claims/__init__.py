"""Claims about ``torch.compile`` that people repeat, each with what would have to be measured for it to hold.

None of them is taken on trust. Verdicts are made from rows alone and are in no file of this folder.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.costs import COSTS
from benchmarks.claims.gains import GAINS
from benchmarks.claims.limits import LIMITS
from benchmarks.claims.models import MODELS
from benchmarks.claims.modes import MODES
from benchmarks.claims.shapes import SHAPES

THEMES: dict[str, tuple[Claim, ...]] = {
    "What is gained": GAINS,
    "What it costs": COSTS,
    "Modes": MODES,
    "Shapes that change": SHAPES,
    "Single models": MODELS,
    "Beyond the kernels": LIMITS,
}
CLAIMS: dict[int, Claim] = {claim.number: claim for theme in THEMES.values() for claim in theme}
