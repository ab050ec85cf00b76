"""Train a drafter for a target of your own.

    python -m hf_specdec.training eagle3 --target TARGET --out FOLDER [options]
    accelerate launch -m hf_specdec.training eagle3 --target TARGET --out FOLDER [options]

Prompts are read or synthesised, the target answers them, its hidden states are kept, and a drafter is trained on them.
Every stage goes on where it was stopped: give the same command again.

    python -m hf_specdec.training calibrate --target TARGET --drafter FOLDER --prompts FILE.jsonl

measures the confidence of a drafter that gives one, and writes what corrects it into the drafter's config.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..drafters.eagle3.configuration import default_aux_layers
from ..export.blocks import save_block_drafter
from ..export.diffusion import save_diffusion
from ..export.eagle3 import save_eagle3
from ..export.mtp import save_mtp
from . import blocks, calibrate, diffusion, eagle3, mtp
from .batches import held_out_batches, train_batches
from .block_start import start_well
from .data import DataOptions, collect
from .loop import TrainOptions, train
from .mtp_start import check_attends, new_mtp_layer
from .vocabulary import most_frequent, unused_token

_METHODS = {
    "data": "only collect the data",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
    "mtp": "an MTP layer",
    "diffusion": "a diffusion drafter",
}
_OPTIONS = {
    "eagle3": eagle3.Eagle3Options,
    "dflash": blocks.BlockOptions,
    "dspark": blocks.DSparkOptions,
    "mtp": mtp.MtpOptions,
    "diffusion": diffusion.DiffusionOptions,
}
_START_TOKENS, _START_TEXTS = 4096, 50  # tokens of a batch, and texts, that a start is fitted to
_START_BATCHES = 16  # that the start of an MTP layer is fitted to
_PATIENCE = timedelta(hours=6)  # processes wait for each other between stages, and answer at their own pace


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.method == "calibrate":
        calibrate.main(chosen)
        return
    on_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if on_cpu or torch.cuda.is_bf16_supported() else "no",
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),  # they are the target's, and frozen
            InitProcessGroupKwargs(timeout=_PATIENCE),
        ],
    )
    target = AutoModelForCausalLM.from_pretrained(chosen.target, dtype=chosen.dtype).eval().requires_grad_(False)
    target = target.to(accelerator.device)
    tokenizer = AutoTokenizer.from_pretrained(chosen.target)
    layers = _aux_layers(parser, target, chosen.aux_layers)
    eagle3.check_target(target)
    if chosen.method == "mtp":
        check_attends(target)
    if chosen.method == "diffusion":
        diffusion.check_layers(target)
    folder = chosen.data or chosen.out / "data"
    num_layers = target.config.get_text_config().num_hidden_layers
    collect(
        target,
        tokenizer,
        folder,
        (*layers, num_layers),
        _options(DataOptions, chosen),
        chosen.prompts,
        chosen.held_out,
    )
    if chosen.method != "data":
        _train(target, tokenizer, accelerator, folder, layers, chosen)


def _train(
    target: PreTrainedModel,
    tokenizer: Any,
    accelerator: Accelerator,
    folder: Path,
    layers: tuple[int, ...],
    chosen: argparse.Namespace,
) -> None:
    options: Any = _options(_OPTIONS[chosen.method], chosen)
    vocab_size = target.config.get_text_config().vocab_size
    own_head = chosen.method not in ("mtp", "diffusion")
    size = min(options.draft_vocab_size if own_head else options.num_frequent, vocab_size)
    target_ids, covered = most_frequent(folder, size, vocab_size)
    kind = "draft" if own_head else "most frequent"
    accelerator.print(f"The {size:,} {kind} tokens make up {covered:.1%} of the answers.")
    if getattr(options, "mask_token_id", 0) is None:
        options = dataclasses.replace(options, mask_token_id=unused_token(folder, tokenizer, vocab_size))
    torch.manual_seed(chosen.seed)
    module: eagle3.Eagle3Training | blocks.BlockTraining | mtp.MtpTraining | diffusion.DiffusionTraining
    embedding: Any = target.get_input_embeddings().weight.detach()
    if isinstance(options, eagle3.Eagle3Options):
        head = eagle3.new_head(target, layers, target_ids, options.intermediate_size)
        module = eagle3.Eagle3Training(head, target, target_ids, options.num_steps, options.decay)
    elif isinstance(options, mtp.MtpOptions):
        few = islice(train_batches(folder, _START_TOKENS, chosen.seed, 0), _START_BATCHES)
        module = mtp.MtpTraining(new_mtp_layer(target, few), target, target_ids, options)
    elif isinstance(options, diffusion.DiffusionOptions):
        drafted_by = diffusion.new_layers(target, options.num_layers)
        module = diffusion.DiffusionTraining(drafted_by, target, target_ids, options)
    else:
        model = blocks.new_block_drafter(target, layers, size, options)
        some = held_out_batches(folder, _START_TOKENS, _START_TEXTS)
        start_well(model.to(accelerator.device), embedding, [batch.to(accelerator.device) for batch in some])
        module = blocks.BlockTraining(model, target, target_ids, options)
    training = _options(TrainOptions, chosen)
    history = train(module.to(accelerator.device), accelerator, folder, chosen.out / "checkpoint", training)
    if not accelerator.is_main_process:
        return
    drafted = target_ids if size < vocab_size else None
    if isinstance(module, eagle3.Eagle3Training):
        save_eagle3(chosen.out, module.model, drafted)
    elif isinstance(module, mtp.MtpTraining):
        save_mtp(chosen.out, module.model, None if options.drafts_all else drafted)
    elif isinstance(module, diffusion.DiffusionTraining):
        save_diffusion(chosen.out, module.model, module.options.block_size, module.mask_token_id)
    else:
        save_block_drafter(chosen.out, module.model, module.lm_head, drafted, _public_name(chosen.target))
    record = {
        "options": {**dataclasses.asdict(options), **dataclasses.asdict(training)},
        f"{'draft_vocabulary' if own_head else 'frequent'}_coverage": covered,
        "held_out": history,
    }
    (chosen.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{chosen.out} holds the drafter: AutoDrafter.from_pretrained({str(chosen.out)!r}, target=model)")


def _public_name(target: str) -> str:
    """What a drafter's config calls its target: a name on the Hub, or the folder's own name."""
    return Path(target).name if Path(target).is_dir() else target


def _aux_layers(parser: argparse.ArgumentParser, target: PreTrainedModel, asked: list[int] | None) -> tuple[int, ...]:
    num_layers = target.config.get_text_config().num_hidden_layers
    layers = tuple(asked) if asked else default_aux_layers(num_layers)
    if sorted(set(layers)) != list(layers) or not all(0 <= layer < num_layers for layer in layers):
        parser.error(
            f"--aux-layers: {list(layers)} is not an ascending list of layers of a target that has {num_layers}; "
            "name the layers whose inputs the head is to read."
        )
    return layers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_specdec.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    methods = parser.add_subparsers(dest="method", required=True, metavar="METHOD")
    title = "correct the confidence of a drafter"
    formatter = argparse.ArgumentDefaultsHelpFormatter
    calibrate.add_arguments(methods.add_parser("calibrate", help=title, description=title, formatter_class=formatter))
    for method, description in _METHODS.items():
        one = methods.add_parser(
            method, help=description, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        one.add_argument("--target", required=True, help="model to draft for: a name on the Hub or a folder")
        one.add_argument("--out", type=Path, required=True, help="folder of the drafter and of work in progress")
        one.add_argument("--data", type=Path, help="data folder, to be shared between runs (OUT/data)")
        one.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL files with prompts to answer")
        one.add_argument("--held-out", type=Path, nargs="*", default=[], help="JSONL files with prompts to keep out")
        one.add_argument("--dtype", default="bfloat16", help="of the target")
        one.add_argument("--aux-layers", type=int, nargs="+", help="layers whose inputs are kept (2, n/2 and n-3)")
        one.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
        _add(one.add_argument_group("data"), DataOptions)
        if method in _OPTIONS:
            _add(one.add_argument_group("drafter"), _OPTIONS[method])
            _add(one.add_argument_group("training"), TrainOptions)
    return parser


def _add(group: Any, options: type) -> None:
    """An argument for each field; the help is the field's line in the class's docstring."""
    help_of = _described(options)
    for field, type_ in _fields(options):
        name, described = f"--{field.name.replace('_', '-')}", dict(default=field.default, help=help_of[field.name])
        if type_ is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, **described)
            continue
        many = typing.get_origin(type_) is tuple
        plain = typing.get_args(type_)[0] if typing.get_args(type_) else type_
        group.add_argument(name, type=plain, nargs="+" if many else None, **described)


def _options(options: Any, chosen: argparse.Namespace) -> Any:
    values = {field.name: getattr(chosen, field.name) for field, _ in _fields(options)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return options(**values, seed=chosen.seed) if "seed" in _names(options) else options(**values)


def _fields(options: Any) -> list[tuple[Any, Any]]:
    hints = typing.get_type_hints(options)
    return [(field, hints[field.name]) for field in dataclasses.fields(options) if field.name != "seed"]


def _names(options: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(options)}


def _described(options: type) -> dict[str, str]:
    """name -> text of the `Attributes:` of a class and its bases, each on one line."""
    lines = [
        line for c in reversed(options.__mro__) for line in (c.__doc__ or "").partition("Attributes:")[2].splitlines()
    ]
    return {name.strip(): text.strip() for name, colon, text in (line.partition(":") for line in lines) if colon}


if __name__ == "__main__":
    main()
