"""The picture of a run that other sites show beside a link: 1200 × 630 pixels, as PNG.

sparsebench · NVIDIA H200
Above what sparsity is a block format faster?       the question
5.5× [5.4, 5.6]                                     the headline
at 90 %: BSR with 128 × 128 blocks, bsr_wgmma ...
VERDICT · 8 processes · 2026-11-24                  the state
"""

import textwrap
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparsebench.reports.site.cards import Card
from sparsebench.results.formatting import amount

SIZE, DPI = (1200, 630), 100
INK, SOFT, BLUE = "#1a1c1e", "#5a5f64", "#0063a6"
LEFT = 0.06


def preview(card: Card, out_path: Path) -> None:
    """Draw the picture of a run."""
    figure = Figure(figsize=(SIZE[0] / DPI, SIZE[1] / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    gain = card.headline.get("gain", card.sentences[0])
    state = [card.badges[0][1], amount(card.processes, "process"), card.started[:10]]
    texts = [
        (0.92, f"sparsebench · {card.gpu}", 20, SOFT, 60, 1),
        (0.81, card.title, 28, INK, 52, 2),
        (0.58, gain, 44 if len(gain) < 30 else 26, BLUE, 52, 2),
        (0.40, card.headline.get("rest", ""), 20, INK, 78, 3),
        (0.12, " · ".join(state), 20, SOFT, 80, 1),
    ]
    for y, text, size, color, width, most in texts:
        lines = textwrap.wrap(text, width, max_lines=most, placeholder=" …")
        figure.text(
            LEFT, y, "\n".join(lines), size=size, color=color, va="top", linespacing=1.35
        ).set_parse_math(False)
    figure.savefig(out_path, metadata={"Software": None})
