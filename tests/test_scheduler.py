"""The scheduler's rules, and its invariants under random load, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_executor import FakeExecutor, next_token, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import wire
from parallel.engine.loop import Engine
from parallel.engine.scheduler import Limits, Pace, Scheduler
from parallel.engine.sequence import CacheShape, StepResult

SHAPE = CacheShape(fixed_bytes=0, layers=((10, 0),), grain=8)
LIMITS = Limits(
    context=512, slots=8, kv_bytes=200_000, prefix_bytes=50_000, shape=SHAPE, weights_bytes=2_000, chunk_tokens=64
)
GREEDY = wire.Sampling(temperature=0.0)


def submit(id: int, prompt: list[int], max_tokens: int = 5, n: int = 1, stop_ids: tuple[int, ...] = ()) -> wire.Submit:
    return wire.Submit(id, prompt, max_tokens, n, GREEDY, list(stop_ids))


class Bench:
    """An engine on the pretended model, and everything it said."""

    def __init__(self, limits: Limits = LIMITS, depth: int = 2, fail_steps: frozenset[int] = frozenset()) -> None:
        self.now_s = 0.0
        self.executor = FakeExecutor(limits.shape, fail_steps)
        self.scheduler = Scheduler(limits)
        self.engine = Engine(self.scheduler, self.executor, depth=depth, clock=self.tick)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finish: dict[tuple[int, int], str] = {}
        self.failed: dict[int, str] = {}
        self.cached: dict[int, int] = {}

    def tick(self) -> float:
        self.now_s += 0.01
        return self.now_s

    def step(self) -> None:
        for message in self.engine.step():
            match message:
                case wire.Tokens():
                    for token in message.rows:
                        key = (token.id, token.index)
                        assert key not in self.finish, "a token after the end"
                        self.tokens.setdefault(key, []).append(token.token)
                        if token.finish:
                            self.finish[key] = token.finish
                case wire.RequestFailed():
                    self.failed[message.id] = message.message
                case wire.Started():
                    self.cached[message.id] = message.cached

    def run(self, steps: int = 100_000) -> None:
        while not self.engine.idle and steps:
            self.step()
            steps -= 1
        assert steps, "the engine never came to rest"

    @property
    def kinds(self) -> list[str]:
        return [step.kind for step in self.executor.steps if step.kind != "orders"]


def test_an_answer_is_what_the_model_says_alone() -> None:
    bench = Bench()
    bench.engine.add(submit(1, [1, 2, 3], max_tokens=7))
    bench.run()
    assert bench.tokens[1, 0] == reference([1, 2, 3], 7, [])
    assert bench.finish[1, 0] == "length"


def test_a_stop_id_ends_the_answer() -> None:
    stop = reference([1, 2, 3], 7, [])[3]
    bench = Bench()
    bench.engine.add(submit(1, [1, 2, 3], max_tokens=7, stop_ids=(stop,)))
    bench.run()
    assert bench.tokens[1, 0] == reference([1, 2, 3], 7, [stop])
    assert bench.finish[1, 0] == "stop"


def test_the_next_step_is_sent_before_the_last_one_is_read() -> None:
    bench = Bench()
    bench.engine.add(submit(1, [1, 2], max_tokens=4))
    bench.step()
    decodes = [step for step in bench.executor.steps if step.rows]
    assert [row.token for step in decodes for row in step.rows] == [2] or decodes[-1].rows[0].token == -1
    bench.run()
    assert sum(row.token == -1 for step in bench.executor.steps for row in step.rows) == 3


def test_a_row_that_needs_the_host_is_not_looked_ahead() -> None:
    bench = Bench()
    bench.engine.add(wire.Submit(1, [1, 2], 4, 1, GREEDY, [], True))
    bench.run()
    assert all(row.token >= 0 for step in bench.executor.steps for row in step.rows)
    assert bench.tokens[1, 0] == reference([1, 2], 4, [])


def test_a_row_is_not_fed_past_its_last_token() -> None:
    bench = Bench()
    bench.engine.add(submit(1, [1, 2], max_tokens=3))
    bench.run()
    assert sum(len(step.rows) for step in bench.executor.steps) == 3


def test_a_long_prompt_alternates_with_decode_steps() -> None:
    bench = Bench(replace(LIMITS, context=4096, kv_bytes=10**7, chunk_tokens=64))
    bench.engine.add(submit(1, [1, 2], max_tokens=60))
    for _ in range(8):
        bench.step()
    before = len(bench.kinds)
    bench.engine.add(submit(2, list(range(1000)), max_tokens=2))
    while (2, 0) not in bench.finish:
        bench.step()
    kinds = bench.kinds[before:]
    prefills = [i for i, kind in enumerate(kinds) if kind == "prefill"]
    assert len(prefills) >= 1000 // 64
    longest = max(len(run) for run in "".join("p" if kind == "prefill" else " " for kind in kinds).split())
    assert longest <= 5  # steps of the pretended clock take 10 to 20 ms, and prefill may take 50 ms per decode step


def test_the_budget_of_prefill_counts_who_came_since_the_last_decode_step() -> None:
    bench = Bench(replace(LIMITS, slots=32, kv_bytes=10**7, chunk_tokens=512))
    bench.engine.add(submit(1, [1, 2], max_tokens=200))
    for _ in range(30):
        bench.step()
    for id in range(2, 22):
        bench.engine.add(submit(id, list(range(id, id + 12)), max_tokens=2))
    bench.step()
    assert len(chunks(bench)[1]) > 5  # alone, each would have waited for a decode step


def test_orders_wait_for_a_step_that_computes_as_long_as_one_is_in_flight() -> None:
    pipeline, bench = staged(2, rows=6)
    for id in range(7, 20):
        bench.engine.add(submit(id, list(range(id, id + 12)), max_tokens=9))
    bench.run()
    kinds = [step.kind for step in pipeline.steps]
    assert kinds.count("orders") <= 1  # the last, when nothing runs


def test_requests_that_arrive_together_are_prefilled_before_they_join() -> None:
    bench = Bench()
    for id in range(1, 5):
        bench.engine.add(submit(id, [id, 7, 7], max_tokens=8))
    bench.run()
    enters = [order for step in bench.executor.steps for order in step.orders if isinstance(order, wire.Enter)]
    assert len(enters) < 4
    assert all(bench.tokens[id, 0] == reference([id, 7, 7], 8, []) for id in range(1, 5))


def chunks(bench: Bench) -> list[list[int]]:
    """The lengths of the prompts of each prefill step."""
    return [[len(chunk.tokens) for chunk in step.chunks] for step in bench.executor.steps if step.chunks]


def test_short_prompts_are_prefilled_in_one_step() -> None:
    bench = Bench()
    prompts = {id: list(range(id, id + 12 + id)) for id in range(1, 5)}
    for id, prompt in prompts.items():
        bench.engine.add(submit(id, prompt))
    bench.run()
    assert chunks(bench) == [[12, 13, 14, 15]]
    assert bench.tokens == {(id, 0): reference(prompt, 5, []) for id, prompt in prompts.items()}


def test_prompts_that_would_be_mostly_padding_are_prefilled_apart() -> None:
    bench = Bench()
    bench.engine.add(submit(1, list(range(10))))
    bench.engine.add(submit(2, list(range(100, 150))))
    bench.run()
    assert chunks(bench) == [[9], [49]]


def test_prompts_with_about_the_same_cached_start_are_prefilled_together() -> None:
    """The longer match is computed again from where the shorter one ends."""
    bench = Bench()
    system = list(range(48))
    bench.engine.add(submit(1, [*system, 1, 2, 3, 4], max_tokens=1))
    bench.run()
    before = len(chunks(bench))
    prompts = {2: [*system, 1, 2, *range(60, 80)], 3: [*system, *range(80, 102)]}
    for id, prompt in prompts.items():
        bench.engine.add(submit(id, prompt))
    bench.run()
    assert len(chunks(bench)) == before + 1
    assert bench.executor.steps[-1].start <= min(bench.cached[2], bench.cached[3])
    assert {id: bench.tokens[id, 0] for id in prompts} == {id: reference(p, 5, []) for id, p in prompts.items()}


def test_in_a_pipeline_prompts_are_spread_over_the_stages() -> None:
    bench = Bench(replace(LIMITS, stages=2), depth=4)
    for id in range(1, 5):
        bench.engine.add(submit(id, list(range(id, id + 12))))
    bench.run()
    assert [len(lengths) for lengths in chunks(bench)] == [2, 1, 1]


def test_caches_that_cannot_be_cut_are_filled_one_by_one() -> None:
    bench = Bench(replace(LIMITS, reuse="boundary"))
    for id in range(1, 4):
        bench.engine.add(submit(id, list(range(id, id + 12))))
    bench.run()
    assert chunks(bench) == [[11], [11], [11]]


def test_samples_of_one_request_share_one_prefill() -> None:
    bench = Bench()
    prompt = list(range(40))
    bench.engine.add(submit(1, prompt, max_tokens=3, n=4))
    bench.run()
    assert sum(step.computed for step in bench.executor.steps if step.chunks) == len(prompt) - 1
    assert {bench.tokens[1, index] == reference(prompt, 3, []) for index in range(4)} == {True}


def test_a_second_prompt_with_the_same_start_reuses_its_kv() -> None:
    bench = Bench()
    system = list(range(32))
    bench.engine.add(submit(1, [*system, 40, 41]))
    bench.run()
    bench.engine.add(submit(2, [*system, 42, 43]))
    bench.run()
    assert (bench.cached[1], bench.cached[2]) == (0, 32)
    assert bench.tokens[2, 0] == reference([*system, 42, 43], 5, [])


def test_the_next_turn_of_a_chat_reuses_the_whole_last_turn() -> None:
    bench = Bench()
    first = list(range(20))
    bench.engine.add(submit(1, first, max_tokens=10))
    bench.run()
    second = [*first, *bench.tokens[1, 0], 48, 49]
    bench.engine.add(submit(2, second))
    bench.run()
    assert bench.cached[2] >= len(first) + 10 - 2


def test_a_prompt_waits_for_one_in_prefill_that_it_shares_much_with() -> None:
    bench = Bench(replace(LIMITS, context=4096, kv_bytes=10**7, prefix_bytes=10**6, chunk_tokens=64))
    shared = [i % 50 for i in range(500)]
    bench.engine.add(submit(1, [*shared, 1]))
    bench.engine.add(submit(2, [*shared, 2, 3]))
    bench.run()
    assert bench.cached[2] == 500


def test_boundary_reuse_serves_only_prompts_that_start_with_the_whole_saved_prompt() -> None:
    bench = Bench(replace(LIMITS, reuse="boundary"))
    prompt = list(range(33))
    bench.engine.add(submit(1, prompt))
    bench.run()
    bench.engine.add(submit(2, [*prompt, 40, 41]))
    bench.engine.add(submit(3, [*prompt[:20], 45, 46]))
    bench.run()
    assert (bench.cached[2], bench.cached[3]) == (32, 0)


def test_an_aborted_request_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.engine.add(submit(1, list(range(30)), max_tokens=50))
    for _ in range(5):
        bench.step()
    bench.engine.abort(wire.Abort(1))
    bench.run()
    assert (bench.executor.buckets, bench.executor.solos) == ({}, {})
    assert len(bench.tokens[1, 0]) < 50


def test_a_stopped_sample_keeps_only_what_counts_as_prefix() -> None:
    bench = Bench()
    prompt = list(range(20))
    bench.engine.add(submit(1, prompt, max_tokens=50))
    while len(bench.tokens.get((1, 0), [])) < 8:
        bench.step()
    bench.engine.abort(wire.Abort(1, 0, keep=4))
    bench.run()
    assert max(len(entry) for entry in bench.executor.entries.values()) <= 24
    bench.engine.add(submit(2, [*prompt, *bench.tokens[1, 0][:4], 1, 2]))
    bench.run()
    assert bench.cached[2] == 24


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    bench = Bench()
    bench.engine.add(submit(1, [1] * 600))
    bench.engine.add(submit(2, [1, 2], n=9))
    bench.run()
    failures = [message for message in bench.engine.events() if isinstance(message, wire.RequestFailed)]
    failed = {**bench.failed, **{failure.id: failure.message for failure in failures}}
    assert "600" in failed[1] and "511" in failed[1]
    assert "9" in failed[2] and "8" in failed[2]


def test_a_step_that_raises_fails_its_requests_and_no_others() -> None:
    bench = Bench(fail_steps=frozenset({2}))
    bench.engine.add(submit(1, [1, 2], max_tokens=20))
    bench.run()
    bench.engine.add(submit(2, [3, 4], max_tokens=20))
    bench.run()
    assert "told to fail" in bench.failed[1]
    assert bench.tokens[2, 0] == reference([3, 4], 20, [])


def test_rows_of_very_different_length_get_buckets_of_their_own() -> None:
    bench = Bench(replace(LIMITS, context=4096, kv_bytes=10**7, weights_bytes=500))
    bench.engine.add(submit(1, [1] * 1000, max_tokens=20))
    bench.engine.add(submit(2, [2, 3], max_tokens=20))
    bench.run()
    assert len({step.bucket for step in bench.executor.steps if step.rows}) == 2


def test_rows_of_similar_length_share_a_bucket() -> None:
    bench = Bench()
    for id in range(1, 7):
        bench.engine.add(submit(id, [id] * (id + 2), max_tokens=30))
    bench.run()
    assert max(len(step.rows) for step in bench.executor.steps) == 6


def test_when_kv_runs_out_the_youngest_waits_and_every_answer_is_still_right() -> None:
    bench = Bench(replace(LIMITS, kv_bytes=12_000, prefix_bytes=1_000))
    for id in range(1, 6):
        bench.engine.add(submit(id, [id] * 20, max_tokens=300))
    bench.run()
    assert bench.scheduler.stats().preempted > 0
    assert all(bench.tokens[id, 0] == reference([id] * 20, 300, []) for id in range(1, 6))


def test_an_unknown_abort_is_ignored() -> None:
    bench = Bench()
    bench.engine.abort(wire.Abort(99))
    assert bench.engine.idle


def test_a_result_teaches_the_pace() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(submit(1, [1] * 65), 0.0)
    before = scheduler.pace.chunk_s(64)
    step = scheduler.next_step()
    assert step is not None
    scheduler.apply(StepResult(step.id), duration_s=9.0)
    assert scheduler.pace.chunk_s(64) > before


REQUEST = st.tuples(
    st.integers(0, 3),  # which shared prefix
    st.integers(0, 60),  # how much of it
    st.lists(st.integers(0, 49), min_size=1, max_size=30),
    st.integers(1, 25),  # max_tokens
    st.integers(1, 3),  # n
    st.lists(st.integers(0, 49), max_size=2),  # stop ids
)
ACTION = st.one_of(
    REQUEST,
    st.integers(1, 6),  # run that many steps
    st.tuples(st.just("abort"), st.integers(1, 30), st.integers(-1, 2), st.integers(0, 5)),
)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=120, deadline=None)
@given(
    actions=st.lists(ACTION, max_size=40),
    kv_bytes=st.sampled_from([14_000, 60_000, 10**6]),
    weights=st.sampled_from([0, 400, 10**6]),
    reuse=st.sampled_from(["any", "boundary", "off"]),
    batchable=st.booleans(),
    chunk=st.sampled_from([1, 7, 64]),
)
def test_any_mix_gives_every_request_its_own_answer_and_leaves_nothing(
    depth: int, actions: list[object], kv_bytes: int, weights: int, reuse: str, batchable: bool, chunk: int
) -> None:
    limits = replace(
        LIMITS,
        kv_bytes=kv_bytes,
        prefix_bytes=kv_bytes // 3,
        weights_bytes=weights,
        reuse=reuse,
        batchable=batchable,
        chunk_tokens=chunk,
        lookahead=depth > 1,
    )
    bench = Bench(limits, depth)
    asked: dict[int, wire.Submit] = {}
    aborted: set[int] = set()
    for action in actions:
        if isinstance(action, int):
            for _ in range(action):
                if not bench.engine.idle:
                    bench.step()
        elif isinstance(action, tuple) and action[0] == "abort":
            _, id, index, keep = action
            said = bench.tokens.get((id, index), [])
            if index < 0:
                aborted.add(id)
                bench.engine.abort(wire.Abort(id))
            elif len(said) >= keep > 0:
                aborted.add(id)
                bench.engine.abort(wire.Abort(id, index, keep))
        else:
            which, shared, tail, max_tokens, n, stop_ids = action  # type: ignore[misc]
            prompt = [(which * 7 + i) % 50 for i in range(shared)] + tail
            id = len(asked) + 1
            asked[id] = submit(id, prompt, max_tokens, n, tuple(stop_ids))
            bench.engine.add(asked[id])
    bench.run()
    for event in bench.engine.events():
        bench.failed[event.id] = "refused"
    for id, request in asked.items():
        if id in aborted or id in bench.failed:
            continue
        expected = reference(
            request.prompt, min(request.max_tokens, limits.kv_tokens - len(request.prompt)), request.stop_ids
        )
        for index in range(request.n):
            assert bench.tokens[id, index] == expected
            assert bench.finish[id, index] == ("stop" if expected[-1] in request.stop_ids else "length")
    assert (bench.executor.buckets, bench.executor.solos) == ({}, {})
    stats = bench.scheduler.stats()
    assert (stats.waiting, stats.prefilling, stats.running, stats.buckets) == (0, 0, 0, 0)
    assert len(bench.executor.entries) == stats.prefix_entries
    assert bench.executor.most_bytes <= kv_bytes
    bench.engine.clear_prefixes()
    bench.run()
    assert bench.executor.entries == {}


def test_the_pretended_model_depends_on_every_token() -> None:
    assert next_token([1, 2, 3]) != next_token([2, 2, 3]) or next_token([1, 2]) != next_token([2, 2])


# ---------------------------------------------------------------- several stages, in a time that is counted, not waited

STAGE_S = 0.02


class Pipeline(FakeExecutor):
    """Stages that take STAGE_S for a step of up to `tokens` tokens, each in the order of the steps; the last one is
    rank 0, which runs the loop.

    `work` are the times at which each stage began a step, and how long it took. A rank waits for data when it begins
    a step.
    """

    def __init__(self, stages: int, shape: CacheShape, tokens: int) -> None:
        super().__init__(shape)
        self.now_s = 0.0
        self.work: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
        self._tokens = tokens
        self._free_s = [0.0] * stages
        self._arrives_s: dict[int, float] = {}

    def clock(self) -> float:
        return self.now_s

    def send(self, step: wire.Step) -> None:
        at_s = self.now_s
        for stage in range(len(self.work) - 1):
            at_s = self._runs(stage, step, at_s)
        self._arrives_s[step.id] = at_s

    def begin(self, step: wire.Step) -> None:
        self.now_s = max(self.now_s, self._arrives_s[step.id])
        super().begin(step)

    def finish(self, step: wire.Step) -> StepResult:
        self.now_s = self._runs(len(self.work) - 1, step, self.now_s)
        return super().finish(step)

    def _runs(self, stage: int, step: wire.Step, at_s: float) -> float:
        if step.kind == "orders":
            return at_s
        begun_s, takes_s = max(at_s, self._free_s[stage]), STAGE_S * max(1, step.computed / self._tokens)
        self.work[stage].append((begun_s, takes_s))
        self._free_s[stage] = begun_s + takes_s
        return self._free_s[stage]

    def busy(self, since_s: float, until_s: float) -> list[float]:
        """The share of that time in which each stage worked."""
        return [sum(s for at_s, s in w if since_s <= at_s < until_s) / (until_s - since_s) for w in self.work]


class BlocksFirst(Engine):
    """A loop that waits for a result before it sends what else may be in flight."""

    def step(self) -> list[wire.Message]:
        self._depth = self._scheduler.inflight + 1
        return super().step()


def staged(
    stages: int, kind: type[Engine] = Engine, rows: int = 8, tokens: int = 1 << 30, **changes: object
) -> tuple[Pipeline, Bench]:
    limits = replace(LIMITS, context=4096, slots=32, kv_bytes=10**8, stages=stages, lookahead=False, **changes)
    bench = Bench(limits)
    pipeline = Pipeline(stages, limits.shape, tokens)
    bench.executor = pipeline
    bench.engine = kind(
        bench.scheduler, pipeline, depth=limits.depth, ahead=1, send=pipeline.send, clock=pipeline.clock
    )
    for id in range(1, rows + 1):
        bench.engine.add(submit(id, [id, 2, 3], max_tokens=300))
    return pipeline, bench


def run_for(pipeline: Pipeline, bench: Bench, seconds: float) -> None:
    end_s = pipeline.now_s + seconds
    while pipeline.now_s < end_s:
        bench.step()


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_is_busy_nearly_all_the_time(stages: int, rows: int) -> None:
    pipeline, bench = staged(stages, rows=rows)
    run_for(pipeline, bench, 1.0)
    since_s = pipeline.now_s
    run_for(pipeline, bench, 3.0)
    assert min(pipeline.busy(since_s, pipeline.now_s)) >= 0.85
    assert len({row.seq for step in pipeline.steps[-stages:] for row in step.rows}) == rows


@pytest.mark.parametrize("stages", [3, 4])
def test_a_loop_that_waited_before_it_sends_would_leave_stages_idle(stages: int) -> None:
    pipeline, bench = staged(stages, BlocksFirst)
    run_for(pipeline, bench, 1.0)
    since_s = pipeline.now_s
    run_for(pipeline, bench, 3.0)
    assert max(pipeline.busy(since_s, pipeline.now_s)) < 0.5


@pytest.mark.parametrize("stages", [3, 4])
def test_chunks_of_one_prompt_follow_each_other_through_the_stages(stages: int) -> None:
    pipeline, bench = staged(stages, rows=0)
    bench.engine.add(submit(1, [i % 50 for i in range(4000)], max_tokens=1))
    run_for(pipeline, bench, 4 * STAGE_S * stages)
    since_s = pipeline.now_s
    run_for(pipeline, bench, 30 * STAGE_S)
    assert min(pipeline.busy(since_s, pipeline.now_s)) >= 0.85
    bench.run()
    assert bench.tokens[1, 0] == reference([i % 50 for i in range(4000)], 1, [])


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_stay_busy_while_a_long_prompt_is_prefilled_beside_running_rows(stages: int) -> None:
    pipeline, bench = staged(stages, tokens=20, chunk_tokens=2048)
    run_for(pipeline, bench, 1.0)
    bench.engine.add(submit(9, [i % 50 for i in range(4000)], max_tokens=1))
    since_s = pipeline.now_s
    run_for(pipeline, bench, 3.0)
    assert min(pipeline.busy(since_s, pipeline.now_s)) >= 0.85
    kinds = "".join("p" if step.chunks else "d" for step in pipeline.steps[-40:] if step.kind != "orders")
    assert ("pddp" if stages == 2 else "pdp") in kinds  # a chunk per round, or per bucket


def test_rows_of_steps_in_flight_are_disjoint_and_evenly_spread_over_the_micro_batches() -> None:
    pipeline, bench = staged(3, rows=9)
    run_for(pipeline, bench, 2.0)
    for first, second, third in zip(pipeline.steps[-30:], pipeline.steps[-29:], pipeline.steps[-28:], strict=False):
        rows = [row.seq for step in (first, second, third) for row in step.rows]
        assert len(rows) == len(set(rows)) == 9
        assert {len(step.rows) for step in (first, second, third)} == {3}


def test_one_row_alone_keeps_one_step_in_flight_and_says_what_it_says_alone() -> None:
    pipeline, bench = staged(3, rows=1)
    bench.run()
    assert bench.tokens[1, 0] == reference([1, 2, 3], 300, [])
    gaps = [b - a for (a, _), (b, _) in zip(pipeline.work[0][5:], pipeline.work[0][6:], strict=False)]
    assert max(gaps) == pytest.approx(3 * STAGE_S)


@pytest.mark.parametrize("stages", [2, 3])
def test_answers_are_right_at_any_depth_with_joins_and_leaves(stages: int) -> None:
    pipeline, bench = staged(stages, rows=4)
    for id in range(5, 25):
        bench.engine.add(submit(id, [id, 1] * (id % 7 + 1), max_tokens=id, n=id % 3 + 1))
        run_for(pipeline, bench, 0.1)
        if id % 6 == 0:
            bench.engine.abort(wire.Abort(id))
    bench.run()
    for id in (n for n in range(5, 25) if n % 6):
        for index in range(id % 3 + 1):
            assert bench.tokens[id, index] == reference([id, 1] * (id % 7 + 1), id, [])
    assert (pipeline.buckets, pipeline.solos) == ({}, {})


def test_the_number_of_micro_batches_follows_what_was_measured() -> None:
    pace = Pace()
    assert [pace.parts(rows, 4) for rows in (1, 2, 3, 8)] == [1, 2, 3, 4]
    step = wire.Step(1, rows=[wire.Row(i, 0, 0) for i in range(8)])
    for _ in range(50):
        pace.learn(step, 0.08, rows=8, buckets=1)  # all rows at once: 100 rows a second
        pace.learn(wire.Step(2, rows=step.rows[:2]), 0.05, rows=8, buckets=4)  # a quarter of them: 40
    assert pace.parts(8, 4) == 1
    for _ in range(50):
        pace.learn(wire.Step(2, rows=step.rows[:2]), 0.021, rows=8, buckets=4)  # 95, and more hands
    assert pace.parts(8, 4) == 4
