"""DSpark written from its formulas: one row, fp64, everything recomputed from scratch, no cache.

It shares no code with the package. Text x_0 .. x_n; the target has processed all but x_n, the anchor. Context i is made
of the target's hidden states at x_i, i < n. Rows of the block: the anchor and masks, at positions n, n + 1, ...
"""

import math

import torch
from dspark_formats import MASK, Drafter
from eagle3_reference import Reference as TargetStates


class Reference:
    """Logits and confidences that a drafter must give.

    Args:
        drafter: the drafter.
        target: the model whose hidden states it reads.
        variant: a mistake to make, for negative controls.
    """

    def __init__(self, drafter: Drafter, target: torch.nn.Module, variant: str = "") -> None:
        self.drafter, self.target, self.variant = drafter, target, variant
        self.tensors = {name: tensor.double() for name, tensor in drafter.tensors.items()}
        embedding = self.tensors.get("embed_tokens.weight")
        self.embedding = target.get_input_embeddings().weight.detach().double() if embedding is None else embedding
        lm_head = self.tensors.get("lm_head.weight")
        self.lm_head = target.get_output_embeddings().weight.detach().double() if lm_head is None else lm_head

    def __call__(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """[len(drafted), V] logits from which each of the drafted tokens was chosen."""
        return self.slots(text, drafted)[0]

    def confidences(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """[len(drafted)] logits of the confidence head."""
        return self.slots(text, drafted)[1]

    def slots(self, text: list[int], drafted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.block(text)
        first = self.drafter.first_slot
        if self.variant == "other first row":
            first, states = 1 - first, torch.cat([states, states[-1:]])
        previous, memory = text[-1], torch.zeros(self.drafter.rank, dtype=torch.double)
        if first and self.drafter.rank:  # speculators trains the memory over the anchor's row as well
            _, memory = self.bias(self.tensors["markov_head.markov_w1.weight"][previous], states[0], memory)
        logits, confidences = [], []
        for slot, token in enumerate(drafted):
            h = states[first + slot]
            row = self.lm_head @ h
            if self.drafter.cap is not None:
                row = self.drafter.cap * torch.tanh(row / self.drafter.cap)
            inputs = [h]
            if self.drafter.rank:
                w1 = self.tensors["markov_head.markov_w1.weight"][previous]
                bias, memory = self.bias(w1, h, memory)
                if self.variant != "no markov bias":
                    row = row + bias
                inputs.append(w1)
            logits.append(self.over_vocabulary(row))
            confidences.append(self.confidence(torch.cat(inputs), h))
            previous = text[-1] if self.variant == "markov reads the anchor" else token
        return torch.stack(logits), torch.stack(confidences)

    def bias(self, w1: torch.Tensor, h: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t, w2 = self.tensors, self.tensors["markov_head.markov_w2.weight"]
        if self.drafter.kind == "gated":
            gate = t["markov_head.gate_proj.weight"] @ torch.cat([h, w1]) + t["markov_head.gate_proj.bias"]
            return w2 @ (w1 / (1 + torch.exp(-gate))), s
        if self.drafter.kind == "rnn":
            z = t["markov_head.joint_proj.weight"] @ torch.cat([s, w1, h]) + t["markov_head.joint_proj.bias"]
            a, b, o = z.split(self.drafter.rank)
            a = 1 / (1 + torch.exp(-a))
            return w2 @ torch.tanh(o), a * s + (1 - a) * torch.tanh(b)
        return w2 @ w1, s

    def confidence(self, inputs: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        weight = self.tensors.get("confidence_head.proj.weight")
        if weight is None:
            return torch.tensor(0.0)
        inputs = inputs if weight.shape[1] == len(inputs) else h
        return weight[0] @ inputs + self.tensors["confidence_head.proj.bias"][0]

    def over_vocabulary(self, row: torch.Tensor) -> torch.Tensor:
        if self.drafter.kept is None:
            return row
        full = torch.full((self.drafter.vocab_size,), -torch.inf, dtype=torch.double)
        full[self.drafter.kept] = row
        return full

    def context(self, ids: list[int]) -> torch.Tensor:
        states = TargetStates.hidden_states(self, ids)  # the residual stream entering each layer, the last one, normed
        layers = self.drafter.aux_layers
        if self.variant == "layer id shifted":
            layers = (layers[0] + 1, *layers[1:])
        if self.variant == "last state normed":
            layers = tuple(i + (i == self.drafter.target_layers) for i in layers)
        fused = torch.cat([states[i] for i in layers], dim=-1) @ self.tensors["fc.weight"].T
        return fused if self.variant == "context not normed" else self.norm(fused, "hidden_norm")

    def block(self, text: list[int]) -> torch.Tensor:
        """[block size, H] states of the block's rows."""
        context, start = self.context(text[:-1]), len(text) - 1
        x = self.embedding[torch.tensor([text[-1], *[MASK] * (self.drafter.block_size - 1)])]
        if self.drafter.gemma4:
            x = x * math.sqrt(self.drafter.hidden_size)
        for i in range(len(self.drafter.windows)):
            x = self.layer(x, context, i, start)
        return self.norm(x, "norm")

    def layer(self, x: torch.Tensor, context: torch.Tensor, i: int, start: int) -> torch.Tensor:
        name = f"layers.{i}"
        mixed = self.attention(self.norm(x, f"{name}.input_layernorm"), context, i, start)
        if not self.drafter.gemma4:
            x = x + mixed
            return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), name)
        x = x + self.norm(mixed, f"{name}.post_attention_layernorm")
        inner = self.mlp(self.norm(x, f"{name}.pre_feedforward_layernorm"), name)
        x = x + self.norm(inner, f"{name}.post_feedforward_layernorm")
        return x * (1.0 if self.variant == "no layer scalar" else self.tensors[f"{name}.layer_scalar"])

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (x @ self.tensors[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        if self.drafter.gemma4:
            gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + torch.exp(-gate))
        return (gate * up) @ self.tensors[f"{name}.mlp.down_proj.weight"].T

    def attention(self, x: torch.Tensor, context: torch.Tensor, i: int, start: int) -> torch.Tensor:
        drafter, name, size = self.drafter, f"layers.{i}.self_attn", self.drafter.head_dim
        both = torch.cat([context, x])
        q = (x @ self.tensors[f"{name}.q_proj.weight"].T).view(len(x), -1, size)
        raw = (both @ self.tensors[f"{name}.k_proj.weight"].T).view(len(both), -1, size)
        v_proj = self.tensors.get(f"{name}.v_proj.weight")
        v = raw if v_proj is None else (both @ v_proj.T).view(len(both), -1, size)
        if drafter.gemma4 and self.variant != "values not normed":
            v = v / torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-5)
        positions = torch.arange(len(both), dtype=torch.double)
        if self.variant == "block one position late":
            positions[start:] += 1
        q = self.rotate(self.norm(q, f"{name}.q_norm"), positions[start:])
        k = self.rotate(self.norm(raw, f"{name}.k_norm"), positions)
        scale = 1.0 if drafter.gemma4 else 1 / math.sqrt(size)
        causal = drafter.causal[i] != (self.variant == "other causality")
        mixed = torch.empty_like(q)
        for row in range(len(x)):
            seen = [j for j in range(len(both)) if self.sees(row, j - start, drafter.windows[i], causal)]
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                mixed[row, h] = torch.softmax(k[seen, g] @ q[row, h] * scale, -1) @ v[seen, g]
        return mixed.flatten(1) @ self.tensors[f"{name}.o_proj.weight"].T

    def sees(self, row: int, key: int, window: int | None, causal: bool) -> bool:
        """Whether a row of the block sees a key, both counted from the anchor."""
        if causal and key > row:
            return False
        from_anchor = self.drafter.from_anchor != (self.variant == "other window")
        return window is None or (-key <= window if from_anchor else abs(row - key) < window)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Each pair (j, j + half) of a head turned by position times the j-th frequency."""
        half, rope = x.shape[-1] // 2, self.drafter.rope
        frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.double) / half)
        if rope["rope_type"] == "proportional":
            frequencies[int(rope["partial_rotary_factor"] * half) :] = 0.0
        elif rope["rope_type"] == "linear":
            frequencies = frequencies / rope["factor"]
        angles = (positions[:, None] * frequencies)[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.tensors[f"{name}.weight"]
