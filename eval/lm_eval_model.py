"""A trained checkpoint as a model of lm-evaluation-harness (`pip install -e '.[eval]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from eval.scoring import Scorer
from v41flash.errors import InputError
from v41flash.serving import Generator

_MAX_TOKENS = 256
# Keys of a task's generation_kwargs that this model follows.
_KNOWN = {"until", "max_gen_toks", "temperature", "top_p", "top_k", "do_sample"}


class CheckpointLM(TemplateLM):
    """Answers the three kinds of request.

    Log-likelihoods are under the model's own distribution, every layer over every token. A text
    begins with bos, whatever the task; what is too long for the model loses its beginning.
    """

    def __init__(self, generator: Generator, *, seed: int = 0):
        """Takes the generator; `seed` is that of sampled answers."""
        super().__init__()
        self._generator, self._scorer, self._seed = generator, Scorer(generator), seed

    @property
    def eot_token_id(self) -> int:
        """What ends a document."""
        return self._generator.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What begins one."""
        return self._generator.tokenizer.bos_id

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self._generator.config.max_position_embeddings

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, without specials: bos is set in front where tokens are scored."""
        del add_special_tokens, kwargs
        return [int(token) for token in self._generator.tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        rows = []
        for (context, continuation), before, after in requests:
            if not after:
                raise InputError(f"nothing to score after {context!r}: {continuation!r}")
            if len(after) >= self.max_length:
                raise InputError(
                    f"a continuation of {len(after)} tokens exceeds the {self.max_length} "
                    "positions of the model"
                )
            before = before if before[:1] == [self.prefix_token_id] else self._begun(before)
            rows.append((before + after)[-self.max_length :])
        results = []
        for (_, _, after), found in zip(requests, self._scorer.score(rows), strict=True):
            own = slice(-len(after), None)
            results.append((float(found.logprobs[own].sum()), bool(found.likeliest[own].all())))
        return results

    def _begun(self, tokens: list[int]) -> list[int]:
        return [self.prefix_token_id, *tokens]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows that do not overlap where one is too long."""
        del disable_tqdm
        owners, rows, sizes = [], [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            windows = utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length - 1, context_len=1
            )
            for before, after in map(utils.make_disjoint_window, windows):
                owners.append(number)
                rows.append(before + after)
                sizes.append(len(after))
        totals = [0.0] * len(requests)
        found = zip(owners, sizes, self._scorer.score(rows), strict=True)
        for number, size, scored in found:
            totals[number] += float(scored.logprobs[-size:].sum())
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues texts up to the stop texts of their task."""
        del disable_tqdm
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for members in groups.values():
            settings = _settings(requests[members[0]].args[1])
            room = self.max_length - settings["max_tokens"] - 1
            prompts = [
                self._begun(self.tok_encode(requests[number].args[0])[-room:]) for number in members
            ]
            results = self._generator.generate(prompts, seed=self._seed, **settings)
            for number, result in zip(members, results, strict=True):
                texts[number] = result.text
        return texts


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """A task's generation_kwargs as settings of `Generator.generate`."""
    unknown = set(arguments) - _KNOWN
    if unknown:
        raise InputError(
            f"generation_kwargs: {sorted(unknown)[0]!r} is none of {', '.join(sorted(_KNOWN))}"
        )
    until = arguments.get("until") or []
    sampled = arguments.get("do_sample", arguments.get("temperature", 0) > 0)
    return {
        "max_tokens": int(arguments.get("max_gen_toks", _MAX_TOKENS)),
        "temperature": float(arguments.get("temperature", 1.0)) if sampled else 0.0,
        "top_p": float(arguments.get("top_p", 1.0)),
        "top_k": int(arguments.get("top_k", 0)),
        "stop": tuple(text for text in ([until] if isinstance(until, str) else until) if text),
    }
