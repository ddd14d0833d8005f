"""Sampling of a batch: each row by its own rules, the same alone as among others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from parallel.engine import sampling
from parallel.engine.sampling import CANDIDATES, Sampler
from parallel.wire import NewRow, Sampling

VOCABULARY = 1000


@pytest.fixture
def logits() -> mx.array:
    return mx.random.normal((6, VOCABULARY), key=mx.random.key(7)) * 3


def rows(*params: Sampling, seed: int = 11, output: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> list[NewRow]:
    return [NewRow(i, i, p, seed + i, list(prompt), list(output)) for i, p in enumerate(params)]


def draws(params: Sampling, logits: mx.array, count: int = 400) -> list[int]:
    """`count` draws of one row at as many positions."""
    sampler = Sampler(rows(params))
    out = []
    for position in range(count):
        sampled = sampler(logits, [position])
        if sampled.whole is not None and not np.array(sampled.whole).all():
            sampled = sampler(logits, [position], full=True)
        out += sampled.tokens.tolist()  # type: ignore[arg-type, operator]
    return out


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that top-k and top-p leave, computed the plain way."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    if top_k:
        order = order[:top_k]
    p = np.exp(scaled[order] - scaled[order].max())
    p /= p.sum() if top_k else np.exp(scaled - scaled.max()).sum()
    before = np.cumsum(p) - p
    return set(order[before < top_p].tolist())


def test_temperature_zero_is_the_largest_logit(logits: mx.array) -> None:
    sampled = Sampler(rows(*[Sampling(temperature=0.0)] * 6))(logits, [0] * 6)
    assert sampled.tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_greedy_and_random_rows_mix(logits: mx.array) -> None:
    params = [Sampling(temperature=0.0), Sampling(temperature=5.0)] * 3
    sampled = np.array(Sampler(rows(*params))(logits, [0] * 6).tokens)
    best = np.array(mx.argmax(logits, axis=-1))
    assert (sampled[::2] == best[::2]).all()
    assert (sampled[1::2] != best[1::2]).any()


def test_a_row_draws_the_same_alone_as_in_a_batch(logits: mx.array) -> None:
    params = [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.3, min_p=0.05),
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, repetition=1.3),
    ]
    batch = rows(*params, prompt=(1, 2, 3))
    together = Sampler(batch)(logits, [3, 5, 7, 9, 11, 13]).tokens.tolist()
    alone = [Sampler([row])(logits[i : i + 1], [3 + 2 * i]).tokens.tolist()[0] for i, row in enumerate(batch)]  # type: ignore[index, union-attr]
    assert together == alone


def test_the_draw_depends_on_seed_and_position() -> None:
    flat = mx.zeros((1, VOCABULARY))
    at = lambda seed, position: Sampler(rows(Sampling(), seed=seed))(flat, [position]).tokens.tolist()  # noqa: E731
    assert at(1, 5) == at(1, 5)
    assert len({tuple(at(1, p)) for p in range(20)} | {tuple(at(s, 5)) for s in range(20)}) > 30


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.5), (0, 0.9), (3, 0.9), (50, 0.5), (CANDIDATES + 50, 0.99), (0, 0.0)]
)
def test_draws_stay_within_top_k_and_top_p_and_reach_all_of_it(logits: mx.array, top_k: int, top_p: float) -> None:
    may = allowed(np.array(logits[0]), 1.0, top_k, max(top_p, 1e-9))
    seen = set(draws(Sampling(temperature=1.0, top_k=top_k, top_p=top_p), logits[:1]))
    assert seen <= may
    if len(may) <= 5:
        assert seen == may


def test_top_p_is_exact_where_the_candidates_hold_too_little_mass() -> None:
    flat = mx.random.normal((1, VOCABULARY), key=mx.random.key(3)) * 0.01
    sampler = Sampler(rows(Sampling(temperature=1.0, top_p=0.9)))
    first = sampler(flat, [0])
    assert first.whole is not None and not np.array(first.whole).all()
    seen = set(draws(Sampling(temperature=1.0, top_p=0.9), flat, 3000))
    may = allowed(np.array(flat[0]), 1.0, 0, 0.9)
    assert seen <= may
    assert len(seen) > CANDIDATES


def test_draws_follow_the_distribution() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    counts = np.bincount(draws(Sampling(temperature=1.0), logits, 4000), minlength=3) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.03


def test_min_p_cuts_below_a_share_of_the_best(logits: mx.array) -> None:
    p = np.array(mx.softmax(logits[0]))
    may = set(np.nonzero(p >= 0.2 * p.max())[0].tolist())
    assert set(draws(Sampling(temperature=1.0, min_p=0.2), logits[:1])) == may


def test_logit_bias_bans_and_forces() -> None:
    logits = mx.zeros((2, 10))
    params = [Sampling(temperature=0.0, bias={3: 100.0}), Sampling(temperature=0.0, bias={0: -100.0, 99: 5.0})]
    assert Sampler(rows(*params))(logits, [0, 0]).tokens.tolist() == [3, 1]


def test_presence_and_frequency_count_the_output_and_grow_with_it() -> None:
    logits = mx.array([[1.0, 0.9, 0.0]])
    sampler = Sampler(rows(Sampling(temperature=0.0, frequency=0.2), prompt=(0, 0, 0)))
    assert [sampler(logits, [i]).tokens.tolist()[0] for i in range(4)] == [0, 1, 0, 1]  # type: ignore[index]


def test_repetition_counts_prompt_and_output() -> None:
    logits = mx.array([[2.0, 1.5, -1.0]])
    fresh = Sampler(rows(Sampling(temperature=0.0, repetition=1.5)))
    told = Sampler(rows(Sampling(temperature=0.0, repetition=1.5), prompt=(0,)))
    assert (fresh(logits, [0]).tokens.tolist(), told(logits, [0]).tokens.tolist()) == ([0], [1])


def test_counts_survive_a_neighbour_that_joins_and_one_that_leaves() -> None:
    penalised = Sampling(temperature=0.0, frequency=0.2)
    a, b = rows(penalised, penalised)
    logits = mx.array([[1.0, 0.9, 0.0]])
    first = Sampler([a])
    first(logits, [0])
    both = Sampler([b, a], first)
    assert both(mx.concatenate([logits, logits]), [0, 1]).tokens.tolist() == [0, 1]
    alone = Sampler([b], both)
    assert alone(logits, [1]).tokens.tolist() == [1]


def test_logprobs_are_the_models_own_and_only_for_rows_that_ask(logits: mx.array) -> None:
    params = [Sampling(temperature=0.0), Sampling(temperature=2.0, logprobs=0), Sampling(temperature=0.0, logprobs=3)]
    sampler = Sampler(rows(*params))
    sampled = sampler(logits[:3], [0, 0, 0])
    tokens: list[int] = sampled.tokens.tolist()  # type: ignore[assignment]
    tops = sampler.read_logprobs(sampled, tokens)
    expected = np.array(logits[:3] - mx.logsumexp(logits[:3], axis=-1, keepdims=True))
    assert sorted(tops) == [1, 2]
    assert [len(tops[1]), len(tops[2])] == [1, 4]
    assert tops[1][0] == (tokens[1], pytest.approx(expected[1, tokens[1]], abs=1e-5))
    best = np.argsort(-expected[2])[:3].tolist()
    assert [token for token, _ in tops[2]] == [tokens[2], *best]


def test_top_p_asks_for_the_host_only_where_candidates_are_used() -> None:
    assert sampling.needs_host(Sampling(temperature=1.0, top_p=0.9)) == sampling.on_cpu()
    assert not sampling.needs_host(Sampling(temperature=0.0, top_p=0.9))
    assert not sampling.needs_host(Sampling(temperature=1.0))
    assert not sampling.needs_host(Sampling(temperature=1.0, top_p=0.9, top_k=40))
