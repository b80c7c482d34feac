"""Matplotlib figures as SVG that stands inside an HTML page: it follows the page's colours and repeats no id."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Matplotlib knows no CSS variables. It draws in these colours, and each becomes the page's variable of that name.
COLOURS = {
    "ink": "#000001",
    "faint": "#000002",
    "zoo": "#000003",
    "upstream": "#000004",
    "tuned": "#000005",
    "paper": "#000006",
}
INK, FAINT, ZOO, UPSTREAM, TUNED, PAPER = COLOURS.values()

STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and coloured
    "svg.hashsalt": "report",
    "text.parse_math": False,  # a $ in an arm's name is a dollar
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
POINTS_PER_INCH = 72
FONT = re.compile(r"font: ?(?:[a-z]+ )*(\d+(?:\.\d+)?)px [^;]*|font-family: ?[^;]*;? ?")
REFERENCE = re.compile(r"(?:^|url\()#([\w-]+)")
NUMBER = re.compile(r"-?\d+\.\d{3,}")


def draw(paint: Callable[[Figure], None], *, width: float, height: float, label: str, prefix: str) -> Markup:
    """An ``<svg>`` element of what ``paint`` puts on a figure, as wide as its place on the page and no wider.

    Args:
        paint: Fills the figure, in ``COLOURS`` alone.
        width: Points.
        height: Points.
        label: What the figure shows, for who cannot see it.
        prefix: Starts every id in it; unlike that of any other figure on the page.
    """
    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH))
        FigureCanvasSVG(figure)
        paint(figure)
        nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    root = ElementTree.fromstring(written.getvalue())
    _clean(root)
    _rename_ids(root, prefix)
    view = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib |= {"viewBox": view, "role": "img", "aria-label": label, "style": f"max-width:{width / 0.75:.0f}px"}
    text = ElementTree.tostring(root, encoding="unicode")
    return Markup(text)  # by an XML writer, which has escaped every text in it


def _clean(root: ElementTree.Element) -> None:
    """Drop what only a file of its own needs: namespaces, metadata, a style sheet, fonts, digits nobody sees."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: _rounded(value) for name, value in element.attrib.items()}
        if style := attributes.get("style"):
            attributes["style"] = _short(style)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        element.attrib.clear()
        element.attrib |= attributes
        if element.tag != "text":
            element.text = None
        element.tail = None


def _short(style: str) -> str:
    """A style without fonts, which are the page's, and with the page's colours."""
    style = FONT.sub(lambda found: f"font-size:{found[1]}px" if found[1] else "", style)
    for name, colour in COLOURS.items():
        style = style.replace(colour, f"var(--{name})")
    return style.replace("; ", ";").replace(": ", ":")


def _rounded(value: str) -> str:
    return NUMBER.sub(lambda found: f"{float(found[0]):.2f}", " ".join(value.split()))


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Ids that something refers to get the prefix; the others go."""
    values = [value for element in root.iter() for key, value in element.attrib.items() if key != "id"]
    used = dict.fromkeys(found for value in values for found in REFERENCE.findall(value))
    names = {old: f"{prefix}-{number}" for number, old in enumerate(used)}
    for element in root.iter():
        if (name := element.attrib.pop("id", None)) in names:
            element.attrib["id"] = names[name]
        for key, value in element.attrib.items():
            element.attrib[key] = REFERENCE.sub(lambda found: found[0].replace(found[1], names[found[1]]), value)
