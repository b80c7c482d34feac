"""Short texts beside the points of a figure, each where it hides the least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

LETTER_WIDTH, LETTER_HEIGHT = 5.6, 9.0  # points, of the figures' font
POINT = 4.0  # half a marker

Box = tuple[float, float, float, float]  # left, bottom, right, top


def label(figure: Figure, axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Write a text beside each point. The axes must have their limits: what is placed here does not move with them."""
    figure.draw_without_rendering()  # lays the figure out, so that points have their places
    scale = 72 / figure.dpi
    places = [tuple(value * scale for value in axes.transData.transform(point)) for point in points]
    taken: list[Box] = [(x - POINT, y - POINT, x + POINT, y + POINT) for x, y in places]
    left, bottom, right, top = (value * scale for value in axes.bbox.extents)
    for point, (x, y), text in zip(points, places, texts, strict=True):
        width = LETTER_WIDTH * len(text)
        best, least = (0.0, 0.0), float("inf")
        for dx, dy in _around(width, LETTER_HEIGHT):
            box = (x + dx, y + dy, x + dx + width, y + dy + LETTER_HEIGHT)
            outside = box[0] < left or box[1] < bottom or box[2] > right or box[3] > top
            hidden = sum(_overlap(box, other) for other in taken) + 1e4 * outside
            if hidden < least:
                best, least = (dx, dy), hidden
        taken.append((x + best[0], y + best[1], x + best[0] + width, y + best[1] + LETTER_HEIGHT))
        axes.annotate(text, point, best, textcoords="offset points", va="bottom", ha="left")


def _around(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Offsets of a text's lower left corner from its point, the nearest and best to read first."""
    for away in (5.0, 14.0, 23.0):
        right, left, above, below = away, -away - width, away - 1, 1 - away - height
        yield from ((right, -height / 2), (-width / 2, above), (left, -height / 2), (-width / 2, below))
        yield from ((right, above), (right, below), (left, above), (left, below))


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)
