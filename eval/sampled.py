"""k sampled answers to every question, at several efforts: pass@k, and the mean with its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from eval import rating as rating_lib
from eval.statistics import standard_error
from eval.tasks.questions import Question
from v41flash.serving import Generator
from v41flash.text.prompt import END_THINK, PromptEncoder, render
from v41flash.text.prompt_reply import parse_reply


class Task(Protocol):
    """Questions, and what answers to them are worth.

    Attributes:
        questions: all of them.
        stop: texts that end an answer of a model that only continues text.
    """

    questions: list[Question]
    stop: tuple[str, ...]

    def score(self, question: Question, answer: str) -> float:
        """How right an answer is, 0 .. 1; 1 is solved."""
        ...


class Manner(NamedTuple):
    """How questions are asked.

    Attributes:
        samples: answers a question.
        max_tokens: of an answer with its reasoning.
        temperature: 0 takes the likeliest token.
        top_p: see `v41flash.serving.sampling.Sampling`.
        seed: of the draws.
        chat: as a user's message; else as text to be continued.
    """

    samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool


def pass_at(k: int, samples: int, solved: int) -> float:
    """The chance that of k answers, drawn from `samples` of which `solved` are right, one is.

    The unbiased estimate of pass@k (Chen et al. 2021, section 2.1): 1 - C(n - c, k) / C(n, k).
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {solved} solved in {samples}")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def ask(
    generator: Generator,
    task: Task,
    questions: Sequence[Question],
    effort: int | None,
    how: Manner,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Asks every question `how.samples` times.

    Args:
        generator: of the model.
        task: scores the answers.
        questions: of the task.
        effort: of the reasoning; None: none.
        how: see `Manner`.
        progress: told how many answers there are, of how many, after each.

    Returns:
        A row for every answer, those of a question together: id, sample, answer, score, tokens,
        finished.
    """
    thinking = effort is not None
    decode = None
    if how.chat:
        encoder = PromptEncoder(generator.tokenizer)

        def decode(tokens: Sequence[int]) -> str:
            # The end of the message is no part of its text.
            eos = generator.tokenizer.eos_id
            return encoder.decode([token for token in tokens if token != eos])

    def prompt(question: Question) -> str | np.ndarray:
        if not how.chat:
            return question.prompt
        messages = [{"role": "user", "content": question.prompt}]
        pieces = render(messages, thinking=thinking, effort=effort if thinking else "high")
        return encoder.encode(pieces).tokens

    asked = [question for question in questions for _ in range(how.samples)]
    pieces = generator.stream(
        [prompt(question) for question in asked],
        stop=() if how.chat else task.stop,
        decode=decode,
        max_tokens=how.max_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        seed=how.seed,
    )
    texts, tokens = [""] * len(asked), [0] * len(asked)
    rows: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        number = piece.index
        texts[number] += piece.text
        tokens[number] += len(piece.tokens)
        if piece.finish is None:
            continue
        answer = _answer(texts[number], thinking) if how.chat else texts[number]
        rows[number] = {
            "id": asked[number].id,
            "sample": number % how.samples,
            "answer": answer,
            "score": task.score(asked[number], answer),
            "tokens": tokens[number],
            "finished": piece.finish == "stop",
        }
        progress(len(rows), len(asked))
    return [rows[number] for number in range(len(asked))]


def _answer(text: str, thinking: bool) -> str:
    """What follows the reasoning; who did not finish reasoning has no answer."""
    if thinking and END_THINK not in text:
        return ""
    return parse_reply(text, thinking=thinking).answer


def summary(
    questions: Sequence[Question], rows: Sequence[dict[str, Any]], samples: int
) -> dict[str, float]:
    """The figures of one effort: score and its error over questions, pass@k, length, rating."""
    scores = np.array([row["score"] for row in rows]).reshape(len(questions), samples)
    means = scores.mean(1)
    solved = (scores == 1).sum(1)
    found = {
        "questions": len(questions),
        "samples": samples,
        "score": float(means.mean()),
        "standard_error": standard_error(means.tolist()),
        "tokens": float(np.mean([row["tokens"] for row in rows])),
        "finished": float(np.mean([row["finished"] for row in rows])),
    }
    for k in sorted({1, *(2**i for i in range(1, samples.bit_length())), samples}):
        found[f"pass@{k}"] = float(np.mean([pass_at(k, samples, int(c)) for c in solved]))
    rated = [i for i, question in enumerate(questions) if question.rating is not None]
    if rated:
        ratings = [questions[i].rating for i in rated]
        fitted = rating_lib.fit(ratings, (solved[rated] / samples).tolist())
        found |= {"rating": fitted.value, "rating_error": fitted.error}
    return found
