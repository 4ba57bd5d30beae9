"""Pictures of acceptance."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 (the backend must be chosen first)


def acceptance_by_position(results: Mapping[str, dict], path: str | Path) -> None:
    """Draws acceptance by position, one line per prompt set, both ways of counting it.

    Args:
      results: label -> figures of `compare`.
      path: PNG to write.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    panels = (
        ("accept_per_position", "prefix survival: accepted / verified"),
        ("accept_per_position_conditional", "conditional: given that all earlier drafts passed"),
    )
    for axis, (key, title) in zip(axes, panels, strict=True):
        for label, figures in results.items():
            values = [float("nan") if v is None else v for v in figures[key]]
            axis.plot(range(1, len(values) + 1), values, marker="o", label=label)
        axis.set(title=title, xlabel="draft position", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("acceptance")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
