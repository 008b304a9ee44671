"""The picture of examples/grafana.json: the first panels of each row with the answers of a Prometheus, which
tests/test_dashboard.py records."""

import matplotlib.pyplot as plt
from drawing import GREY, OURS, Facts, read
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

SERIES = 2  # of a panel
UNIT = 1.25  # inches of a line of panels


def dashboard(columns: int) -> Figure:
    """Four rows of as many panels, and as many numbers."""
    rows: list[tuple[str, list[Facts]]] = []
    for panel in read("figures/dashboard.json")["panels"]:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    lines = [(rows[0][0], rows[0][1][:3]), ("", rows[0][1][3:]), *rows[1:]]
    width = 3.2 if columns > 2 else 2.3  # a phone's panels are smaller, and their letters larger
    figure = plt.figure(figsize=(width * columns, UNIT * len(lines)))
    for at, (title, panels) in enumerate(lines):
        top, height = 1 - at / len(lines), 1 / len(lines)
        figure.text(0.005, top - 0.04 * height, title, fontsize=9.5, weight="bold", va="top")
        for column, panel in enumerate(panels[:columns]):
            draw(figure, panel, columns, (0.05 + column / columns, top - 0.9 * height, 0.78 / columns, 0.42 * height))
    return figure


def draw(figure: Figure, panel: Facts, columns: int, area: tuple[float, float, float, float]) -> None:
    axes, series = figure.add_axes(area), panel["series"][:SERIES]
    axes.set_title(panel["title"], fontsize=8)
    if panel["type"] == "stat":
        axes.text(0, 0.4, f"{series[0]['values'][-1]:.2f}", fontsize=18, color=OURS, va="center")
        axes.axis("off")
        return
    for line in series:
        axes.plot(line["values"], linewidth=1.3, label=line["legend"])
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.tick_params(labelsize=6, length=0)
    axes.legend(fontsize=6, frameon=False, loc="lower right", labelcolor=GREY, ncols=columns - 1)
