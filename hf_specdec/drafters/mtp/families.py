"""How families of models publish their multi-token prediction (MTP) layers: one row each.

A layer is  block(projection([embedding_norm(embedding), hidden_norm(state)])).  The block is one or several of the
target's own decoder layers; rows say what the tensors are called (tensor_names.py) and where families differ.
docs/mtp.md names the source of each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import tensor_names

_OUTER = ("model.", "language_model.")  # what composite models put in front of the names of their text part
_EMBEDDING, _HEAD = "embed_tokens.", "lm_head."


@dataclass(frozen=True)
class Streams:
    """The several residual streams of a target with hyper-connections: its MTP layers read and pass on all of them.

    Args:
        count_field: config field with their number.
        head: the target's module that makes one state of them; each MTP layer has one of its own.
        apart: whether a decoder layer takes them along an axis of their own and the hidden norm is one over each;
            otherwise they lie side by side, and the norm is one over all of them.
    """

    count_field: str
    head: str
    apart: bool


@dataclass(frozen=True)
class MtpFamily:
    """A family.

    Args:
        name: how standalone repositories and messages call it.
        model_types: of the targets' text configs. A standalone repository may serve any target.
        tensors: (published prefix, prefix in a layer of ours), the longest match counts. {L} stands for the number of
            the target's layers plus that of the MTP layer, {i} for the latter, {j} for a decoder layer among all those
            of the MTP layers, {k} for the last one of the MTP layer. A prefix without any of these belongs to all
            layers. `model.` and `language_model.` in front are left out. What leads to "" is not used.
        count_fields: config fields that give the number of layers, nested ones dotted; the first one that is there
            counts. Without one the tensors are counted.
        hidden_first: the projection takes [state, embedding] instead of [embedding, state].
        final_norm: whether the output head reads the block's output after a norm of its own, or the config's flag that
            says so.
        carry: what stands in the place of the target's state where a layer drafts on: the block's output "normed",
            after the final norm, or "raw". The wrong one is not seen in the first drafted token, only from the second.
        chained: whether a layer reads the states of the one before it; otherwise all of them read the target's.
        target_state: the target's last hidden state is taken "normed", after its final norm, or "raw".
        entries: what the MTP layers have in lists of the config with an entry for each of the target's layers. Where
            the config has the same list with mtp_ in front that one counts, without either the target's last entry.
        blocks_field: config field that lists the kinds of the several decoder layers of each MTP layer.
        divisor_field: config field with a number that the output head's input is divided by.
        plain_layers: a block is attention and an MLP of the target's classes, each behind a norm, where the target's
            layers have more to them: two of each with experts beside them, or hyper-connections.
        streams: of a target whose MTP layers have its hyper-connections, too. The state is then what the target's last
            layer gives, and the projection is one of the embedding and one of each stream, added.
        keys_rotate: rotary embeddings are wanted of every key, those of the entries behind them.
    """

    name: str
    model_types: tuple[str, ...]
    tensors: tuple[tuple[str, str], ...]
    count_fields: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    hidden_first: bool = False
    final_norm: bool | str = True
    carry: str = "normed"
    chained: bool = True
    target_state: str = "normed"
    entries: tuple[tuple[str, Any], ...] = ()
    blocks_field: str | None = None
    divisor_field: str | None = None
    plain_layers: bool = False
    streams: Streams | None = None
    keys_rotate: bool = False

    def num_streams(self, config: Any) -> int:
        """States that make up one token's, 1 where the target has no hyper-connections."""
        return 1 if self.streams is None else getattr(config, self.streams.count_field)

    def num_layers(self, *configs: Any) -> tuple[int, str] | None:
        """(number of MTP layers, the field that says so); None where no config does."""
        for field in self.count_fields:
            for value in configs:
                for part in field.split("."):
                    value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value, field
        return None

    def prefixes(self, index: int, first_layer: int, num_blocks: int = 1) -> list[tuple[str, str]]:
        """(published prefix, ours) of the tensors of MTP layer `index`.

        Args:
            first_layer: number of the target's layers.
            num_blocks: decoder layers in each MTP layer.
        """
        filled = []
        for published, ours in self.tensors:
            for block in range(num_blocks) if "{j}" in published else (0,):
                first = index * num_blocks
                numbers = {"L": first_layer + index, "i": index, "j": first + block, "k": first + num_blocks - 1}
                filled.append((published.format(**numbers), ours.format(j=block)))
        return filled

    def ours(self, name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
        """A published tensor's name in one of our layers; None where it is not that layer's or not used."""
        name = without_outer(name)
        length, new = max(((len(old), new) for old, new in prefixes if name.startswith(old)), default=(0, ""))
        return new + name[length:] if new else None

    def published(self, name: str, prefixes: Iterable[tuple[str, str]]) -> str:
        """The published name of a tensor of one of our layers."""
        old, new = next((old, new) for old, new in prefixes if new and name.startswith(new))
        return old + name[len(new) :]

    def count(self, names: Iterable[str], first_layer: int, num_blocks: int = 1) -> int:
        """MTP layers of which `names` holds tensors."""
        bare, count = [without_outer(name) for name in names], 0
        while True:
            first, last = count * num_blocks, (count + 1) * num_blocks - 1
            numbered = [old.format(L=first_layer + count, i=count, j=first, k=last) for old in self._numbered]
            if not any(name.startswith(tuple(numbered)) for name in bare):
                return count
            count += 1

    def fills(self, names: Iterable[str]) -> bool:
        """Whether these tensors are MTP layers of this family and nothing else but an embedding and an output head."""
        patterns = [(_pattern(published), ours) for published, ours in self.tensors]
        projections, blocks = set(), set()  # numbers of the layers that have them
        for name in map(without_outer, names):
            if name.startswith((_EMBEDDING, _HEAD)):
                continue
            matches = [(match, ours) for pattern, ours in patterns if (match := pattern.match(name))]
            if not matches:
                return False
            match, ours = max(matches, key=lambda pair: pair[0].end())
            number = match[1] if match.re.groups else ""
            if ours == "projection.":
                projections.add(number)
            elif ours.startswith("blocks."):
                blocks.add(number)
        # Where a target's own layers have such names, too, every layer must have a projection.
        numbered_alike = any("{L}" in published for published in self._numbered)
        return bool(projections) and (not numbered_alike or blocks <= projections)

    @property
    def _numbered(self) -> list[str]:
        return [published for published, _ in self.tensors if "{" in published]


def without_outer(name: str) -> str:
    """A tensor's name without the parts that a composite model puts in front."""
    for _ in _OUTER:
        for prefix in _OUTER:
            name = name.removeprefix(prefix)
    return name


def _pattern(published: str) -> re.Pattern[str]:
    """A published prefix with any number in it."""
    return re.compile(re.sub(r"\\{[Lijk]\\}", r"(\\d+)", re.escape(published)))


FAMILIES: tuple[MtpFamily, ...] = (
    MtpFamily(
        "deepseek_v3",
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm_ocr_text"),
        tensor_names.DEEPSEEK,
        # A layer of sparse attention that shares the choice of keys with the one before it has none before it here.
        entries=(("indexer_types", "full"),),
    ),
    MtpFamily(
        "dots3_note",
        ("dots3_note_text",),
        (*tensor_names.DEEPSEEK, ("mtp.embed_tokens.", "embed_tokens.")),
        entries=(("layer_types", "sliding_attention"), ("mlp_layer_types", "dense")),
    ),
    MtpFamily(
        "qwen3_next",
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        tensor_names.QWEN,
        count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        entries=(("layer_types", "full_attention"),),
    ),
    MtpFamily("mellum", ("mellum",), tensor_names.QWEN),
    MtpFamily(
        "exaone_moe",
        ("exaone_moe",),
        tensor_names.QWEN,
        entries=(("layer_types", "full_attention"), ("mlp_layer_types", "dense")),
    ),
    MtpFamily("exaone4_5", ("exaone4",), tensor_names.QWEN, entries=(("layer_types", "sliding_attention"),)),
    MtpFamily("ernie4_5_moe", ("ernie4_5_moe",), tensor_names.ERNIE, final_norm=False),
    MtpFamily("nemotron_h", ("nemotron_h",), tensor_names.NEMOTRON, blocks_field="mtp_layers_block_type"),
    MtpFamily(
        "step3p5",
        ("step3p5",),
        tensor_names.STEP,
        carry="raw",
        target_state="raw",
        # The lists of the published config are cut to the target's layers; of the MTP layers' entries all are zero.
        entries=(("swiglu_limits", None), ("swiglu_limits_shared", None)),
    ),
    MtpFamily(
        "inkling",
        ("inkling_text",),
        tensor_names.INKLING,
        count_fields=("num_mtp_layers", "mtp_config.num_nextn_predict_layers"),
        hidden_first=True,
        final_norm="chain_hidden_post_norm",
        divisor_field="logits_mup_width_multiplier",
    ),
    MtpFamily("mimo", ("mimo",), tensor_names.MIMO, hidden_first=True),
    MtpFamily(
        "mimo_v2_flash",
        ("mimo_v2_flash",),
        tensor_names.MIMO_V2,
        chained=False,
        entries=(("layer_types", "sliding_attention"), ("mlp_layer_types", "dense")),
    ),
    MtpFamily("longcat_flash", ("longcat_flash",), tensor_names.LONGCAT, plain_layers=True),
    MtpFamily("hy_v3", ("hy_v3",), tensor_names.FINAL),
    MtpFamily(
        "hy_v4",
        ("hy_v4", "hy_v4_vl_text"),
        tensor_names.HY_V4,
        count_fields=(),  # the config may count one more than there are
        entries=(("indexer_types", "full"), ("mlp_layer_types", "sparse")),
        plain_layers=True,
    ),
    MtpFamily("bailing_hybrid", ("bailing_hybrid",), tensor_names.FINAL, entries=(("layer_types", "full_attention"),)),
    MtpFamily(
        "deepseek_v4",
        ("deepseek_v4",),
        tensor_names.DEEPSEEK_V4,
        carry="raw",
        target_state="raw",
        entries=(("layer_types", "sliding_attention"), ("mlp_layer_types", "moe")),
        streams=Streams("hc_mult", "hc_head", apart=True),
    ),
    MtpFamily(
        "qwen4_exp",
        ("qwen4_exp_text",),
        tensor_names.QWEN4,
        count_fields=("mtp_num_hidden_layers",),
        final_norm=False,  # the head of the streams has one
        carry="raw",
        target_state="raw",
        entries=(("layer_types", "indexed_attention"),),
        streams=Streams("hc_count", "hyper_connection_mixer", apart=False),
        keys_rotate=True,
    ),
)


def family_of(model_type: str) -> MtpFamily | None:
    """The row of a target's text config."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
