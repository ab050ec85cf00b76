"""EAGLE-3 written from its formulas: one row, fp64, everything recomputed from scratch, no cache.

It shares no code with the package. Text x_0 .. x_n; the target has processed all but x_n. Entry i holds token x_{i+1}
and the feature of x_i, at position i; drafted entries hold the head's own last state instead, or those of a P-EAGLE
head the mask token and the mask feature.
"""

import math

import torch
from eagle3_formats import Head


class Reference:
    """Logits that a head must give.

    Args:
        head: the head.
        target: the model whose hidden states it reads.
        variant: a mistake to make, for negative controls.
    """

    def __init__(self, head: Head, target: torch.nn.Module, variant: str = "") -> None:
        self.head, self.target, self.variant = head, target, variant
        self.tensors = {name: tensor.double() for name, tensor in head.tensors.items()}
        embedding = self.tensors.get("embed_tokens.weight")
        self.embedding = target.get_input_embeddings().weight.detach().double() if embedding is None else embedding
        lm_head = self.tensors.get("lm_head.weight")
        self.lm_head = target.get_output_embeddings().weight.detach().double() if lm_head is None else lm_head

    def __call__(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """[len(drafted), V] logits from which each of the drafted tokens was chosen."""
        tokens, features = text[1:], self.features(text[:-1])
        if self.head.mask_token_id is not None and self.variant != "one by one":
            return self.all_at_once(tokens, features, len(drafted))
        logits = []
        for token in [*drafted, None]:
            out = self.layers(tokens, features)[-1:]
            logits.append(self.scores(out))
            fed_back = ("norm_output" in self.head.flags) != (self.variant == "other state fed back")
            out = self.norm(out, "norm") if fed_back else out
            tokens, features = [*tokens, token], torch.cat([features, out])
        return torch.cat(logits[: len(drafted)])

    def all_at_once(self, tokens: list[int], features: torch.Tensor, num_tokens: int) -> torch.Tensor:
        states = self.tensors["mask_hidden"].view(1, -1)
        states = torch.zeros_like(states) if self.variant == "no mask feature" else states
        width, mask, masks = self.head.target_hidden_size, self.head.mask_token_id, num_tokens - 1
        self.num_entries = len(tokens)
        feature = self.fuse([states[:, i : i + width] for i in range(0, states.shape[1], width)])
        if self.variant == "mask feature without fc":
            feature = states[:, : feature.shape[1]]
        mask = tokens[-1] if self.variant == "last token repeated" else mask
        out = self.layers([*tokens, *[mask] * masks], torch.cat([features, *[feature] * masks]))
        return self.scores(out[len(tokens) - 1 :])

    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """The residual stream entering each layer, then leaving the last one, then the normed one."""
        seen: list[torch.Tensor] = []
        layers = next(m for m in self.target.modules() if isinstance(m, torch.nn.ModuleList))
        hooks = [layer.register_forward_pre_hook(lambda m, args: seen.append(args[0])) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda m, args, out: seen.append(out)))
        with torch.no_grad():
            normed = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        for hook in hooks:
            hook.remove()
        return [(x[0] if isinstance(x, tuple) else x)[0].double() for x in [*seen, normed]]

    def features(self, ids: list[int]) -> torch.Tensor:
        states, layers = self.hidden_states(ids), self.head.aux_layers
        if not layers:
            return states[-1]
        if self.variant == "layer id shifted":
            layers = (layers[0] + 1, *layers[1:])
        if self.variant == "last state normed":
            layers = tuple(i + (i == self.head.target_layers) for i in layers)
        return self.fuse([states[i] for i in layers])

    def fuse(self, picked: list[torch.Tensor]) -> torch.Tensor:
        if not self.head.aux_layers:
            return picked[0]
        if "fc_norm" in self.head.flags:
            picked = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(picked)]
        joined = torch.cat(picked, dim=-1)
        if "norm_before_fc" in self.head.flags:
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def layers(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        states, embedded = features, self.embedding[torch.tensor(tokens)]
        for i, window in enumerate(self.head.windows):
            name = f"layers.{i}"
            normed = self.norm(states, f"{name}.input_layernorm")
            if i == 0:
                normed = self.norm(states, f"{name}.hidden_norm") if self.head.aux_layers else states
                halves = [self.norm(embedded, f"{name}.input_layernorm"), normed]
                joined = torch.cat(halves[::-1] if self.variant == "halves swapped" else halves, dim=-1)
                before = ("norm_before_residual" in self.head.flags) != (self.variant == "other residual")
                residual = normed if before else states
            else:
                joined, residual = normed, states
            states = residual + self.attention(joined, f"{name}.self_attn", window)
            normed = self.norm(states, f"{name}.post_attention_layernorm")
            gate, up = (self.linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            states = states + self.linear(gate / (1 + torch.exp(-gate)) * up, f"{name}.mlp.down_proj")
        return states

    def attention(self, x: torch.Tensor, name: str, window: int | None) -> torch.Tensor:
        size, count = self.head.head_dim, len(x)
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(count, -1, size) for part in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        groups = q.shape[1] // k.shape[1]
        mixed = torch.empty_like(q)
        for h in range(q.shape[1]):
            scores = q[:, h] @ k[:, h // groups].T / math.sqrt(size)
            for row in range(count):
                first = 0 if window is None else max(0, row - window + 1)
                mixed[row, h] = torch.softmax(scores[row, first : row + 1], -1) @ v[first : row + 1, h // groups]
        return self.linear(mixed.flatten(1), f"{name}.o_proj")

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Each pair (j, j + half) of a head turned by position times the j-th frequency."""
        half, (frequencies, scale) = x.shape[-1] // 2, self.frequencies(len(x))
        positions = torch.arange(len(x), dtype=torch.double)
        if self.variant == "position off":
            positions[1:] += 1
        if self.variant == "positions of masks off":
            positions[self.num_entries :] += 1
        angles = (positions[:, None] * frequencies)[:, None]
        cos, sin = torch.cos(angles) * scale, torch.sin(angles) * scale
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def frequencies(self, length: int) -> tuple[torch.Tensor, float]:
        rope, size = self.head.rope, self.head.head_dim
        kind, base, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)
        exponents = torch.arange(0, size, 2, dtype=torch.double) / size
        if kind == "dynamic" and length > self.head.max_positions:
            base *= (factor * length / self.head.max_positions - (factor - 1)) ** (size / (size - 2))
        plain = base**-exponents
        original = rope.get("original_max_position_embeddings", self.head.max_positions)
        if kind == "linear":
            return plain / factor, 1.0
        if kind == "llama3":
            turns, low, high = original * plain / (2 * math.pi), rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            return plain * (smooth + (1 - smooth) / factor), 1.0
        if kind == "yarn":

            def dimension(turns: float) -> float:
                return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

            low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
            ramp = ((torch.arange(size // 2, dtype=torch.double) - low) / max(high - low, 0.001)).clamp(0, 1)
            return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1.0
        return plain, 1.0

    def scores(self, out: torch.Tensor) -> torch.Tensor:
        logits = self.norm(out, "norm") @ self.lm_head.T
        if self.head.kept is None:
            return logits
        full = torch.full((len(logits), self.head.vocab_size), -torch.inf, dtype=torch.double)
        full[:, self.head.kept] = logits
        return full

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.weight"]
