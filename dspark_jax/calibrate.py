"""How far confidences can be believed, and Sequential Temperature Scaling to mend them.

All in NumPy on recorded rounds. Position k of a round can be judged where it was verified: the
survival predicted for it is the product of the confidences up to k, and it happened if at least
k drafts were accepted.

Source: paper, Sequential Temperature Scaling.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

ECE_BINS = 20
TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 185))  # steps of 2.5 %, 1 is one
LARGEST_LOGIT = 16.0  # float32 confidences hold no more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traces:
    """Rounds of requests whose whole block was verified, one row per request and round.

    Attributes:
      confidence_logits: f32[N, K], before any temperature.
      accept_len: i32[N], drafts accepted.
      verify_len: i32[N], drafts verified: K, or what fitted before the end.
      prompt: i32[N], index of the prompt; the rows of one prompt are consecutive, in order.
      presampled_logits: f32[N, K], estimates made before any draft was drawn, if recorded.
      source: what made them: model, draft, temperature.
    """

    confidence_logits: np.ndarray
    accept_len: np.ndarray
    verify_len: np.ndarray
    prompt: np.ndarray
    presampled_logits: np.ndarray | None = None
    source: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        rows = self.confidence_logits.shape[0]
        shapes = [x.shape for x in (self.accept_len, self.verify_len, self.prompt)]
        if self.confidence_logits.ndim != 2 or any(shape != (rows,) for shape in shapes):
            raise ValueError(
                f"traces of confidence_logits {self.confidence_logits.shape} with {shapes}; "
                "expected [N, K], and [N] for accept_len, verify_len and prompt."
            )
        if rows == 0 or (self.accept_len > self.verify_len).any():
            raise ValueError("traces need at least one round, and accept no more than verified.")

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.confidence_logits.shape[1]

    def of_prompts(self, prompts: np.ndarray) -> "Traces":
        """The rows of some prompts."""
        kept = np.isin(self.prompt, prompts)
        early = self.presampled_logits
        return dataclasses.replace(
            self,
            confidence_logits=self.confidence_logits[kept],
            accept_len=self.accept_len[kept],
            verify_len=self.verify_len[kept],
            prompt=self.prompt[kept],
            presampled_logits=None if early is None else early[kept],
        )

    def split(self, share: float, seed: int = 0) -> tuple["Traces", "Traces"]:
        """Two parts that share no prompt.

        Args:
          share: of the prompts, in the first part.
          seed: of the shuffle.

        Returns:
          To fit on, and to judge by.

        Raises:
          ValueError: fewer than two prompts.
        """
        prompts = np.random.default_rng(seed).permutation(np.unique(self.prompt))
        if len(prompts) < 2:
            raise ValueError("a split by prompt needs the rounds of at least two prompts.")
        count = int(np.clip(round(share * len(prompts)), 1, len(prompts) - 1))
        return self.of_prompts(prompts[:count]), self.of_prompts(prompts[count:])

    def save(self, path: str | Path) -> None:
        """Writes NPZ."""
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        arrays["source"] = np.array(json.dumps(self.source))
        np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})


def load_traces(path: str | Path) -> Traces:
    """Reads what `Traces.save` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: an array is missing, or shapes do not fit.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"traces {path} not found; tools/calibrate.py --save-traces.")
    with np.load(path) as file:
        arrays = dict(file)
    names = {f.name for f in dataclasses.fields(Traces)}
    missing = names - {"presampled_logits"} - set(arrays)
    if missing or set(arrays) - names:
        raise ValueError(f"traces {path} hold {sorted(arrays)}; expected {sorted(names)}.")
    return Traces(**arrays | {"source": json.loads(str(arrays["source"]))})


def logits_of(confidence: np.ndarray) -> np.ndarray:
    """The logits f32 of probabilities, cut to what float32 probabilities can tell apart."""
    confidence = confidence.astype(np.float64)
    with np.errstate(divide="ignore"):
        logits = np.log(confidence) - np.log1p(-confidence)
    return np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT).astype(np.float32)


