"""Drawing: against NumPy's own cut of the distribution, and by counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41flash.errors import InputError
from v41flash.serving.sampling import Sampling, draw, masked_logits

VOCABULARY = 23
ALLOWED = np.arange(VOCABULARY) % 5 != 0
SETTINGS = dict(
    temperature=[1.0, 0.5, 2.0, 0.0, 1.0, 1.3, 0.7],
    top_p=[1.0, 0.9, 0.6, 0.3, 1e-6, 1.0, 0.8],
    top_k=[0, 0, 7, 5, 0, 3, 100],
)
BATCH = 7


def logits():
    return np.random.default_rng(1).normal(size=(BATCH, VOCABULARY)).astype(np.float32) * 2


def cut(row, temperature, top_p, top_k):
    """Probabilities that are drawn from, by the definition of each setting."""
    row = np.where(ALLOWED, row.astype(np.float64), -np.inf)
    if temperature == 0:
        return (row == row.max()).astype(float)
    p = np.exp((row - row.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: top_k or None]
    if top_p < 1:
        kept = kept[: np.searchsorted(np.cumsum(p[order]), top_p) + 1]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def expected():
    settings = zip(logits(), *SETTINGS.values(), strict=True)
    return np.stack([cut(*row) for row in settings])


def test_distributions_are_cut_as_defined():
    sampling = Sampling.create(BATCH, ALLOWED, **SETTINGS)
    scores = jax.jit(masked_logits)(logits(), sampling)
    np.testing.assert_allclose(jax.nn.softmax(scores), expected(), atol=1e-6)


def test_frequencies():
    sampling = Sampling.create(BATCH, ALLOWED, **SETTINGS)
    count = 4000

    @jax.jit
    def many(logits, positions):
        each = jax.vmap(lambda p: draw(logits, sampling, jnp.full(BATCH, p)).tokens)
        return each(positions)

    tokens = np.asarray(many(logits(), jnp.arange(count)))
    p = expected()
    for b in range(BATCH):
        found = np.bincount(tokens[:, b], minlength=VOCABULARY) / count
        assert (np.abs(found - p[b]) <= 5 * np.sqrt(p[b] * (1 - p[b]) / count) + 1e-9).all()


def test_a_draw_depends_on_seed_position_and_its_own_row():
    call = jax.jit(draw, static_argnames="top")
    rows = np.tile(logits()[:1], (BATCH, 1))
    keywords = dict(temperature=1.5, seed=[4, 4, 5, 6, 7, 8, 9])
    sampling = Sampling.create(BATCH, ALLOWED, **keywords)
    drawn = [np.asarray(call(rows, sampling, jnp.full(BATCH, p)).tokens) for p in range(30)]
    drawn = np.stack(drawn)
    np.testing.assert_array_equal(drawn[:, 0], drawn[:, 1])
    assert len({tuple(drawn[:, b]) for b in range(BATCH)}) == BATCH - 1
    # A neighbour whose distribution is cut takes the whole batch through the sort.
    other = Sampling.create(BATCH, ALLOWED, **keywords, top_p=[1.0, 0.5] + [1.0] * 5)
    rows[2:] = logits()[2:]
    again = [np.asarray(call(rows, other, jnp.full(BATCH, p)).tokens[0]) for p in range(30)]
    np.testing.assert_array_equal(again, drawn[:, 0])


def test_logprobs_are_the_models_own():
    sampling = Sampling.create(BATCH, ALLOWED, **SETTINGS)
    drawn = jax.jit(draw, static_argnames="top")(logits(), sampling, jnp.arange(BATCH), top=4)
    own = np.asarray(jax.nn.log_softmax(np.where(ALLOWED, logits(), -np.inf)))
    rows = np.arange(BATCH)
    np.testing.assert_allclose(drawn.logprobs, own[rows, drawn.tokens], atol=1e-6)
    np.testing.assert_array_equal(drawn.top_tokens, np.argsort(-own)[:, :4])
    np.testing.assert_allclose(drawn.top_logprobs, -np.sort(-own)[:, :4], atol=1e-6)
    assert drawn.tokens[3] == drawn.top_tokens[3, 0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(temperature=-0.1), "temperature = -0.1: must be a finite number, at least 0"),
        (dict(temperature=[1.0, np.nan]), "temperature = nan"),
        (dict(top_p=0), "top_p = 0: must be above 0 and at most 1"),
        (dict(top_p=1.1), "top_p = 1.1"),
        (dict(top_k=-1), "top_k = -1"),
        (dict(seed=[0, 2**32]), "seed = 4294967296"),
        (dict(seed=[1]), "seed: 1 values for 2 sequences"),
    ],
)
def test_settings_refuse(keywords, message):
    with pytest.raises(InputError, match=message):
        Sampling.create(2, np.ones(4, bool), **keywords)
