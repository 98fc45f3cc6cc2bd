"""A drawing as inline SVG: lines, markers, bands and rules on linear or logarithmic axes.

    speedup over dense, ×          the name of y stands above the axis
    2 ┤      ●──● ours             a line may have its name at its right end
    1 ┼──────────── dense          ticks are round values, and always include 1 if it is in range
      └─┬────┬─── sparsity, %      a marker may have a tooltip

Calls collect what to draw; `svg` then fits the axes to it and writes it. Whatever lies outside set
limits is drawn at the edge. A drawing takes a millisecond, where one of matplotlib took 100.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, isfinite, log, log10

from markupsafe import Markup, escape

from sparsebench.reports.figures._svg import INK, PAPER, Look, mark

SIZE = (270, 200)  # CSS pixels, before the page scales it
CHARACTER = 5.6  # CSS pixels of a character at FONT
FONT = 10
LINE = 11  # least distance of two names at the ends of lines
MOST_TICKS = 7
STEPS = [(1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
LINEAR = [step * 10.0**power for power in range(-3, 5) for step in (1, 2, 5)]

RULE = Look()

Values = Iterable[float]
Scale = Callable[[float], float]


class Chart:
    """A drawing of `size` pixels with the names of its axes; `log` names the logarithmic ones.

    limits  by axis: its ends; without them they fit the data
    ticks   by axis: places and labels; without them they are round values
    """

    def __init__(
        self, size: tuple[int, int] = SIZE, x: str = "", y: str = "", log: str = ""
    ) -> None:
        self.size, self.names, self.log = size, {"x": x, "y": y}, log
        self.limits: dict[str, tuple[float, float]] = {}
        self.ticks: dict[str, list[tuple[float, str]]] = {}
        self._data: dict[str, list[float]] = {"x": [], "y": []}
        self._drawn: list[Callable[[Scale, Scale], str]] = []
        self._ends: list[tuple[float, float, str, str]] = []

    def line(
        self,
        x: Values,
        y: Values,
        look: Look,
        titles: Sequence[str] = (),
        name: str = "",
        classes: str = "",
    ) -> None:
        """Join points and mark them, with a tooltip each and a name at the right end."""
        points = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
        points = [point for point in points if all(map(isfinite, point))]
        self._see([a for a, _ in points], [b for _, b in points])
        if name and points:
            self._ends.append((*points[-1], name, look.color))

        def draw(to_x: Scale, to_y: Scale) -> str:
            places = [(to_x(a), to_y(b)) for a, b in points]
            body = ""
            if look.dash is not None and len(places) > 1:
                path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
                dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
                body = f'<path d="M{path}" fill="none"{dash}/>'
            if look.marker:
                texts = [*titles, *[""] * (len(places) - len(titles))]
                shapes = zip(places, texts, strict=True)
                marks = [_mark(look, *place, text) for place, text in shapes]
                fill, edge = (PAPER, "1.2") if look.hollow else (look.color, "0")
                body += f'<g fill="{fill}" stroke-width="{edge}">{"".join(marks)}</g>'
            head = f'<g class="{classes}"' if classes else "<g"
            faint = f' opacity="{look.alpha:g}"' if look.alpha < 1 else ""
            return f'{head} stroke="{look.color}" stroke-width="{look.width:g}"{faint}>{body}</g>'

        self._drawn.append(draw)

    def band(self, x: Values, low: Values, high: Values, color: str) -> None:
        points = [p for p in zip(x, low, high, strict=True) if all(map(isfinite, p))]
        self._see([p[0] for p in points], [end for p in points for end in p[1:]])

        def draw(to_x: Scale, to_y: Scale) -> str:
            there = [f"{to_x(a):.1f} {to_y(b):.1f}" for a, b, _ in points]
            back = [f"{to_x(a):.1f} {to_y(c):.1f}" for a, _, c in reversed(points)]
            return f'<path d="M{"L".join(there + back)}z" fill="{color}" opacity="0.18"/>'

        if points:
            self._drawn.append(draw)

    def spans(
        self, place: Values, low: Values, high: Values, look: Look, across: bool = False
    ) -> None:
        """Draw intervals: upright at places on x, or `across` at places on y."""
        ends = [p for p in zip(place, low, high, strict=True) if all(map(isfinite, p))]
        along, values = [p[0] for p in ends], [end for p in ends for end in p[1:]]
        self._see(*(values, along) if across else (along, values))

        def draw(to_x: Scale, to_y: Scale) -> str:
            if across:
                lines = [f"M{to_x(b):.1f} {to_y(a):.1f}H{to_x(c):.1f}" for a, b, c in ends]
            else:
                lines = [f"M{to_x(a):.1f} {to_y(b):.1f}V{to_y(c):.1f}" for a, b, c in ends]
            style = f'stroke="{look.color}" stroke-width="{look.width:g}" opacity="{look.alpha:g}"'
            return f'<path d="{"".join(lines)}" {style}/>'

        self._drawn.append(draw)

    def rule(self, axis: str, value: float, look: Look = RULE, name: str = "") -> None:
        """Draw a line across the whole drawing at a value of an axis."""
        if axis in self._data and look.alpha == 1:
            self._data[axis].append(value)

        def draw(to_x: Scale, to_y: Scale) -> str:
            left, top, right, bottom = self._box
            at = to_x(value) if axis == "x" else to_y(value)
            path = f"M{at:.1f} {top}V{bottom}" if axis == "x" else f"M{left} {at:.1f}H{right}"
            dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
            style = f'stroke-width="{look.width:g}" opacity="{look.alpha:g}"{dash}'
            return f'<path d="{path}" stroke="{look.color}" {style}/>'

        if name and axis == "y":
            self._ends.append((float("inf"), value, name, look.color))
        self._drawn.append(draw)

    def text(self, x: float, y: float, text: str) -> None:
        """Write a text above and left of a point."""
        words = f'text-anchor="end" font-size="8">{escape(text)}</text>'
        self._drawn.append(lambda a, b: f'<text x="{a(x) - 4:.1f}" y="{b(y) - 4:.1f}" {words}')

    def area(self, low: float, high: float) -> None:
        """Shade the drawing between two values of x."""

        def draw(to_x: Scale, to_y: Scale) -> str:
            _, top, _, bottom = self._box
            box = f'x="{to_x(low):.1f}" y="{top}" width="{to_x(high) - to_x(low):.1f}"'
            return f'<rect {box} height="{bottom - top}" fill="{INK}" opacity="0.08"/>'

        self._data["x"] += [low, high]
        self._drawn.append(draw)

    def svg(self, label: str) -> Markup:
        """Return the drawing as an SVG element with a label for screen readers."""
        ends = {axis: self._fit(axis) for axis in "xy"}
        ticks = {axis: self.ticks.get(axis) or self._round(axis, *ends[axis]) for axis in "xy"}
        wide = max((len(text) for _, text in ticks["y"]), default=0)
        names = max((len(name) for *_, name, _ in self._ends), default=0)
        last = len(ticks["x"][-1][1]) / 2 if ticks["x"] else 0
        top = 24 if self.names["y"] else 8
        self._box = (
            round(wide * CHARACTER) + 9 if wide else 8,
            top,
            self.size[0] - max(6, round(names * CHARACTER + 8), round(last * CHARACTER)),
            self.size[1] - (36 if self.names["x"] else 20),
        )
        left, top, right, bottom = self._box
        to_x = self._scale("x", ends["x"], left, right)
        to_y = self._scale("y", ends["y"], bottom, top)
        drawn = "".join(draw(to_x, to_y) for draw in self._drawn)
        box = f"0 0 {self.size[0]} {self.size[1]}"
        body = self._axes(ticks, to_x, to_y) + drawn + self._write_names(to_y)
        head = Markup('<svg viewBox="{}" role="img" aria-label="{}" fill="{}" font-size="{}">')
        return head.format(box, label, INK, FONT) + Markup(body + "</svg>")

    def _see(self, x: Values, y: Values) -> None:
        self._data["x"] += x
        self._data["y"] += y

    def _fit(self, axis: str) -> tuple[float, float]:
        """Return the ends of an axis: its limits, or the data with a margin of 5 %."""
        if axis in self.limits:
            return self.limits[axis]
        values = [value for value in self._data[axis] if isfinite(value)] or [0.5, 1]
        low, high = min(values), max(values)
        if axis in self.log:
            margin = max((high / low) ** 0.05, 1.02)
            return low / margin, high * margin
        margin = 0.05 * (high - low) or 0.5
        return low - margin, high + margin

    def _round(self, axis: str, low: float, high: float) -> list[tuple[float, str]]:
        values = round_values(low, high, logarithmic=axis in self.log)
        return [(value, f"{value:,g}") for value in values]

    def _scale(self, axis: str, ends: tuple[float, float], first: float, last: float) -> Scale:
        """Return a function from values to pixels; values outside the axis go to its edge."""
        place = log if axis in self.log else float
        low, high = place(ends[0]), place(ends[1])
        least, most = sorted((first, last))

        def pixel(value: float) -> float:
            share = (place(value) - low) / ((high - low) or 1)
            return min(max(first + share * (last - first), least - 2), most + 2)

        return pixel

    def _axes(self, ticks: dict[str, list[tuple[float, str]]], to_x: Scale, to_y: Scale) -> str:
        left, _, right, bottom = self._box
        lines, texts = [], []
        for value, label in ticks["y"]:
            y = to_y(value)
            lines.append(f"M{left} {y:.1f}H{right}")
            texts.append(f'<text x="{left - 5}" y="{y + 3.5:.1f}">{escape(label)}</text>')
        body = f'<path d="{"".join(lines)}" stroke="{INK}" stroke-width="0.8" opacity="0.13"/>'
        body += f'<g text-anchor="end">{"".join(texts)}</g>'
        labels = []
        for value, label in apart([(to_x(value), label) for value, label in ticks["x"]]):
            labels.append(f'<text x="{value:.1f}" y="{bottom + 13}">{escape(label)}</text>')
        marks = "".join(f"M{to_x(value):.1f} {bottom}v3" for value, _ in ticks["x"])
        body += f'<path d="M{left} {bottom}H{right}{marks}" stroke="{INK}" stroke-width="0.8"/>'
        body += f'<g text-anchor="middle">{"".join(labels)}</g>'
        if self.names["x"]:
            place = f'x="{(left + right) / 2:.0f}" y="{self.size[1] - 6}" text-anchor="middle"'
            body += f"<text {place}>{escape(self.names['x'])}</text>"
        return body + (
            f'<text x="2" y="11">{escape(self.names["y"])}</text>' * bool(self.names["y"])
        )

    def _write_names(self, to_y: Scale) -> str:
        """Write the names of lines right of their ends, at least LINE apart."""
        right, body, free = self._box[2], "", float("-inf")
        ends = sorted((max(to_y(y), free), name, color) for _, y, name, color in self._ends)
        for y, name, color in ends:
            free = max(y, free + LINE)
            place = f'x="{right + 5}" y="{free + 3.5:.1f}"'
            body += f'<text {place} fill="{color}">{escape(name)}</text>'
        return body


def apart(labels: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Drop the labels that would touch the next one; places are pixels from the left."""
    places: list[tuple[float, str]] = []
    free = float("inf")
    for middle, label in sorted(labels, reverse=True):
        half = CHARACTER * (len(label) + 1) / 2
        if middle + half <= free:
            places.append((middle, label))
            free = middle - half
    return places[::-1]


