"""A table that a terminal, a Markdown page and an HTML page show alike.

    Table ─> rich             fits the window: `spare` columns are dropped first, words wrap
          ─> Markdown, HTML   every column

A cell is a text, or a text with a style: good, bad, unsure or quiet.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import rich.table
from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.text import Text

from sparsebench.reports.page import render
from sparsebench.results.formatting import join_words

GAP = 2  # spaces between columns
LONGEST = 40  # characters of a name; longer ones wrap
STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "quiet": "dim"}

Cell = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines below columns.

    words      columns of words: they are aligned to the left and may wrap
    spare      columns that a narrow window leaves out, in this order
    essential  spare columns that a line names if the window leaves them out
    """

    columns: Sequence[str]
    lines: Sequence[Sequence[Cell]]
    title: str = ""
    words: Iterable[str] = ()
    spare: Sequence[str] = ()
    essential: Sequence[str] = ()

    def shortened(self, most: int, note: str) -> "Table":
        """Return the first `most` lines; the title counts the others and adds `note`."""
        left = len(self.lines) - most
        if left <= 0:
            return self
        return replace(self, title=f"{self.title}; {left} {note}", lines=self.lines[:most])

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Draw the table in the width of the window."""
        if self.title:
            yield Text(self.title, style="bold")
        shown = self._fitting(options.max_width)
        if names := [name for name in self.essential if name not in shown]:
            yield Text(f"A wider window also shows {join_words(names)}.", style="dim")
        table = rich.table.Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        table.header_style = "dim"
        for name, width in self._widths(shown, options.max_width).items():
            justify: JustifyMethod = "left" if name in self.words else "right"
            table.add_column(Text(name), justify=justify, overflow="fold", width=width)
        for line in self.lines:
            cells = dict(zip(self.columns, map(split_style, line), strict=True))
            styled = ((cells[name][0], STYLES.get(cells[name][1], "")) for name in shown)
            table.add_row(*(Text(*cell) for cell in styled))
        yield table

    def markdown(self) -> str:
        """Return the title and a Markdown table."""
        lines = [[escape_markdown(split_style(cell)[0]) for cell in line] for line in self.lines]
        marks = ["---" if name in self.words else "---:" for name in self.columns]
        table = markdown_table([escape_markdown(name) for name in self.columns], lines, marks)
        return f"**{escape_markdown(self.title)}**\n\n{table}" if self.title else table

    def html(self) -> Markup:
        """Return an HTML table that becomes a list of paragraphs on a narrow screen."""
        heads = [name if name in self.words else f">{name}" for name in self.columns]
        title = Markup("<h2>{}</h2>\n").format(self.title) if self.title else Markup()
        return title + html_table(heads, self.lines, "stacked")

    def _fitting(self, window: int) -> list[str]:
        shown = list(self.columns)
        for name in self.spare:
            if sum(map(self._needed_width, shown)) + GAP * (len(shown) - 1) <= window:
                break
            if name in shown:
                shown.remove(name)
        return shown

    def _widths(self, shown: Sequence[str], window: int) -> dict[str, int]:
        """Return the widths of columns; together they are no wider than the window.

        A column of words has its longest word. What is left goes to the last one, if it holds
        words, up to LONGEST characters, then to the others from the left, then to the last one.
        Rich itself ignores the least widths of columns when it reduces them, and cuts the last one.
        """
        room = max(window - GAP * (len(shown) - 1), len(shown))
        last = shown[-1] if shown[-1] in self.words else ""
        whole = {name: self._width(name, most=room if name == last else LONGEST) for name in shown}
        widths = {n: self._longest_word(n) if n in self.words else whole[n] for n in shown}
        first = [(last, LONGEST)] if last else []
        for name, most in [*first, *whole.items()]:
            left = room - sum(widths.values())
            widths[name] += max(0, min(left, min(most, whole[name]) - widths[name]))
        while sum(widths.values()) > room:
            widths[max(widths, key=lambda name: widths[name])] -= 1
        return widths

    def _needed_width(self, name: str) -> int:
        """Return the width that a column should have: words may wrap, but not into one each."""
        width = self._width(name)
        return max(2 * width // 3, self._longest_word(name)) if name in self.words else width

    def _longest_word(self, name: str) -> int:
        place = list(self.columns).index(name)
        words = [word for line in self.lines for word in split_style(line[place])[0].split()]
        return min(max(map(cell_len, [name, *words])), LONGEST)

    def _width(self, name: str, most: int = LONGEST) -> int:
        place = list(self.columns).index(name)
        texts = (split_style(line[place])[0] for line in self.lines)
        return min(max(map(cell_len, [name, *texts])), most)


def markdown_table(
    columns: Sequence[str], lines: Iterable[Sequence[str]], marks: Sequence[str] = ()
) -> str:
    """Return a Markdown table of texts that are Markdown already."""
    table = [columns, marks or ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def html_table(
    heads: Sequence[str],
    lines: Iterable[Sequence[Cell]],
    classes: str = "",
    ids: Iterable[str] = (),
) -> Markup:
    """Return an HTML table that scrolls sideways; a head `>...` names a column of numbers.

    Texts of more than LONGEST characters wrap, so that numbers beside them stay in the window.
    `ids` are those of the lines, so that an address can point to one.
    """
    columns = [
        (head.removeprefix(">"), "num" if head.startswith(">") else "text") for head in heads
    ]
    rows = [
        (id_, [*map(_style, line)]) for line, id_ in zip(lines, ids or repeat(""), strict=False)
    ]
    stacked = "stacked" in classes
    return Markup(
        render("table.html", columns=columns, rows=rows, classes=classes, stacked=stacked)
    )


def without_dashes(
    heads: Sequence[str], lines: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Drop the columns that hold a dash in every line."""
    columns = [i for i in range(len(heads)) if not lines or any(line[i] != "–" for line in lines)]
    return [heads[i] for i in columns], [[line[i] for i in columns] for line in lines]


def split_style(cell: Cell) -> tuple[str, str]:
    """Return the text of a cell and its style."""
    return (cell, "") if isinstance(cell, str) else cell


def _style(cell: Cell) -> tuple[str, str]:
    text, style = split_style(cell)
    if not isinstance(text, Markup) and len(text) > LONGEST:
        style = f"{style} long".strip()
    return text, "vacant" if text in ("", "-") else style


INTERVAL = r"[-+−]?[\d.]+[^][]*\](?![(\[:])"  # after a bracket that begins no link
SIGNS = re.compile(rf"[\\|<{{}}*`~$]|\[(?!{INTERVAL})|&(?=[#\w])|:(?=//)|(?<!\w)_|_(?!\w)")
"""Signs that have a meaning in Markdown, or in what renders it, such as {{ }} in a template."""


def escape_markdown(text: str) -> str:
    """Return a text of one line that ends no cell, makes no link and is no HTML.

    Spaces before it stay, because they make a line belong to the one above.
    """
    spaces = text[: len(text) - len(text.lstrip(" "))]
    return spaces + SIGNS.sub(r"\\\g<0>", " ".join(text.split()))
