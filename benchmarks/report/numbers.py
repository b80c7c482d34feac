"""Numbers as text: three significant digits, no false precision and none thrown away where it decides."""

from __future__ import annotations

import math

from benchmarks.stats import Ratio

NOTHING = "–"


def significant(value: float | None) -> str:
    """Three significant digits, trailing zeros kept: ``0.500``, ``12.3``, ``4,567``; a dash for None."""
    if value is None:
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"  # more than three digits, but no power of ten to decode
    if abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".")


def times(value: float) -> str:
    """A speed-up: three significant digits, and three decimals around 1, where the third decides."""
    return f"{value:.3f}×" if 0.9 <= value < 1.1 else f"{significant(value)}×"


def interval(ratio: Ratio | None) -> str:
    """A speed-up with its interval: ``8.54× [8.49, 8.60]``."""
    if ratio is None:
        return NOTHING
    if not ratio.has_interval:
        return f"{times(ratio.value)} [{ratio.rounds} rounds]"
    return f"{times(ratio.value)} [{times(ratio.low)[:-1]}, {times(ratio.high)[:-1]}]"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage, three significant digits at most: ``0.42 %``."""
    if fraction is None:
        return NOTHING
    return "∞ %" if math.isinf(fraction) else f"{fraction * 100:.3g} %"


def exponent(value: float | None) -> str:
    """An error: ``2.1e-07``."""
    return NOTHING if value is None else "0" if value == 0 else f"{value:.1e}"


def mebibytes(number: int | None) -> str:
    """Bytes as MiB, the unit being in the column's head."""
    return significant(None if number is None else number / 2**20)


def calls(number: float | None) -> str:
    """Break-even calls: ``1,234``, ``43.5k``, ``never``; ``unclear`` for NaN."""
    if number is None:
        return NOTHING
    if math.isnan(number):
        return "unclear"
    if math.isinf(number):
        return "never"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 9.995 * unit:
            return significant(number / unit) + name
    return f"{number:,.0f}"


def count(number: int | None) -> str:
    """A whole number in full: ``10,556``."""
    return NOTHING if number is None else f"{number:,}"


def races(number: int) -> str:
    """``1 race``, ``20 races``."""
    return f"{number} race{'s' * (number != 1)}"