def round_values(low: float, high: float, logarithmic: bool = True) -> list[float]:
    """Return at most MOST_TICKS round values between two; they include 1 if it lies between.

    On a logarithmic axis they are 1, 2, 5 or 1, 1.25, 1.5, 2, ...; if it spans less, evenly spaced.
    """
    best: list[float] = []
    if logarithmic:
        for steps in STEPS:
            powers = range(floor(log10(low)) - 1, ceil(log10(high)) + 1)
            values = [float(f"{step * 10.0**power:.6g}") for power in powers for step in steps]
            inside = [value for value in values if low <= value <= high]
            best = inside if len(best) < len(inside) <= MOST_TICKS else best
        if len(best) >= 4 or high / low > 4:
            return best
    for step in sorted(LINEAR, reverse=True):
        first, last = ceil(round(low / step, 6)), floor(round(high / step, 6))
        if 4 <= last - first + 1 <= MOST_TICKS + 1:
            return [float(f"{step * i:.6g}") for i in range(first, last + 1)]
    return best


def _mark(look: Look, x: float, y: float, title: str) -> str:
    shape = mark(look.marker, x, y, look.size)
    return (
        f"{shape}><title>{escape(title)}</title></{shape[1 : shape.index(' ')]}>"
        if title
        else f"{shape}/>"
    )
