"""SPS(B) on file: steps per second of a round by requests, verified rows and context length.

A table holds whole rounds (draft, schedule, verify, accept) on a grid of points. Between points it
is a staircase where programs have a fixed number of rows (every B costs what the next larger
bucket costs), and linear or rounded down where it comes from an engine that looks it up so.

Our own format is JSON with `"format": "dspark_jax.sps"`. SGLang's two forms (a table of verified
tokens; bias + alpha(requests) + theta(tokens)) and TensorRT-LLM's cost table are read as well.
"""

import bisect
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dspark_jax.chips import Chip

FORMAT = "dspark_jax.sps"
LOOKUPS = ("staircase", "floor", "linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpsKey:
    """What a table was made for; an empty field is unknown and not compared.

    Attributes:
      device: kind and count, as `1x TPU v5 lite`.
      model: name of the target.
      draft: what of the draft sets its cost: layers, block, heads.
      dtype: of weights and caches.
      versions: package -> version; a difference is told, not refused.
    """

    device: str = ""
    model: str = ""
    draft: str = ""
    dtype: str = ""
    versions: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of a round by verified rows, at one number of requests and one context length.

    Attributes:
      requests: R the programs were compiled for; 0 stands for any.
      context_len: rows of context per request; 0 if unknown.
      verify_tokens: increasing numbers of rows.
      seconds: for each, never less than for fewer rows.
      undrafted_seconds: of a round that drafts nothing; None if unknown.
    """

    requests: int
    context_len: int
    verify_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    undrafted_seconds: float | None = None

    def __post_init__(self):
        tokens, seconds = np.array(self.verify_tokens), np.array(self.seconds)
        where = f"SPS curve of {self.requests} requests, context {self.context_len}"
        if len(tokens) == 0 or len(tokens) != len(seconds):
            raise ValueError(
                f"{where}: {len(tokens)} verify_tokens and {len(seconds)} seconds; expected as "
                "many of one as of the other, at least one."
            )
        if tokens[0] < 1 or (np.diff(tokens) <= 0).any():
            raise ValueError(f"{where}: verify_tokens {tokens.tolist()} must increase from 1 up.")
        undrafted = seconds[:1] if self.undrafted_seconds is None else [self.undrafted_seconds]
        every = np.append(seconds, undrafted)
        if not (np.isfinite(every) & (every > 0)).all():
            raise ValueError(f"{where}: seconds {every.tolist()} must be positive numbers.")
        if (np.diff(seconds) < 0).any():
            raise ValueError(
                f"{where}: more rows take less time in {seconds.tolist()}; make the curve with "
                "Curve.of, which does not let a bucket count as faster than a smaller one."
            )

    @classmethod
    def of(
        cls,
        requests: int,
        context_len: int,
        seconds: Mapping[int, float],
        undrafted_seconds: float | None = None,
    ) -> "Curve":
        """A curve from timings in any order, made monotone: the slower of a bucket and those below.

        Args:
          requests: R.
          context_len: rows of context per request.
          seconds: verified rows -> seconds of a round.
          undrafted_seconds: of a round that drafts nothing.

        Returns:
          The curve.
        """
        tokens = sorted(seconds)
        paid = np.maximum.accumulate(np.array([seconds[t] for t in tokens], np.float64))
        return cls(
            requests=requests, context_len=context_len,
            verify_tokens=tuple(int(t) for t in tokens), seconds=tuple(paid.tolist()),
            undrafted_seconds=undrafted_seconds,
        )  # fmt: skip

    def at(self, rows: np.ndarray, lookup: str) -> np.ndarray:
        """Seconds f64[..] for numbers of verified rows i[..], clamped; 0 is a round undrafted."""
        tokens, seconds = np.array(self.verify_tokens), np.array(self.seconds)
        if lookup == "linear":
            drafted = np.interp(rows, tokens, seconds)
        else:
            floor = lookup == "floor"
            place = np.searchsorted(tokens, rows, side="right" if floor else "left") - floor
            drafted = seconds[np.clip(place, 0, len(tokens) - 1)]
        if self.undrafted_seconds is None:
            return drafted
        return np.where(np.asarray(rows) == 0, self.undrafted_seconds, drafted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpsTable:
    """Seconds of a round over (context length, requests, verified rows), and where it is from.

    Attributes:
      key: what it was made for.
      source: "measured", "modelled", or the engine whose file it was.
      lookup: "staircase", "floor" or "linear", between the points.
      curves: one for each context length and number of requests, all pairs present.
    """

    key: SpsKey
    source: str
    lookup: str = "staircase"
    curves: tuple[Curve, ...]

    def __post_init__(self):
        if self.lookup not in LOOKUPS:
            raise ValueError(f"lookup={self.lookup!r}; expected one of {LOOKUPS}.")
        at = [(c.context_len, c.requests) for c in self.curves]
        grid = [(c, r) for c in self.context_lens for r in self.requests]
        if sorted(at) != grid or not at:
            raise ValueError(
                f"SPS curves at (context, requests) {sorted(at)}; expected each of {grid} once."
            )

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Context lengths, increasing."""
        return tuple(sorted({c.context_len for c in self.curves}))

    @property
    def requests(self) -> tuple[int, ...]:
        """Numbers of requests, increasing; (0,) if the table does not depend on them."""
        return tuple(sorted({c.requests for c in self.curves}))

    @property
    def is_flat(self) -> bool:
        """Does every number of rows cost the same, at any load?"""
        return all(c.seconds[0] == c.seconds[-1] for c in self.curves)

    def seconds(
        self, requests: int, rows: np.ndarray, context_len: int | None = None
    ) -> np.ndarray:
        """Seconds of a round.

        Args:
          requests: R, active requests.
          rows: i[..], verified rows, R..R*(K+1), or 0 for a round that drafts nothing.
          context_len: rows of context per request; None takes the middle of the table's.

        Returns:
          f64[..].

        Raises:
          ValueError: more requests, or more rows, than a staircase was made for.
        """
        context_lens = self.context_lens
        if context_len is None:
            context_len = context_lens[len(context_lens) // 2]
        at = [self._at_context(requests, rows, c) for c in context_lens]
        if len(at) == 1:
            return at[0]
        low = np.clip(bisect.bisect_right(context_lens, context_len) - 1, 0, len(at) - 2)
        span = context_lens[low + 1] - context_lens[low]
        weight = np.clip((context_len - context_lens[low]) / span, 0.0, 1.0)
        return (1 - weight) * at[low] + weight * at[low + 1]

    def _at_context(self, requests: int, rows: np.ndarray, context_len: int) -> np.ndarray:
        curves = sorted(
            (c for c in self.curves if c.context_len == context_len), key=lambda c: c.requests
        )
        widths = [c.requests for c in curves]
        if len(curves) == 1 and (self.lookup == "linear" or widths == [0]):
            return curves[0].at(rows, self.lookup)
        if self.lookup == "linear":
            low = int(np.clip(bisect.bisect_right(widths, requests) - 1, 0, len(curves) - 2))
            weight = (requests - widths[low]) / (widths[low + 1] - widths[low])
            weight = np.clip(weight, 0.0, 1.0)
            below, above = curves[low].at(rows, "linear"), curves[low + 1].at(rows, "linear")
            return (1 - weight) * below + weight * above
        fitting = [c for c in curves if c.requests >= requests]
        most = fitting[0].verify_tokens[-1] if fitting else 0
        if not fitting or (self.lookup == "staircase" and np.max(rows) > most):
            raise ValueError(
                f"the SPS table reaches {widths[-1]} requests and {curves[-1].verify_tokens[-1]} "
                f"verified rows; {requests} requests of {int(np.max(rows))} rows do not fit. "
                "Profile again with that many slots."
            )
        return fitting[0].at(rows, self.lookup)

    def steps_per_s(
        self, requests: int, num_drafts: int, context_len: int | None = None
    ) -> np.ndarray:
        """SPS by verified rows, as a round wants it.

        Args:
          requests: R.
          num_drafts: K.
          context_len: rows of context per request; None takes the middle of the table's.

        Returns:
          f32[R*(K+1)+1]; entry 0 is for a round that drafts nothing, and the others below R repeat
          that of R, as no schedule verifies fewer.
        """
        rows = np.maximum(np.arange(requests * (num_drafts + 1) + 1), requests)
        rows[0] = 0
        return (1.0 / self.seconds(requests, rows, context_len)).astype(np.float32)

    def check(self, expected: SpsKey, progress: Callable[[str], None]) -> None:
        """Refuses a table that says nothing about this machine and these models.

        Args:
          expected: what the table should have been made for.
          progress: told what is unknown, modelled, or made with other versions.

        Raises:
          ValueError: another device, model, draft or type, or a flat table.
        """
        for field in ("device", "model", "draft", "dtype"):
            made, wanted = getattr(self.key, field), getattr(expected, field)
            if made and wanted and made != wanted:
                raise ValueError(
                    f"the SPS table was made for {field} {made!r}, this is {wanted!r}; make one "
                    "here with tools/profile_sps.py, or leave it out to measure at start-up."
                )
        if self.is_flat:
            raise ValueError(
                "the SPS table is flat: it says that verifying more rows never costs anything, so "
                "no policy could choose by it. Profile again, or use the policy 'full'."
            )
        unknown = [f for f in ("device", "model", "draft") if not getattr(self.key, f)]
        if unknown:
            progress(f"warning: the SPS table does not say its {', '.join(unknown)}")
        if self.source == "modelled":
            progress("warning: the SPS table is modelled from chip figures, not measured")
        if self.key.versions and self.key.versions != expected.versions:
            progress(
                f"warning: the SPS table was made with {dict(self.key.versions)}, this is "
                f"{dict(expected.versions)}"
            )

    def save(self, path: str | Path) -> None:
        """Writes our JSON format."""
        data = {"format": FORMAT, **dataclasses.asdict(self)}
        data["key"]["versions"] = dict(self.key.versions)
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def roofline_table(
    costs: Mapping[tuple[int, int, int], Mapping[str, float]],
    chip: Chip,
    key: SpsKey,
    progress: Callable[[str], None],
    *,
    overhead_s: float = 0.0,
) -> SpsTable:
    """A table from what compiled programs say they move and compute: a model, not a measurement.

    Args:
      costs: (context length, R, verified rows) -> a program's `cost_analysis()`.
      chip: peaks; a round takes the longer of moving its bytes and doing its operations.
      key: what it is made for; the device becomes the chip's name.
      progress: told that the table is modelled.
      overhead_s: seconds added to every round, for dispatch.

    Returns:
      A staircase, `source` "modelled".

    Raises:
      ValueError: no costs, or costs without "flops" and "bytes accessed".
    """
    curves: dict[tuple[int, int], dict[int, float]] = {}
    for (context_len, requests, tokens), cost in costs.items():
        if not cost or "flops" not in cost or "bytes accessed" not in cost:
            raise ValueError(
                f"the program for {requests} requests and {tokens} rows gives no cost analysis "
                f"({sorted(cost or ())}); expected 'flops' and 'bytes accessed'."
            )
        moved = cost["bytes accessed"] / chip.bytes_per_s
        computed = cost["flops"] / chip.flops_per_s
        of_width = curves.setdefault((context_len, requests), {})
        of_width[tokens] = overhead_s + max(moved, computed)
    table = SpsTable(
        key=dataclasses.replace(key, device=chip.name),
        source="modelled",
        curves=tuple(Curve.of(r, c, seconds) for (c, r), seconds in curves.items()),
    )
    progress(f"warning: SPS modelled from the peaks of {chip.name}, not measured")
    if table.is_flat:
        progress("warning: in this model no number of rows costs more; verify all of them")
    return table


def load_sps_table(path: str | Path) -> SpsTable:
    """Reads a table in our format, in either of SGLang's, or in TensorRT-LLM's.

    Args:
      path: JSON file.

    Returns:
      The table, monotone; files of other engines have an empty key.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not JSON, none of the formats, or numbers that make no table.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"SPS table {path} not found; make one with tools/profile_sps.py.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"SPS table {path} is not JSON: {error}.") from error
    keys = set(data) if isinstance(data, dict) else set()
    for marks, read in _READERS:
        if marks <= keys:
            try:
                return read(data)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise ValueError(f"SPS table {path} is damaged: {error!r}.") from error
    expected = " or ".join(", ".join(sorted(marks)) for marks, _ in _READERS)
    raise ValueError(f"SPS table {path} has the keys {sorted(keys)}; expected {expected}.")


def _read_ours(data: dict) -> SpsTable:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, expected {FORMAT!r}")
    key = data["key"] | {"versions": tuple(sorted(data["key"].get("versions", {}).items()))}
    curves = tuple(
        Curve(**c | {name: tuple(c[name]) for name in ("verify_tokens", "seconds")})
        for c in data["curves"]
    )
    return SpsTable(key=SpsKey(**key), source=data["source"], lookup=data["lookup"], curves=curves)


def _paired(data: dict, names: str, values: str) -> tuple[list[int], list[float]]:
    """Two lists of a foreign file that belong together, sorted."""
    if len(data[names]) != len(data[values]) or not data[names]:
        raise ValueError(f"{names} and {values} must be equally long and not empty")
    pairs = sorted(zip(data[names], data[values], strict=True))
    return [int(n) for n, _ in pairs], [float(v) for _, v in pairs]


def _read_sglang(data: dict) -> SpsTable:
    tokens, steps = _paired(data, "sample_batch_tokens", "sample_steps_per_sec")
    curve = Curve.of(0, 0, {t: 1.0 / s for t, s in zip(tokens, steps, strict=True)})
    return SpsTable(key=SpsKey(), source="sglang", lookup="floor", curves=(curve,))


def _additive(
    source: str, fixed: float, alpha: tuple[list, list], theta: tuple[list, list], unit: float
) -> SpsTable:
    """fixed + alpha(requests) + theta(tokens): linear in each, so exact on the grid of probes."""
    curves = tuple(
        Curve.of(r, 0, {t: unit * (fixed + a + s) for t, s in zip(*theta, strict=True)})
        for r, a in zip(*alpha, strict=True)
    )
    return SpsTable(key=SpsKey(), source=source, lookup="linear", curves=curves)


def _read_sglang_additive(data: dict) -> SpsTable:
    alpha = _paired(data, "bs_probes", "alpha_seconds")
    theta = _paired(data, "m_probes", "theta_seconds")
    return _additive("sglang", float(data["bias_seconds"]), alpha, theta, 1.0)


def _read_tensorrt_llm(data: dict) -> SpsTable:
    theta = _paired(data, "token_counts", "step_time_ms")
    alpha = ([0], [0.0])
    if data.get("batch_sizes"):
        alpha = _paired(data, "batch_sizes", "batch_overhead_ms")
    return _additive("tensorrt_llm", float(data.get("fixed_overhead_ms", 0)), alpha, theta, 1e-3)


_READERS = (
    ({"format", "curves"}, _read_ours),
    ({"sample_batch_tokens", "sample_steps_per_sec"}, _read_sglang),
    ({"bias_seconds", "m_probes", "theta_seconds"}, _read_sglang_additive),
    ({"token_counts", "step_time_ms"}, _read_tensorrt_llm),
)
