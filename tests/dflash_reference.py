"""DFlash and DFlash 2 written from their formulas: one row, fp64, everything recomputed from scratch, no cache.

It shares no code with the package. Text x_0 .. x_n; the target has processed all but x_n, the anchor. The context is
one vector for each of x_0 .. x_{n-1}, the block x_n and masks.
"""

import math

import torch
from dflash_formats import MASK, Net

MISTAKES = (
    "layer id shifted",
    "last state normed",
    "other causality",
    "no context norm",
    "context normed by the layer",
    "anchor in the context",
    "position off",
    "window one wider",
    "mask embedded as the anchor",
)


class Reference:
    """Logits that a drafter must give.

    Args:
        net: the drafter.
        target: the model whose hidden states it reads.
        mistake: one to make, for negative controls.
    """

    def __init__(self, net: Net, target: torch.nn.Module, mistake: str = "") -> None:
        self.net, self.target, self.mistake = net, target, mistake
        self.tensors = {name: tensor.double() for name, tensor in net.tensors.items()}
        own, head = self.tensors.get("embed_tokens.weight"), self.tensors.get("lm_head.weight")
        self.embedding = target.get_input_embeddings().weight.detach().double() if own is None else own
        self.head = target.get_output_embeddings().weight.detach().double() if head is None else head

    def __call__(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """[len(drafted), V] logits from which each of the drafted tokens was chosen."""
        states = self.states(text)[self.net.first_slot :]
        logits = self.scores(states)
        if self.net.num_candidates:
            previous = torch.tensor([text[-1], *drafted])
            logits = torch.stack([self.select(*row) for row in zip(logits, states, previous, strict=False)])
        return logits[: len(drafted)]

    def states(self, text: list[int]) -> torch.Tensor:
        """[block, H] after the last norm."""
        context = self.context(text if self.mistake == "anchor in the context" else text[:-1])
        first = len(text) - 1  # position of the anchor
        masked = text[-1] if self.mistake == "mask embedded as the anchor" else MASK
        block = torch.tensor([text[-1]] + [masked] * (self.net.block_size - 1))
        states = self.embedding[block] * self.net.embedding_scale
        positions = torch.cat([torch.arange(len(context)), first + torch.arange(len(block))]).double()
        if self.mistake == "position off":
            positions[len(context) :] += 1
        for i in range(len(self.net.windows)):
            name = f"layers.{i}"
            rows = self.norm(states, f"{name}.input_layernorm")
            rows, after = self.convolve(rows, f"{name}.attention_conv")
            states = states + after(self.attention(rows, context, positions, i))
            rows = self.norm(states, f"{name}.post_attention_layernorm")
            rows, after = self.convolve(rows, f"{name}.mlp_conv")
            gate, up = (self.linear(rows, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            states = states + after(self.linear(gate / (1 + torch.exp(-gate)) * up, f"{name}.mlp.down_proj"))
        return self.norm(states, "norm")

    def context(self, ids: list[int]) -> torch.Tensor:
        states, layers = self.hidden_states(ids), self.net.aux_layers
        if self.mistake == "layer id shifted":
            layers = (layers[0] - 1, *layers[1:])
        if self.mistake == "last state normed":
            layers = tuple(i + (i == self.net.target_layers) for i in layers)
        joined = self.linear(torch.cat([states[i] for i in layers], dim=-1), "fc")
        return joined if self.mistake == "no context norm" else self.norm(joined, "hidden_norm")

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

    def attention(self, rows: torch.Tensor, context: torch.Tensor, positions: torch.Tensor, i: int) -> torch.Tensor:
        name, window, causal = f"layers.{i}.self_attn", self.net.windows[i], self.net.causal[i]
        if self.mistake == "context normed by the layer":
            context = self.norm(context, f"layers.{i}.input_layernorm")
        causal, first = causal != (self.mistake == "other causality"), len(context)
        everything = torch.cat([context, rows])
        q = self.rotate(self.norm(self.heads(rows, f"{name}.q_proj"), f"{name}.q_norm"), positions[first:])
        k = self.rotate(self.norm(self.heads(everything, f"{name}.k_proj"), f"{name}.k_norm"), positions)
        v = self.heads(everything, f"{name}.v_proj")
        mixed = torch.empty_like(q)
        for row in range(len(rows)):
            sees = [j for j in range(len(everything)) if self.sees(row, j - first, window, causal)]
            for h in range(q.shape[1]):
                scores = k[sees, h // 2] @ q[row, h] / math.sqrt(q.shape[-1])
                mixed[row, h] = torch.softmax(scores, 0) @ v[sees, h // 2]
        return self.linear(mixed.flatten(1), f"{name}.o_proj")

    def sees(self, row: int, key: int, window: int | None, causal: bool) -> bool:
        """Whether a row of the block sees a key, both counted from the anchor."""
        if causal and key > row:
            return False
        if window is None:
            return True
        window += self.mistake == "window one wider"
        return -key <= window if self.net.from_anchor else abs(row - key) < window

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.linear(x, name).view(len(x), -1, 16)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Each pair (j, j + half) of a head turned by position times the j-th frequency."""
        half, (frequencies, scale) = x.shape[-1] // 2, self.frequencies(x.shape[-1])
        angles = (positions[:, None] * frequencies)[:, None]
        cos, sin = torch.cos(angles) * scale, torch.sin(angles) * scale
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def frequencies(self, size: int) -> tuple[torch.Tensor, float]:
        rope = self.net.rope
        base, plain = rope["rope_theta"], rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.double) / size)
        if rope["rope_type"] == "default":
            return plain, 1.0
        assert rope["rope_type"] == "yarn"
        factor, original = rope["factor"], rope["original_max_position_embeddings"]

        def dimension(turns: float) -> float:
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
        ramp = ((torch.arange(size // 2, dtype=torch.double) - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1.0

    def convolve(self, rows: torch.Tensor, name: str):
        """(the rows convolved before the sublayer, what convolves its output)."""
        base = self.tensors.get(f"{name}.base_kernel")
        if base is None:
            return rows, lambda out: out
        taps, size = base.shape[1:]
        dynamic = self.linear(rows, f"{name}.kernel_projection").view(len(rows), 2, taps, -1)
        groups = torch.arange(size) * dynamic.shape[-1] // size  # of each channel

        def side(x: torch.Tensor, which: int) -> torch.Tensor:
            out = torch.zeros_like(x)
            for i in range(len(x)):
                for tap in range(min(taps, i + 1)):
                    out[i] += (base[which, tap] + dynamic[i, which, tap, groups]) * x[i - tap]
            return out

        return side(rows, 0), lambda out: side(out, 1)

    def select(self, logits: torch.Tensor, state: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        name = "candidate_selector"
        best = logits.sort(descending=True).indices[: self.net.num_candidates]
        context = self.tensors[f"{name}.predecessor_codebook"][previous] * self.linear(
            state, f"{name}.hidden_projection"
        )
        chosen = torch.full_like(logits, -torch.inf)
        chosen[best] = logits[best] + self.tensors[f"{name}.successor_codebook"][best] @ context
        return chosen

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        logits = states @ self.head.T * self.net.logit_scale
        if self.net.logit_cap is not None:
            logits = torch.tanh(logits / self.net.logit_cap) * self.net.logit_cap
        if self.net.kept is None:
            return logits
        full = torch.full((len(logits), self.net.vocab_size), -torch.inf, dtype=torch.double)
        full[:, self.net.kept] = logits
        return full

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.weight"]