def survival_at(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Predicted survival.

    Args:
      logits: f32[N, K].
      temperatures: f64[K], positive; 1 leaves a position as it is.

    Returns:
      f64[N, K], cumulative products of sigmoid(logits / temperatures).
    """
    return np.cumprod(1.0 / (1.0 + np.exp(-logits.astype(np.float64) / temperatures)), axis=1)


def expected_calibration_error(
    predicted: np.ndarray, happened: np.ndarray, bins: int = ECE_BINS
) -> float:
    """Mean distance of prediction and frequency over equal bins, weighted by their counts.

    Args:
      predicted: f64[N] in 0..1.
      happened: bool[N].
      bins: of equal width; 1 belongs to the last.

    Returns:
      0..1; nan without events.
    """
    if len(predicted) == 0:
        return float("nan")
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    gap = np.bincount(place, weights=predicted - happened, minlength=bins)
    return float(np.abs(gap).sum() / len(predicted))


def ece_floor(predicted: np.ndarray, draws: int = 50, bins: int = ECE_BINS, seed: int = 0) -> float:
    """The ECE that chance alone gives perfectly calibrated predictions with this many events.

    Args:
      predicted: f64[N].
      draws: outcomes drawn to average over.
      bins: as for `expected_calibration_error`.
      seed: of the draws.

    Returns:
      0..1; nan without events.
    """
    rng = np.random.default_rng(seed)
    outcomes = rng.random((draws, len(predicted))) < predicted
    return float(np.mean([expected_calibration_error(predicted, o, bins) for o in outcomes]))


def brier_score(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Mean squared distance of prediction and outcome; nan without events."""
    if len(predicted) == 0:
        return float("nan")
    return float(np.mean((predicted - happened) ** 2))


def auc(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Probability that what happened was predicted above what did not; ties count half.

    Args:
      predicted: f64[N].
      happened: bool[N].

    Returns:
      0..1; nan unless both outcomes occur.
    """
    happened = happened.astype(bool)
    yes = int(happened.sum())
    no = len(happened) - yes
    if yes == 0 or no == 0:
        return float("nan")
    _, place, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2  # of each distinct value, from 1, ties averaged
    return float((rank[place][happened].sum() - yes * (yes + 1) / 2) / (yes * no))


def fit_temperatures(
    logits: np.ndarray, accept_len: np.ndarray, verify_len: np.ndarray
) -> np.ndarray:
    """Sequential Temperature Scaling.

    Positions from left to right: with the earlier temperatures fixed, the one of a fixed grid that
    makes the ECE of the cumulative product smallest; of equals, the closest to 1.

    Args:
      logits: f32[N, K].
      accept_len: i32[N].
      verify_len: i32[N]; a round counts at the positions it verified.

    Returns:
      f64[K]; 1 where no round tells.
    """
    block = logits.shape[1]
    by_closeness = TEMPERATURES[np.argsort(np.abs(np.log(TEMPERATURES)), kind="stable")]
    temperatures = np.ones(block)
    for k in range(block):
        seen = verify_len > k
        if not seen.any():
            continue
        happened = accept_len[seen] > k
        before = survival_at(logits[seen, :k], temperatures[:k])
        so_far = before[:, -1] if k else np.ones(seen.sum())
        errors = [
            expected_calibration_error(
                so_far * survival_at(logits[seen, k : k + 1], np.array([t]))[:, 0], happened
            )
            for t in by_closeness
        ]
        temperatures[k] = by_closeness[int(np.argmin(errors))]
    return temperatures


def judge(
    logits: np.ndarray, accept_len: np.ndarray, verify_len: np.ndarray, temperatures: np.ndarray
) -> dict[str, list[float]]:
    """ECE, Brier score and AUC of the predicted survival, by position.

    Args:
      logits: f32[N, K].
      accept_len: i32[N].
      verify_len: i32[N].
      temperatures: f64[K].

    Returns:
      "ece", "ece_floor" (what chance leaves of it), "brier", "auc", and "num_samples", each with
      K entries.
    """
    survival = survival_at(logits, temperatures)
    out: dict[str, list] = {"ece": [], "ece_floor": [], "brier": [], "auc": [], "num_samples": []}
    for k in range(logits.shape[1]):
        seen = verify_len > k
        predicted, happened = survival[seen, k], accept_len[seen] > k
        out["ece"].append(expected_calibration_error(predicted, happened))
        out["ece_floor"].append(ece_floor(predicted))
        out["brier"].append(brier_score(predicted, happened))
        out["auc"].append(auc(predicted, happened))
        out["num_samples"].append(int(seen.sum()))
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures by position, and how they did on prompts they were not fitted on.

    Attributes:
      temperatures: K positive numbers.
      presampled_temperatures: a set of their own for estimates made before drafting, or empty.
      neutral_confidence: the mean confidence by position, believed of new requests, or empty.
      dataset: what the prompts were.
      num_samples: rounds judged.
      ece_before: by position, held out, without temperatures; None where nothing was seen.
      ece_after: with them.
    """

    temperatures: tuple[float, ...]
    presampled_temperatures: tuple[float, ...] = ()
    neutral_confidence: tuple[float, ...] = ()
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float | None, ...] = ()
    ece_after: tuple[float | None, ...] = ()

    def __post_init__(self):
        values = np.array(self.temperatures + self.presampled_temperatures, np.float64)
        if len(self.temperatures) == 0 or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(
                f"temperatures {values.tolist()} must be positive numbers, one per position."
            )

    def tables(self) -> dict[str, np.ndarray]:
        """f32[K] arrays by the names of `ScheduleTables`; ones for what the calibration lacks."""
        given = {
            "sts_temperatures": self.temperatures,
            "sts_temperatures_presampled": self.presampled_temperatures,
            "neutral_confidence": self.neutral_confidence,
        }
        ones = (1.0,) * len(self.temperatures)
        return {name: np.array(values or ones, np.float32) for name, values in given.items()}

    def save(self, path: str | Path, **more: object) -> None:
        """Writes JSON that SGLang (`temperatures`) and TensorRT-LLM (`sts_temperatures`) read.

        Args:
          path: file to write.
          **more: other entries.
        """
        data = dataclasses.asdict(self) | {"sts_temperatures": self.temperatures} | more
        text = json.dumps(_without_nan(data), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def _without_nan(value: object) -> object:
    """JSON has no nan: what was never seen becomes null."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def load_calibration(path: str | Path, num_drafts: int | None = None) -> Calibration:
    """Reads temperatures under either key.

    Args:
      path: JSON file.
      num_drafts: K to insist on.

    Returns:
      The calibration.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not JSON, neither key or two that differ, or another number of positions.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"calibration {path} not found; make one with tools/calibrate.py.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"calibration {path} is not JSON: {error}.") from error
    data = data if isinstance(data, dict) else {}
    names = [n for n in ("temperatures", "sts_temperatures") if n in data]
    if not names or any(data[n] != data[names[0]] for n in names):
        raise ValueError(
            f"calibration {path} must hold `temperatures` or `sts_temperatures`, and the same "
            "numbers if both."
        )
    fields = {f.name for f in dataclasses.fields(Calibration)} - {"temperatures"}
    rest = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n in fields}
    calibration = Calibration(temperatures=tuple(data[names[0]]), **rest)
    found = len(calibration.temperatures)
    if num_drafts is not None and found != num_drafts:
        raise ValueError(
            f"calibration {path} has {found} temperatures, the draft proposes {num_drafts} tokens; "
            "fit it for this draft with tools/calibrate.py."
        )
    return calibration
