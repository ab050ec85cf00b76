"""The sweep: calibrate costs, screen the settings, measure those that may be worth it, choose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import Drafter
from ..verification.lenient import Lenience
from .front import Limits
from .measure import Sampler, answer, log_likelihood, share_matched
from .points import point_of
from .report import Report
from .screening import Screen, predicted_round
from .settings import WITHOUT_DRAFTS, Setting, settings_of
from .store import Store

Prompt: TypeAlias = str | list[dict[str, str]]
Metric: TypeAlias = Callable[[Prompt, str], float]

_CALIBRATION_PROMPTS, _CALIBRATION_TOKENS = 2, 32
_MARGIN = 1.1  # a setting is left out where another is predicted to be faster by more than this, and loses no more


def pareto(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    effort: Sequence[int] = (1,),
    lenience: Sequence[float] = (1.0,),
    num_draft_tokens: Sequence[int] = (2, 4, 8),
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 3,
    seed: int = 0,
    metric: Metric | None = None,
    limits: Limits | None = None,
    measure_all: bool = False,
) -> Report:
    """Measure a drafter's settings on your prompts, one at a time, and choose the fastest that keeps to the limits.

    Args:
        target: a decoder-only model.
        drafter: bound to it.
        tokenizer: the target's.
        prompts: at least two texts, or chats for the chat template.
        out: folder for everything that is written; give the same again to go on after a stop.
        effort, lenience, num_draft_tokens: values to combine. lenience 1 and decoding without drafts are always among
            the settings.
        max_new_tokens, temperature: of the answers; temperature 0 decodes greedily.
        repeats: how often each answer is timed; when sampling, each time from another seed.
        seed: of the first repeat. All settings see the same seeds.
        metric: (prompt, answer) -> a number, higher is better. Without it settings are compared by KL.
        limits: what the chosen setting must keep to.
        measure_all: measure what screening would leave out, too.

    Returns:
        The points, the front and the choice, as they were written to `out`.

    Raises:
        ValueError: an argument cannot be used, or `out` holds another sweep; nothing has been run or written then.
    """
    limits = limits or Limits()
    sampler = Sampler(max_new_tokens, temperature)
    _check(target, drafter, prompts, repeats, metric, limits)
    settings = settings_of(drafter, effort, lenience, num_draft_tokens)
    ids = [_encoded(tokenizer, prompt) for prompt in prompts]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    asked = _asked(target, drafter, ids, sampler, seed)
    sweep = _Sweep(target, drafter, ids, sampler, seed, repeats, Store(folder / "measurements.jsonl", asked))
    predicted = sweep.predict(settings)
    measured = settings if measure_all else worth_measuring(predicted)
    answers = sweep.measure(measured)

    def score(i: int, tokens: list[int]) -> float:
        assert metric is not None
        return float(metric(prompts[i], str(tokenizer.decode(tokens, skip_special_tokens=True))))

    plain, scorer, greedy = answers[WITHOUT_DRAFTS], None if metric is None else score, temperature == 0.0
    points = [point_of(one, answers[one], plain, scorer, predicted[one][0], greedy) for one in measured]
    skipped = [setting for setting in settings if setting not in measured]
    report = Report(points, skipped, limits, asked, drafter.spec_config)
    report.write(folder)
    return report


def worth_measuring(predicted: dict[Setting, tuple[float, float]]) -> list[Setting]:
    """Settings near the predicted front of (tokens a second, KL), decoding without drafts in any case."""
    return [
        setting
        for setting, (speed, kl) in predicted.items()
        if setting == WITHOUT_DRAFTS
        or not any(other > _MARGIN * speed and loss <= kl for other, loss in predicted.values())
    ]


class _Sweep:
    """Runs what the store does not hold yet."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        prompts: list[list[int]],
        sampler: Sampler,
        seed: int,
        repeats: int,
        store: Store,
    ) -> None:
        self.target, self.drafter, self.prompts, self.sampler = target, drafter, prompts, sampler
        self.seed, self.repeats, self.store = seed, repeats, store
        self.warm: set[tuple[int, int]] = set()

    def predict(self, settings: Sequence[Setting]) -> dict[Setting, tuple[float, float]]:
        """(tokens a second, mean KL of a token) of every setting."""
        rounds = {}
        for setting in tqdm(settings, desc="calibrating", disable=None):
            if setting.lenience == 1.0:
                rounds[setting] = self._round_seconds(setting)
        levels = sorted({setting.lenience for setting in settings}, reverse=True)
        longest = max(setting.num_draft_tokens for setting in settings)
        efforts = list(dict.fromkeys(setting.effort for setting in settings if setting != WITHOUT_DRAFTS))
        screened = {one: self._screened(one, levels, longest) for one in tqdm(efforts, desc="screening", disable=None)}
        predicted = {WITHOUT_DRAFTS: (1.0 / rounds[WITHOUT_DRAFTS], 0.0)}
        for setting in settings[1:]:
            found, level = screened[setting.effort], levels.index(setting.lenience)
            length = setting.num_draft_tokens
            tokens, kl = predicted_round(found["passed"][level], found["divergence"][level], length)
            predicted[setting] = (tokens / rounds[setting._replace(lenience=1.0)], kl)
        return predicted

    def measure(self, settings: Sequence[Setting]) -> dict[Setting, list[list[dict[str, Any]]]]:
        """[prompts][repeats] records of every setting. Settings take turns, so that a slow minute meets all of them."""
        turns = list(self._turns(settings))
        for setting, prompt, repeat in tqdm(turns, desc="measuring", disable=None):
            key = f"answer {prompt}, repeat {repeat}, {setting.key}"
            if key not in self.store:
                self.store.put(key, self._answer(setting, prompt, repeat))
        return {
            setting: [
                [self.store[f"answer {i}, repeat {repeat}, {setting.key}"] for repeat in range(self.repeats)]
                for i in range(len(self.prompts))
            ]
            for setting in settings
        }

    def _turns(self, settings: Sequence[Setting]) -> Iterator[tuple[Setting, int, int]]:
        for repeat in range(self.repeats):
            for prompt in range(len(self.prompts)):
                yield WITHOUT_DRAFTS, prompt, repeat  # the others are compared with its text
                first = (repeat + prompt) % len(settings)
                for setting in [*settings[first:], *settings[:first]]:
                    if setting != WITHOUT_DRAFTS:
                        yield setting, prompt, repeat

    def _answer(self, setting: Setting, prompt: int, repeat: int) -> dict[str, Any]:
        self._warm_up(setting)
        ids, config = self.prompts[prompt], setting.config(self.drafter.spec_config, self.seed + repeat)
        record = answer(self.target, self.drafter, config, ids, self.sampler)
        lossless = record["tokens"]
        if setting != WITHOUT_DRAFTS:
            lossless = self.store[f"answer {prompt}, repeat {repeat}, {WITHOUT_DRAFTS.key}"]["tokens"]
        record["match"] = share_matched(record["tokens"], lossless)
        record["log_likelihood"] = log_likelihood(self.target, ids, record["tokens"], self.sampler.temperature)
        return record

    def _warm_up(self, setting: Setting) -> None:
        """The first call of a shape compiles, allocates and checks; it is not timed."""
        shape = (setting.effort, setting.num_draft_tokens)
        if shape not in self.warm:
            short = Sampler(min(8, self.sampler.max_new_tokens), self.sampler.temperature)
            answer(self.target, self.drafter, setting.config(self.drafter.spec_config, 0), self.prompts[0], short)
            self.warm.add(shape)

    def _round_seconds(self, setting: Setting) -> float:
        """Seconds of a round, its drafting included; lenience does not change them."""
        key = f"seconds of a round, {setting.key}"
        if key not in self.store:
            self._warm_up(setting)
            short = Sampler(min(_CALIBRATION_TOKENS, self.sampler.max_new_tokens), self.sampler.temperature)
            config = setting.config(self.drafter.spec_config, self.seed)
            seconds, rounds = 0.0, 0
            for ids in self.prompts[:_CALIBRATION_PROMPTS]:
                record = answer(self.target, self.drafter, config, ids, short)
                seconds += record["arrivals"][-1] - record["arrivals"][0]
                rounds += record["stats"]["num_verifications"] - 1
            self.store.put(key, max(seconds, 1e-9) / max(rounds, 1))
        return self.store[key]

    def _screened(self, effort: int, levels: Sequence[float], longest: int) -> dict[str, Any]:
        """What each lenience would have accepted in a strict run."""
        key = f"screening, effort {effort}, lenience {', '.join(f'{level:g}' for level in levels)}, {longest} tokens"
        if key not in self.store:
            screen = Screen(tuple(Lenience(level) for level in levels), longest)
            strict = Setting(effort, 1.0, longest).config(self.drafter.spec_config, self.seed)
            config = strict.with_options(lenience=screen, schedule=None)
            for ids in self.prompts:
                answer(self.target, self.drafter, config, ids, self.sampler)
            self.store.put(key, screen.predictions())
        return self.store[key]


