"""A drawing as inline SVG: lines, markers, intervals and rules on linear or logarithmic axes.

    speedup over dense, ×          the name of y stands above the axis
    2 ┤      ●──●── ours           a line or a point has its name at the right edge
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
LINE = 11  # least distance of two names at the right edge
LEADER = 14  # length of the lines that lead to moved names
MOST_TICKS = 7
STEPS: list[tuple[float, ...]] = [(1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)]
LINEAR = [step * 10.0**power for power in range(-3, 5) for step in (1, 2, 5)]

HEAD = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" fill="{}" font-size="{}">'
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
        self._names: list[tuple[float, float, str, str]] = []

    def line(
        self, x: Values, y: Values, look: Look, titles: Sequence[str] = (), name: str = ""
    ) -> None:
        """Join points and mark them, with a tooltip each and a name at the right edge."""
        points = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
        points = [point for point in points if all(map(isfinite, point))]
        self._see([a for a, _ in points], [b for _, b in points])
        if name and points:
            self._names.append((*points[-1], name, look.color))

        def draw(to_x: Scale, to_y: Scale) -> str:
            places = [(to_x(a), to_y(b)) for a, b in points]
            body = ""
            if look.dash is not None and len(places) > 1:
                path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
                body = f'<path d="M{path}" fill="none"/>'
            if look.marker:
                texts = [*titles, *[""] * (len(places) - len(titles))]
                marks = "".join(
                    mark(look, *place, text) for place, text in zip(places, texts, strict=True)
                )
                fill, edge = (PAPER, "1.2") if look.hollow else (look.color, "0")
                body += f'<g fill="{fill}" stroke-width="{edge}">{marks}</g>'
            return f"<g{_stroke(look)}>{body}</g>"

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
            return f'<path d="{"".join(lines)}"{_stroke(look)}/>'

        self._drawn.append(draw)

    def rule(self, axis: str, value: float, look: Look = RULE, name: str = "") -> None:
        """Draw a line across the whole drawing at a value of an axis."""
        if look.alpha == 1:
            self._data[axis].append(value)
        if name and axis == "y":
            self._names.append((float("inf"), value, name, look.color))

        def draw(to_x: Scale, to_y: Scale) -> str:
            left, top, right, bottom = self._box
            upright = f"M{to_x(value):.1f} {top}V{bottom}" if axis == "x" else ""
            path = upright or f"M{left} {to_y(value):.1f}H{right}"
            return f'<path d="{path}"{_stroke(look)}/>'

        self._drawn.append(draw)

    def svg(self, label: str) -> Markup:
        """Return the drawing as an SVG element with a label for screen readers."""
        ends = {axis: self.limits.get(axis) or self._fit(axis) for axis in "xy"}
        ticks = {axis: self.ticks.get(axis) or self._ticks(axis, *ends[axis]) for axis in "xy"}
        wide = max((len(text) for _, text in ticks["y"]), default=0)
        names = max((len(name) for *_, name, _ in self._names), default=0)
        last = len(ticks["x"][-1][1]) / 2 if ticks["x"] else 0
        self._box = left, top, right, bottom = (
            round(wide * CHARACTER) + 9 if wide else 8,
            24 if self.names["y"] else 8,
            self.size[0] - round(max(6, names and names * CHARACTER + LEADER, last * CHARACTER)),
            self.size[1] - (36 if self.names["x"] else 20),
        )
        to_x = self._scale("x", ends["x"], left, right)
        to_y = self._scale("y", ends["y"], bottom, top)
        drawn = "".join(draw(to_x, to_y) for draw in self._drawn)
        body = self._axes(ticks, to_x, to_y) + drawn + self._write_names(to_x, to_y)
        return Markup(HEAD).format(*self.size, label, INK, FONT) + Markup(body + "</svg>")

    def _see(self, x: Values, y: Values) -> None:
        self._data["x"] += x
        self._data["y"] += y

    def _fit(self, axis: str) -> tuple[float, float]:
        """Return the ends of the data with a margin of 5 %."""
        values = [value for value in self._data[axis] if isfinite(value)] or [0.5, 1]
        low, high = min(values), max(values)
        if axis in self.log:
            margin = max((high / low) ** 0.05, 1.02)
            return low / margin, high * margin
        margin = 0.05 * (high - low) or 0.5
        return low - margin, high + margin

    def _ticks(self, axis: str, low: float, high: float) -> list[tuple[float, str]]:
        return [(value, f"{value:,g}") for value in round_values(low, high, axis in self.log)]

    def _scale(self, axis: str, ends: tuple[float, float], first: float, last: float) -> Scale:
        """Return a function from values to pixels; values outside the axis go to its edge."""
        place = log if axis in self.log else float
        low, high = place(ends[0]), place(ends[1])
        least, most = sorted((first, last))

        def pixel(value: float) -> float:
            share = (place(value) - low) / ((high - low) or 1) if isfinite(value) else 1
            return min(max(first + share * (last - first), least - 2), most + 2)

        return pixel

    def _axes(self, ticks: dict[str, list[tuple[float, str]]], to_x: Scale, to_y: Scale) -> str:
        left, _, right, bottom = self._box
        heights = [(to_y(value), label) for value, label in ticks["y"]]
        lines = "".join(f"M{left} {y:.1f}H{right}" for y, _ in heights)
        marks = "".join(f"M{to_x(value):.1f} {bottom}v3" for value, _ in ticks["x"])
        labels = apart([(to_x(value), label) for value, label in ticks["x"]])
        body = f'<path d="{lines}" stroke="{INK}" stroke-width="0.8" opacity="0.13"/>'
        body += f'<path d="M{left} {bottom}H{right}{marks}" stroke="{INK}" stroke-width="0.8"/>'
        body += _texts("end", [(left - 5, y + 3.5, label) for y, label in heights])
        body += _texts("middle", [(x, bottom + 13, label) for x, label in labels])
        body += _texts("middle", [((left + right) / 2, self.size[1] - 6, self.names["x"])])
        return body + _texts("start", [(2, 11, self.names["y"])])

    def _write_names(self, to_x: Scale, to_y: Scale) -> str:
        """Write names at the right edge, at least LINE apart, with lines that lead to them."""
        _, _, right, bottom = self._box
        names = sorted((to_y(y), x, name, color) for x, y, name, color in self._names)
        places: list[float] = []
        for y, *_ in names:
            places.append(max(y, places[-1] + LINE) if places else y)
        for i in reversed(range(len(places))):
            places[i] = min(places[i], places[i + 1] - LINE if i + 1 < len(places) else bottom)
        body = ""
        for (y, x, name, color), place in zip(names, places, strict=True):
            path = f"M{to_x(x):.1f} {y:.1f}L{right + LEADER - 6} {place:.1f}"
            text = _texts("start", [(right + LEADER - 3, place + 3.5, name)])
            body += f'<g fill="{color}"><path d="{path}" stroke="{color}" opacity="0.4"/>{text}</g>'
        return body


def named_rows(names: Sequence[str], width: int, row: int, x: str, log: str = "") -> Chart:
    """Return a drawing with a row of `row` pixels for each name; the first is at the top."""
    chart = Chart((width, 50 + row * len(names)), x, log=log)
    chart.limits["y"], chart.ticks["y"] = (len(names) - 0.4, -0.6), [*enumerate(names)]
    return chart


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

    On a logarithmic axis that spans more than a factor of 4 they are 1, 2, 5, ... times powers of
    10; on any other axis they are evenly spaced.
    """
    if logarithmic and high / low > 4:
        powers = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
        rulers = [[step * power for power in powers for step in steps] for steps in STEPS]
    else:
        fitting = [step for step in LINEAR if MOST_TICKS >= (high - low) / step > 1]
        ends = [(step, floor(low / step), ceil(high / step) + 1) for step in fitting]
        rulers = [[step * i for i in range(first, last)] for step, first, last in ends]
    rounded = [[float(f"{value:.6g}") for value in ruler] for ruler in rulers]
    inside = [[value for value in ruler if low <= value <= high] for ruler in rounded]
    return max((ruler for ruler in inside if len(ruler) <= MOST_TICKS), key=len, default=[])


def _stroke(look: Look) -> str:
    faint = f' opacity="{look.alpha:g}"' if look.alpha < 1 else ""
    dashes = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    return f' stroke="{look.color}" stroke-width="{look.width:g}"{faint}{dashes}'


def _texts(anchor: str, places: Iterable[tuple[float, float, str]]) -> str:
    texts = (
        f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>' for x, y, text in places if text
    )
    return f'<g text-anchor="{anchor}">{"".join(texts)}</g>'
