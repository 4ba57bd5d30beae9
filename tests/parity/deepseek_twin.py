"""The V4 and V4.1 draft stack once more, in float64 NumPy, one token and one head at a time.

Reads the checkpoint's own tensors by their own names, and shares no code with the package.
"""

import numpy as np


class Twin:
    """One sequence. `hf` is the flat text config, `t` the tensors in float64."""

    def __init__(self, hf: dict, tensors: dict, family: str, stages: int):
        self.hf, self.family, self.stages = hf, family, stages
        self.t = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.context = [{} for _ in range(stages)]  # position -> row

    def write(self, taps: np.ndarray, position: int) -> None:
        """Adds the context of one position, taps [M*D]."""
        x = self._norm(self.t["mtp.0.main_proj.weight"] @ taps, "mtp.0.main_norm.weight")
        for s, rows in enumerate(self.context):
            rows[position] = self._key(x, s, position)

    def draft(self, anchor: int, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Greedy drafts: ids [K], logits [K, V] with the bias, confidence logits [K]."""
        hf, t, last = self.hf, self.t, f"mtp.{self.stages - 1}."
        count, n = hf["dspark_block_size"], hf["hc_mult"]
        ids = [anchor] + [hf["dspark_noise_token_id"]] * (count - 1)
        streams = [np.stack([t["embed.weight"][i]] * n) for i in ids]
        pre = [np.eye(n)[0]] * count
        for s in range(self.stages):
            streams, pre = self._block(streams, pre, s, position)
        if self.family == "deepseek_v41":
            hidden = [w @ r for w, r in zip(pre, streams, strict=True)]
        else:
            hidden = [self._gates(r, last + "hc_head_", slice(0, n), 0) @ r for r in streams]
        names = ("embed", "head") if self.family == "deepseek_v41" else ("markov_w1", "markov_w2")
        w1, w2 = (t[f"{last}markov_head.{name}.weight"] for name in names)
        tokens, logits, trust = [], [], []
        previous = anchor
        for h in hidden:
            scores = t["head.weight"] @ self._norm(h, last + "norm.weight") + w2 @ w1[previous]
            joined = np.concatenate([h, w1[previous]])
            trust.append(t[last + "confidence_head.proj.weight"][0] @ joined)
            previous = int(scores.argmax())
            tokens.append(previous)
            logits.append(scores)
        return np.array(tokens), np.array(logits), np.array(trust)

    def _block(self, streams: list, pre: list, s: int, position: int) -> tuple[list, list]:
        name, delayed = f"mtp.{s}.", self.family == "deepseek_v41"
        mixes = [self._mix(r, name + "hc_attn_") for r in streams]
        reads = pre if delayed else [m[0] for m in mixes]
        x = [
            self._norm(w @ r, name + "attn_norm.weight")
            for w, r in zip(reads, streams, strict=True)
        ]
        out = self._attention(x, s, position)
        streams = [self._write(y, r, m) for y, r, m in zip(out, streams, mixes, strict=True)]
        pre = [m[0] for m in mixes]
        mixes = [self._mix(r, name + "hc_ffn_") for r in streams]
        reads = pre if delayed else [m[0] for m in mixes]
        out = [
            self._experts(self._norm(w @ r, name + "ffn_norm.weight"), name + "ffn.")
            for w, r in zip(reads, streams, strict=True)
        ]
        streams = [self._write(y, r, m) for y, r, m in zip(out, streams, mixes, strict=True)]
        return streams, [m[0] for m in mixes]

    def _attention(self, x: list, s: int, position: int) -> list:
        hf, t, name = self.hf, self.t, f"mtp.{s}.attn."
        size, heads, groups = hf["head_dim"], hf["num_attention_heads"], hf["o_groups"]
        window = [p for p in self.context[s] if position - hf["sliding_window"] <= p < position]
        rows = [self.context[s][p] for p in window]
        rows += [self._key(row, s, position + k) for k, row in enumerate(x)]
        rows, out = np.stack(rows), []
        for k, row in enumerate(x):
            q = t[name + "wq_b.weight"] @ self._norm(
                t[name + "wq_a.weight"] @ row, name + "q_norm.weight"
            )
            done = []
            for head in range(heads):
                one = q[head * size : (head + 1) * size]
                if self.family == "deepseek_v4":
                    one = one / np.sqrt((one**2).mean() + 1e-6)
                scores = rows @ self._rotate(one, position + k) / np.sqrt(size)
                weights = np.exp(scores)
                weights = weights / (weights.sum() + np.exp(t[name + "attn_sink"][head]))
                done.append(self._rotate(weights @ rows, -(position + k)))
            parts = np.concatenate(done).reshape(groups, -1)
            wo_a = t[name + "wo_a.weight"].reshape(groups, hf["o_lora_rank"], -1)
            low = np.concatenate([w @ part for w, part in zip(wo_a, parts, strict=True)])
            out.append(t[name + "wo_b.weight"] @ low)
        return out

    def _key(self, x: np.ndarray, s: int, position: int) -> np.ndarray:
        kv = self.t[f"mtp.{s}.attn.wkv.weight"] @ x
        return self._rotate(self._norm(kv, f"mtp.{s}.attn.kv_norm.weight"), position)

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        turned = self.hf["qk_rope_head_dim"]
        x = x.copy()
        first = len(x) - turned
        for i in range(turned // 2):
            angle = position * self.hf["rope_theta"] ** (-2 * i / turned)
            a, b = x[first + 2 * i], x[first + 2 * i + 1]
            x[first + 2 * i] = a * np.cos(angle) - b * np.sin(angle)
            x[first + 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
        return x

    def _experts(self, x: np.ndarray, name: str) -> np.ndarray:
        hf, t = self.hf, self.t
        scores = np.sqrt(np.log1p(np.exp(t[name + "gate.weight"] @ x)))
        chosen = np.argsort(-(scores + t[name + "gate.bias"]))
        chosen = chosen[: hf.get("dspark_num_experts_per_tok", hf["num_experts_per_tok"])]
        weights = scores[chosen] / scores[chosen].sum() * hf["routed_scaling_factor"]
        out = self._expert(x, name + "shared_experts.")
        for e, weight in zip(chosen, weights, strict=True):
            out = out + weight * self._expert(x, f"{name}experts.{e}.")
        return out

    def _expert(self, x: np.ndarray, name: str) -> np.ndarray:
        t, limit = self.t, self.hf["swiglu_limit"]
        gate = np.minimum(t[name + "w1.weight"] @ x, limit)
        up = np.clip(t[name + "w3.weight"] @ x, -limit, limit)
        return t[name + "w2.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def _logits(self, r: np.ndarray, name: str) -> np.ndarray:
        flat = r.reshape(-1)
        return self.t[name + "fn"] @ flat / np.sqrt((flat**2).mean() + self.hf["rms_norm_eps"])

    def _gates(self, r: np.ndarray, name: str, part: slice, scale: int) -> np.ndarray:
        scaled = self._logits(r, name)[part] * self.t[name + "scale"][scale]
        return 1 / (1 + np.exp(-scaled - self.t[name + "base"][part])) + self.hf["hc_eps"]

    def _mix(self, r: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, eps = self.hf["hc_mult"], self.hf["hc_eps"]
        pre = self._gates(r, name, slice(0, n), 0)
        post = 2 * (self._gates(r, name, slice(n, 2 * n), 1) - eps)
        raw = self._logits(r, name)[2 * n :] * self.t[name + "scale"][2]
        comb = np.exp((raw + self.t[name + "base"][2 * n :]).reshape(n, n))
        comb = comb / comb.sum(axis=1, keepdims=True) + eps
        comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
        for _ in range(self.hf["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
            comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
        return pre, post, comb

    def _write(self, y: np.ndarray, r: np.ndarray, mix: tuple) -> np.ndarray:
        _, post, comb = mix
        n = len(r)
        return np.stack([post[k] * y + sum(comb[j, k] * r[j] for j in range(n)) for k in range(n)])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + self.hf["rms_norm_eps"]) * self.t[name]
