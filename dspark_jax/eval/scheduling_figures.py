"""Pictures of calibration and of simulated load."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from dspark_jax.calibrate import ECE_BINS, Traces, survival_at

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 (the backend must be chosen first)


def reliability(traces: Traces, temperatures: np.ndarray, path: str | Path) -> None:
    """Draws how often a predicted survival came true, before and after the temperatures.

    Args:
      traces: held-out rounds.
      temperatures: f64[K].
      path: PNG to write.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    ones = np.ones(traces.num_drafts)
    panels = ((ones, "as the draft says"), (temperatures, "with temperatures"))
    for axis, (used, title) in zip(axes, panels, strict=True):
        survival = survival_at(traces.confidence_logits, used)
        for k in range(traces.num_drafts):
            seen = traces.verify_len > k
            if not seen.any():
                continue
            place = np.minimum((survival[seen, k] * ECE_BINS).astype(int), ECE_BINS - 1)
            count = np.bincount(place, minlength=ECE_BINS)
            filled = count > 0
            mean = np.bincount(place, weights=survival[seen, k], minlength=ECE_BINS)
            true = np.bincount(place, weights=traces.accept_len[seen] > k, minlength=ECE_BINS)
            axis.plot(
                mean[filled] / count[filled], true[filled] / count[filled], marker=".",
                label=f"position {k + 1}",
            )  # fmt: skip
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accepted")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
) -> None:
    """Draws one line per series over common points.

    Args:
      x: points.
      series: label -> values; "oracle" is drawn dashed.
      path: PNG to write.
      title: of the figure.
      xlabel: of the points.
      ylabel: of the values.
      log_x: logarithmic, with every point on the axis.
    """
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for label, values in series.items():
        style = {"linestyle": "--", "color": "black"} if label == "oracle" else {"marker": "."}
        axis.plot(x, values, label=label, **style)
    if log_x:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(x), [str(value) for value in x])
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