def _check(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    repeats: int,
    metric: Metric | None,
    limits: Limits,
) -> None:
    if target.config.is_encoder_decoder:
        raise ValueError(f"`target` is {type(target).__name__}, an encoder-decoder; a sweep takes decoder-only models.")
    if not isinstance(drafter, Drafter):
        raise ValueError(f"`drafter` is a {type(drafter).__name__}; load one by AutoDrafter.")
    drafter.check_bound_to(target)
    if isinstance(prompts, str) or len(prompts) < 2:
        raise ValueError("`prompts` needs at least two texts or chats: intervals come from resampling them.")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"`repeats` is {repeats!r}; give a positive integer.")
    if metric is not None and not callable(metric):
        raise ValueError(f"`metric` is a {type(metric).__name__}; give a function (prompt, answer) -> number.")
    if limits.min_quality is not None and metric is None:
        raise ValueError(f"`min_quality` is {limits.min_quality} without a `metric`; give one, or use `max_kl`.")


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a text, or of a chat in the tokenizer's template."""
    text, is_chat = prompt, not isinstance(prompt, str)
    if is_chat:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
    if not ids:
        raise ValueError(f"`prompts` has {prompt!r}, which holds no token.")
    return list(ids)


def _asked(
    target: PreTrainedModel, drafter: Drafter, prompts: list[list[int]], sampler: Sampler, seed: int
) -> dict[str, Any]:
    """What measurements depend on, beside the setting."""
    options = {name: getattr(drafter, name, None) for name in drafter.option_names}
    path = target.config.name_or_path
    return {
        "target": (Path(path).name if Path(path).is_dir() else path) or type(target).__name__,  # no private paths
        "target_weights": _digest(target),
        "drafter": drafter.method,
        "drafter_weights": _digest(drafter),
        "drafter_options": {name: value for name, value in options.items() if isinstance(value, int | float | str)},
        "draft_sampling": drafter.spec_config.draft_sampling,
        "schedule": drafter.spec_config.schedule,
        "lenient_between": drafter.spec_config.lenient_between,
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else target.device.type,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        "num_prompts": len(prompts),
        "max_new_tokens": sampler.max_new_tokens,
        "temperature": float(sampler.temperature),
        "seed": seed,
    }


def _digest(module: torch.nn.Module) -> str:
    """Tells weights, and vocabularies to draft, apart by size and first numbers; offloaded ones do not count."""
    held = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
    tensors = [(list(tensor.shape), tensor.flatten()[:16].tolist()) for tensor in held]
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:16]
