"""V4 and V4.1 targets once more, in float64 NumPy: token by token, over what a cache would hold.

Reads the checkpoint's own tensors by their own names, and shares no code with the package.
"""

import numpy as np

from tests.parity.deepseek_twin import Twin


class TargetTwin(Twin):
    """One sequence. `hf` is the flat text config, `classes` Engram's class of every token."""

    def __init__(self, hf: dict, tensors: dict, family: str, classes: np.ndarray):
        own = {name: value for name, value in hf.items() if not name.startswith("dspark_num")}
        super().__init__(own, tensors, family, stages=0)
        self.v4, self.engrams = family == "deepseek_v4", hf.get("engram_layer_ids") or []
        self.classes, self.history, self.chose_all = classes, [], True
        layers = range(hf["num_hidden_layers"])
        self.windows = {i: [] for i in layers}
        self.groups, self.rows, self.keys = ({i: [] for i in layers} for _ in range(3))

    def step(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits [V] and taps [M*D] of the next token."""
        hf, p, n = self.hf, len(self.history), self.hf["hc_mult"]
        self.history.append(int(self.classes[token]))
        streams, pre, taps = np.stack([self.t["embed.weight"][token]] * n), np.eye(n)[0], []
        shared = {"candidates": None}
        for i in range(hf["num_hidden_layers"]):
            if i in self.engrams:
                streams = self._engram(streams, i)
            if i in hf["dspark_target_layer_ids"] and not self.v4:
                taps.append(streams.mean(axis=0))
            name = f"layers.{i}."
            mix = self._mix(streams, name + "hc_attn_")
            x = self._norm((mix[0] if self.v4 else pre) @ streams, name + "attn_norm.weight")
            streams, pre = self._write(self._attend(x, i, p, shared), streams, mix), mix[0]
            mix = self._mix(streams, name + "hc_ffn_")
            x = self._norm((mix[0] if self.v4 else pre) @ streams, name + "ffn_norm.weight")
            x = (
                self._hashed(x, token, name)
                if name + "ffn.gate.tid2eid" in self.t
                else (self._experts(x, name + "ffn."))
            )
            streams, pre = self._write(x, streams, mix), mix[0]
            if i in hf["dspark_target_layer_ids"] and self.v4:
                taps.append(streams.mean(axis=0))
        if self.v4:
            pre = self._gates(streams, "hc_head_", slice(0, n), 0)
        hidden = self._norm(pre @ streams, "norm.weight")
        return self.t["head.weight"] @ hidden, np.concatenate(taps)

    def _hashed(self, x: np.ndarray, token: int, name: str) -> np.ndarray:
        """Experts by the token's row of a table."""
        t, chosen = self.t, self.t[name + "ffn.gate.tid2eid"][token].astype(int)
        scores = np.sqrt(np.log1p(np.exp(t[name + "ffn.gate.weight"] @ x)))[chosen]
        scores = scores / scores.sum() * self.hf["routed_scaling_factor"]
        out = self._expert(x, name + "ffn.shared_experts.")
        for e, weight in zip(chosen, scores, strict=True):
            out = out + weight * self._expert(x, f"{name}ffn.experts.{e}.")
        return out

    def _attend(self, x: np.ndarray, i: int, p: int, shared: dict) -> np.ndarray:
        hf, t, name = self.hf, self.t, f"layers.{i}.attn."
        ratio, size, heads = hf["compress_ratios"][i], hf["head_dim"], hf["num_attention_heads"]
        turn = hf["compress_rope_theta"] if ratio else hf["rope_theta"]
        kv = self._norm(t[name + "wkv.weight"] @ x, name + "kv_norm.weight")
        self.windows[i].append(self._turn(kv, p, turn))
        low = self._norm(t[name + "wq_a.weight"] @ x, name + "q_norm.weight")
        seen = self.windows[i][-hf["sliding_window"] :]
        if ratio:
            if self.v4:
                self._make_rows(x, i, p)
                shared.update(source=i, chosen=range(len(self.rows[i])))
            elif i in hf["kv_source_layer_ids"]:
                shared.update(source=i, candidates=None)
                self._make_row(x, i, p)
            if ratio == 4 if self.v4 else i in hf["index_source_layer_ids"]:
                self._choose(x, low, i, p, shared)
            seen = seen + [self.rows[shared["source"]][j] for j in shared["chosen"]]
        seen, q = np.stack(seen), (t[name + "wq_b.weight"] @ low).reshape(heads, size)
        done = []
        for head in range(heads):
            if self.v4:
                q[head] = q[head] / np.sqrt((q[head] ** 2).mean() + 1e-6)
            weights = np.exp(seen @ self._turn(q[head], p, turn) / np.sqrt(size))
            weights = weights / (weights.sum() + np.exp(t[name + "attn_sink"][head]))
            done.append(self._turn(weights @ seen, -p, turn))
        parts = np.concatenate(done).reshape(hf["o_groups"], -1)
        wo_a = t[name + "wo_a.weight"].reshape(hf["o_groups"], hf["o_lora_rank"], -1)
        low = np.concatenate([w @ part for w, part in zip(wo_a, parts, strict=True)])
        return t[name + "wo_b.weight"] @ low

    def _make_row(self, x: np.ndarray, i: int, p: int) -> None:
        hf, t, name = self.hf, self.t, f"layers.{i}.attn."
        ratio, theta = hf["compress_ratios"][i], hf["compress_rope_theta"]
        self.groups[i].append(x)
        if (p + 1) % ratio:
            return
        group, self.groups[i] = np.stack(self.groups[i]), []
        values = group @ t[name + "compressor.wkv.weight"].T
        if ratio > 1:
            weights = np.exp(group @ t[name + "compressor.wgate.weight"].T)
            values = values * weights / weights.sum(axis=0)
        latent = self._norm(values.sum(axis=0), name + "compressor.norm.weight")
        at = p + 1 - ratio
        self.rows[i].append(self._turn(latent, at, theta))
        key = self._norm(t[name + "indexer.wk.weight"] @ latent, name + "indexer.k_norm.weight")
        self.keys[i].append(self._turn(key, at, theta))

    def _make_rows(self, x: np.ndarray, i: int, p: int) -> None:
        """V4: rows and keys made alike, of the tokens before as well if a row has four."""
        hf, ratio = self.hf, self.hf["compress_ratios"][i]
        self.groups[i].append(x)
        if (p + 1) % ratio:
            return
        at, name = p + 1 - ratio, f"layers.{i}.attn."
        made = [(self.rows, "compressor.", hf["head_dim"])]
        if ratio == 4:
            made.append((self.keys, "indexer.compressor.", hf["index_head_dim"]))
        for kept, part, size in made:
            row = self._pool(i, ratio, name + part, size)
            kept[i].append(self._turn(row, at, hf["compress_rope_theta"]))

    def _pool(self, i: int, ratio: int, name: str, size: int) -> np.ndarray:
        t, values, weights = self.t, [], []
        for age, first in ((0, -2 * ratio), (1, -ratio)):
            group = self.groups[i][first : first + ratio or None]
            if age == 0 and (ratio != 4 or len(self.groups[i]) == ratio):
                continue
            for place, x in enumerate(group):
                value = t[name + "wkv.weight"] @ x
                gate = t[name + "wgate.weight"] @ x + t[name + "ape"][place]
                half = slice(age * size, (age + 1) * size) if ratio == 4 else slice(None)
                values.append(value[half])
                weights.append(np.exp(gate[half]))
        pooled = (np.stack(values) * weights).sum(axis=0) / np.sum(weights, axis=0)
        return self._norm(pooled, name + "norm.weight")

    def _choose(self, x: np.ndarray, low: np.ndarray, i: int, p: int, shared: dict) -> None:
        hf, t, name = self.hf, self.t, f"layers.{i}.attn.indexer."
        heads, size, theta = hf["index_n_heads"], hf["index_head_dim"], hf["compress_rope_theta"]
        q = (t[name + "wq_b.weight"] @ low).reshape(heads, size)
        weights = t[name + "weights_proj.weight"] @ x / np.sqrt(heads * size)
        turned = [self._turn(row, p, theta) for row in q]
        scores = {
            j: sum(w * max(row @ key, 0.0) for w, row in zip(weights, turned, strict=True))
            for j, key in enumerate(self.keys[shared["source"]])
        }
        allowed = shared["candidates"]
        own = sorted(scores, key=lambda j: -scores[j])
        own = [j for j in own if allowed is None or j in allowed]
        shared["chosen"] = sorted(own[: hf["index_topk"]])
        self.chose_all &= len(own) <= hf["index_topk"]
        if i == hf.get("candidate_source_layer_id") and scores:
            step = hf["candidate_block_size"]
            blocks = {}
            for j, score in scores.items():
                blocks[j // step] = max(blocks.get(j // step, -np.inf), score)
            blocks[max(blocks)] = np.inf
            best = sorted(blocks, key=lambda b: -blocks[b])[: hf["candidate_topk_blocks"]]
            shared["candidates"] = {j for j in scores if j // step in best}

    def _engram(self, streams: np.ndarray, i: int) -> np.ndarray:
        hf, t, name = self.hf, self.t, f"layers.{i}.engram."
        place, most, heads = (
            self.engrams.index(i), hf["engram_max_ngram_size"], hf["engram_n_heads"],
        )  # fmt: skip
        primes = iter(self.primes()[place * (most - 1) * heads :])
        pad = int(self.classes[hf["engram_pad_token_id"]])
        back = [pad] * most + self.history
        mixed, first, found = back[-1] * self.multipliers(i)[0], 0, []
        for distance in range(1, most):
            mixed ^= back[-1 - distance] * self.multipliers(i)[distance]
            for _ in range(heads):
                prime = next(primes)
                found.append(t[name + "embed.weight"][first + mixed % prime])
                first += prime
        y = (t[name + "wkv.weight"] @ np.concatenate(found)).reshape(-1, hf["hidden_size"])
        out = []
        for k, h in enumerate(streams):
            scale = t[name + "q_weight"][k] * t[name + "k_weight"][k]
            dot = (h * scale * y[k]).sum() / np.sqrt((h**2).mean() * (y[k] ** 2).mean() * len(h))
            gate = np.sign(dot) * np.sqrt(max(abs(dot), 1e-6))
            out.append(h + y[-1] / (1 + np.exp(-gate)))
        return np.stack(out)

    def primes(self) -> list[int]:
        """All tables' sizes, in the order of layers, n and heads."""
        hf = self.hf
        count = len(hf["engram_layer_ids"]) * (hf["engram_max_ngram_size"] - 1)
        found, number = [], hf["engram_vocab_size"]
        while len(found) < count * hf["engram_n_heads"]:
            if all(number % d for d in range(2, number)):
                found.append(number)
            number += 1
        return found

    def multipliers(self, i: int) -> list[int]:
        """One number per distance."""
        bound = (2**63 - 1) // self.hf["engram_compressed_vocab_size"] // 2
        rng = np.random.default_rng(10007 * i)
        drawn = rng.integers(0, bound, self.hf["engram_max_ngram_size"], np.int64)
        return [2 * int(x) + 1 for x in drawn]

    def _turn(self, x: np.ndarray, position: int, theta: float) -> np.ndarray:
        """`_rotate` with a base, and YaRN for the base of compressed layers."""
        turned, scaling = self.hf["qk_rope_head_dim"], self.hf["rope_scaling"]
        first, x = len(x) - turned, x.copy()
        for i in range(turned // 2):
            speed = theta ** (-2 * i / turned)
            if theta == self.hf["compress_rope_theta"]:
                low, high = (self._pair(scaling[end]) for end in ("beta_fast", "beta_slow"))
                low, high = max(np.floor(low), 0), min(np.ceil(high), turned - 1)
                share = np.clip((i - low) / max(high - low, 1e-3), 0, 1)
                speed = speed * (1 - share) + speed / scaling["factor"] * share
            a, b = x[first + 2 * i], x[first + 2 * i + 1]
            sin, cos = np.sin(position * speed), np.cos(position * speed)
            x[first + 2 * i], x[first + 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
        return x

    def _pair(self, turns: float) -> float:
        """Which pair makes so many turns within the original length."""
        span = self.hf["rope_scaling"]["original_max_position_embeddings"] / (turns * 2 * np.pi)
        theta = self.hf["compress_rope_theta"]
        return self.hf["qk_rope_head_dim"] * np.log(span) / (2 * np.log(theta))
