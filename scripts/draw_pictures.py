"""Draws the pictures of docs/concepts.md.

    python scripts/draw_pictures.py            writes docs/pictures/*.svg
    python scripts/draw_pictures.py --check    exits with 1 if they are not what this script draws

SVG, so that a change shows in a diff and the site needs nothing from a network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"

INK, PALE, GREY = "#1f2937", "#f3f4f6", "#9ca3af"
BLUE, ORANGE, GREEN, RED = "#bfdbfe", "#fed7aa", "#bbf7d0", "#fecaca"


class Drawing:
    """An SVG picture, made part by part; lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = PALE, dashed: bool = False
    ) -> None:
        """A rectangle with text in its middle, a line of it for each line."""
        dash, colour = (' stroke-dasharray="3 3"', GREY) if dashed else ("", INK)
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{colour}"{dash}/>'
        )
        lines = text.split("\n") if text else []
        for index, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4.5 + 16 * (index - (len(lines) - 1) / 2), line, anchor="middle")

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, colour: str = INK
    ) -> None:
        """A line of text, its baseline at ``y``; between backticks code, of middled text all or nothing."""
        parts = escape(text).split("`")
        inner = "".join(
            f'<tspan font-family="monospace" font-size="12">{part}</tspan>' if index % 2 else part
            for index, part in enumerate(parts)
        )
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{inner}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points, with a tip at the last."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        """The picture's file."""
        return "\n".join([*self._parts, "</svg>\n"])


def presentation() -> Drawing:
    """What each rank's inner optimizer sees of two parameters, between steps and while it steps."""
    drawing = Drawing(860, 330, "What the inner optimizer sees while it steps")
    columns = [
        ("`dtensor`", "and between steps: DTensors", {0: "AB", 1: "AB"}, True),
        ("`local`", "this rank's shards", {0: "AB", 1: "AB"}, True),
        ("`owner`", "whole, on one rank each", {0: "A", 1: "B"}, False),
        ("`replicated`", "whole, on every rank", {0: "AB", 1: "AB"}, False),
    ]
    for column, (name, what, holds, cut) in enumerate(columns):
        x = 90 + 195 * column
        drawing.text(x + 75, 24, name, anchor="middle", bold=True)
        drawing.text(x + 75, 44, what, anchor="middle")
        for rank in range(2):
            y = 66 + 125 * rank
            for letter, left, width in (("A", x, 84), ("B", x + 96, 54)):
                fill = BLUE if letter == "A" else ORANGE
                mine = letter in holds[rank]
                for row in range(4):
                    there = mine and (not cut or row // 2 == rank)
                    hidden = cut and name == "`local`" and not there
                    if not hidden:
                        drawing.box(left, y + 22 * row, width, 22, fill=fill if there else "white", dashed=not there)
    for rank in range(2):
        drawing.text(20, 115 + 125 * rank, f"rank {rank}", bold=True)
    drawing.text(90, 318, "Full cells: memory on this rank. Dashed: part of the tensor's shape, or of another rank.")
    return drawing


def layout() -> Drawing:
    """From entries of an optimizer's state to keys of a checkpoint."""
    drawing = Drawing(860, 350, "Where an entry of state goes in a checkpoint")
    drawing.text(20, 24, "state of `layer.weight`, shape (4, 6)", bold=True)
    drawing.text(330, 24, "its layout", bold=True)
    drawing.text(560, 24, "key in the checkpoint", bold=True)
    rows = [
        (
            "exp_avg, shape (4, 6)",
            "element-wise: boxes",
            BLUE,
            "`state.layer.weight.exp_avg`",
            "a tensor of shape (4, 6)",
        ),
        ("step, 0-d or a number", "a value", GREEN, "`manifest`", "JSON as bytes"),
        ("factors, any tensors", "whole values", ORANGE, "`blob.layer.weight`", "bytes, a chunk for each tensor"),
        ("8-bit codes and scales", "blockwise: boxes", BLUE, "`state.….state1`, `….state1.scale`", "two tensors"),
        (
            "what only this rank knows",
            "rank-local, declared",
            PALE,
            "`rank.0.blob.layer.weight`",
            "bytes, same ranks only",
        ),
        ("anything else", "no known place", RED, "refused", "parameter, entry, shape, what to do"),
    ]
    for index, (entry, name, fill, key, stored) in enumerate(rows):
        y = 40 + 50 * index
        drawing.box(20, y, 220, 36, entry)
        drawing.arrow((240, y + 18), (318, y + 18))
        drawing.box(320, y, 170, 36, name, fill=fill)
        drawing.arrow((490, y + 18), (548, y + 18))
        drawing.text(560, y + 15, key)
        drawing.text(560, y + 32, stored, colour="#4b5563")
    return drawing


def load() -> Drawing:
    """The life of a load on two ranks."""
    drawing = Drawing(860, 330, "The life of a load")
    steps = [
        ("ask", "state_dict():\nhandles, no copies"),
        ("read", "DCP fills scratch\nbeside live memory"),
        ("prepare", "names, shapes,\ndtypes, coverage,\ngroups"),
        ("agree", "one vote"),
        ("commit", "copy in place,\nthen publish"),
    ]
    for index, (name, what) in enumerate(steps):
        x = 80 + 156 * index
        drawing.text(x + 68, 24, name, anchor="middle", bold=True)
        fill = GREEN if name == "commit" else ORANGE if name == "agree" else BLUE
        if name == "agree":
            drawing.box(x, 40, 136, 170, "one vote:\none rank's problem\nis every rank's", fill=fill)
        else:
            for rank in range(2):
                drawing.box(x, 40 + 100 * rank, 136, 70, what, fill=fill)
        if index:
            for rank in range(2):
                drawing.arrow((x - 20, 75 + 100 * rank), (x - 2, 75 + 100 * rank))
    for rank in range(2):
        drawing.text(16, 79 + 100 * rank, f"rank {rank}", bold=True)
    drawing.arrow((616, 210), (616, 248))
    drawing.box(470, 250, 292, 44, "an error on every rank, all problems in it;\nnothing was changed", fill=RED)
    drawing.text(80, 268, "Live state, groups and random numbers are")
    drawing.text(80, 285, "not written to before `commit`.")
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {"presentation": presentation, "layout": layout, "load": load}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    files = {PICTURES / f"{name}.svg": draw().svg() for name, draw in DRAWINGS.items()}
    if not check:
        PICTURES.mkdir(exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what is drawn; run python scripts/draw_pictures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
