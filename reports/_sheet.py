"""A table that a terminal, a Markdown page and an HTML page show alike.

    Sheet ─> rich     fitted to the window: `spare` columns go, the first first; words are folded
          ─> Markdown and HTML, with every column

A cell is text, or text and a style: good, bad, unsure, quiet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

GAP = 2  # between columns
LEAST = 10  # of a last column of words
LONGEST = 40  # of a name that is never cut; a longer one is folded
STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "quiet": "dim"}

Cell = str | tuple[str, str]


@dataclass(frozen=True)
class Sheet:
    """A title, columns and lines.

    words  columns of words: to the left, and folded where they are longer than LONGEST
    spare  columns that a narrow window does without
    """

    title: str
    columns: tuple[str, ...]
    lines: Sequence[Sequence[Cell]]
    words: frozenset[str] = frozenset()
    spare: tuple[str, ...] = ()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Draw the table in the width that there is."""
        if self.title:
            yield Text(self.title, style="bold")
        kept = self._kept(options.max_width)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        for name in kept:
            left, width = name in self.words, min(self._width(name), LONGEST)
            last = left and name == kept[-1]  # folded to what is left of the window
            table.add_column(
                Text(name),
                justify="left" if left else "right",
                no_wrap=not left,
                overflow="fold",
                width=None if last else width,
                min_width=LEAST if last else None,
            )
        places = [self.columns.index(name) for name in kept]
        for line in self.lines:
            table.add_row(*(Text(*_styled(line[place])) for place in places))
        yield table

    def markdown(self) -> str:
        """Return the title and a Markdown table."""
        title = [f"**{_plain(self.title)}**", ""] if self.title else []
        marks = ("---" if name in self.words else "---:" for name in self.columns)
        lines = [self.columns, marks, *([_styled(c)[0] for c in line] for line in self.lines)]
        return "\n".join([*title, *(f"| {' | '.join(map(_plain, line))} |" for line in lines)])

    def html(self) -> Markup:
        """Return an HTML table; styles are classes. A cell has its head, for narrow screens."""
        head = Markup("").join(Markup("<th>{}</th>").format(name) for name in self.columns)
        body = Markup("\n").join(self._row(line) for line in self.lines)
        title = Markup("<h2>{}</h2>\n").format(self.title) if self.title else Markup()
        table = (
            '<div class="scroll" tabindex="0"><table class="stacked">\n<thead><tr>{}</tr></thead>\n'
        )
        return title + Markup(table + "<tbody>\n{}\n</tbody></table></div>").format(head, body)

    def _row(self, line: Sequence[Cell]) -> Markup:
        cells = [
            Markup('<td class="{}" data-head="{}">{}</td>').format(
                style or ("vacant" if text in ("", "-") else ""), name, text
            )
            for name, (text, style) in zip(self.columns, map(_cell, line), strict=True)
        ]
        return Markup("<tr>{}</tr>").format(Markup("").join(cells))

    def _kept(self, window: int) -> list[str]:
        """Return the columns that fit: as many of the spare ones as there is room for."""
        kept = list(self.columns)
        for name in self.spare:
            widths = [min(self._width(kept_), LONGEST) for kept_ in kept]
            if sum(widths) + GAP * (len(kept) - 1) <= window:
                break
            if name in kept:
                kept.remove(name)
        return kept

    def _width(self, name: str) -> int:
        place = self.columns.index(name)
        texts = (_styled(line[place])[0] for line in self.lines)
        return max(map(cell_len, [name, *texts]))


def _cell(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


def _styled(cell: Cell) -> tuple[str, str]:
    text, style = _cell(cell)
    return text, STYLES.get(style, "")


def _plain(text: str) -> str:
    """Return text that ends no cell, draws no link and is no HTML."""
    for sign in "\\|<[*`":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
