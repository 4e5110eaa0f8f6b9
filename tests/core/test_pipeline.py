"""The pipeline: what is queued before what is read, what survives an exception, and what travels to the device."""

import random

import numpy as np
import pytest
import torch

from moelora import EngineOptions, PrefillEngine, Request
from moelora.batching import transfer
from moelora.batching.packing import head_rows, pack
from moelora.batching.sequences import NO_TARGET, PROMPT, ScoredRun, expand
from moelora.batching.transfer import Fetch, send
from moelora.pipeline import BatchPipeline
from tiny_models import VOCAB, save_model

CPU = torch.device("cpu")


@pytest.fixture
def engine(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    return PrefillEngine(tmp_path, options=EngineOptions(device="cpu", max_tokens=16))


def requests_of(*lengths: int) -> list[Request]:
    draw = random.Random(sum(lengths))
    return [Request(token_ids=draw.choices(range(VOCAB), k=n)) for n in lengths]


class TestOrder:
    def test_the_next_batch_is_queued_before_scores_are_read(self, engine, monkeypatch):
        events: list[str] = []
        queue, wait = BatchPipeline._queue, Fetch.wait

        def noted_queue(self, sequences, turn):
            events.append(f"queue {sequences[0].request}")
            return queue(self, sequences, turn)

        def noted_wait(self):
            events.append("read")
            return wait(self)

        monkeypatch.setattr(BatchPipeline, "_queue", noted_queue)
        monkeypatch.setattr(Fetch, "wait", noted_wait)
        results = [index for index, _ in engine.score_stream(requests_of(9, 9, 9))]
        assert events == ["queue 0", "queue 1", "read", "queue 2", "read", "read"]
        assert results == [0, 1, 2]

    def test_the_end_of_a_batch_is_told_before_the_next_is_waited_for(self, engine, monkeypatch):
        events: list[object] = []
        wait = Fetch.wait
        monkeypatch.setattr(Fetch, "wait", lambda self: events.append("read") or wait(self))
        for index, _ in engine.score_stream(requests_of(7, 9, 9), lambda: events.append("told")):
            events.append(index)
        assert events == ["read", 0, 1, "told", "read", 2, "told"]

    def test_what_only_the_head_needs_is_made_when_the_body_is_queued(self, engine, monkeypatch):
        """Until then a device has nothing to do, and for a single batch the host's time is everybody's."""
        events: list[str] = []
        run = type(engine._runner).run
        monkeypatch.setattr(type(engine._runner), "run", lambda *given: events.append("body") or run(*given))
        monkeypatch.setattr("moelora.pipeline.head_rows", lambda *given: events.append("rows") or head_rows(*given))
        engine.score(requests_of(9))
        assert events == ["body", "rows"]

    def test_a_batch_waits_for_no_other_window(self, engine, monkeypatch):
        """The last batch of a window is not read before the first of the next is queued."""
        monkeypatch.setattr("moelora.engine.WINDOW_REQUESTS", 2)
        given = requests_of(9, 3, 12, 5, 8)
        results = dict(engine.score_stream(given))
        alone = [engine.score([request])[0] for request in given]
        for i, result in results.items():
            assert result.token_logprobs[1:] == pytest.approx(alone[i].token_logprobs[1:], abs=1e-5)

    def test_refused_requests_are_handed_out_wherever_they_stand(self, engine):
        bad = Request(token_ids=[VOCAB])
        (good,) = requests_of(4)
        for given in ([bad, good, bad], [good], [bad], []):
            results = dict(engine.score_stream(given))
            assert [results[i].error is None for i in range(len(given))] == [r is good for r in given]


class TestFailure:
    def test_what_was_queued_before_an_exception_is_handed_out(self, engine, monkeypatch):
        run = type(engine._runner).run
        calls = []

        def fails_at_the_third(self, batch):
            calls.append(batch)
            if len(calls) == 3:
                raise RuntimeError("no more")
            return run(self, batch)

        monkeypatch.setattr(type(engine._runner), "run", fails_at_the_third)
        seen: list[int] = []
        with pytest.raises(RuntimeError, match="no more"):
            seen.extend(index for index, _ in engine.score_stream(requests_of(9, 9, 9, 9)))
        assert seen == [0, 1]
        assert len(engine.score(requests_of(9))) == 1, "the engine goes on"

    def test_memory_splits_keep_every_result(self, engine, monkeypatch):
        """Batches of more than one sequence do not fit, nor does a single one of 7 tokens."""
        run = type(engine._runner).run

        def small_only(self, batch):
            if batch.num_sequences > 1 or batch.num_tokens == 7:
                raise torch.OutOfMemoryError
            return run(self, batch)

        given = requests_of(4, 7, 5, 3, 7, 9)
        expected = engine.score(given)
        monkeypatch.setattr(type(engine._runner), "run", small_only)
        results = dict(engine.score_stream(given))
        assert sorted(results) == list(range(6))
        for i, result in results.items():
            if len(given[i].token_ids) == 7:
                assert result.error == "out of device memory at 7 tokens in one sequence"
            else:
                assert result.token_logprobs[1:] == pytest.approx(expected[i].token_logprobs[1:], abs=1e-5)


def random_request(draw: random.Random) -> Request:
    def ids(longest):
        return draw.choices(range(VOCAB), k=draw.randint(1, longest))

    tokens = ids(12)
    return Request(
        token_ids=draw.choice([tokens, tuple(tokens), np.asarray(tokens), torch.tensor(tokens)]),
        adapter=draw.choice(["a", "__base__"]),
        choices=[ids(3) for _ in range(draw.choice([0, 0, 2, 4]))],
        score_from=draw.randint(0, len(tokens)),
    )


class TestPacking:
    @pytest.mark.parametrize("seed", range(20))
    def test_rows_position_by_position(self, seed):
        """Every row points at the token before its target, in the sequence's own order."""
        draw = random.Random(seed)
        sequences = [s for i in range(draw.randint(1, 9)) for s in expand(i, random_request(draw))]
        batch = pack(sequences, {"a": 3}, CPU)
        rows = head_rows(sequences, batch)
        packed = [token for s in sequences for token in s.token_ids]
        assert batch.input_ids_T.tolist() == packed
        assert batch.position_ids_T.tolist() == [i for s in sequences for i in range(s.num_tokens)]
        assert batch.cu_seqlens_S1.tolist() == np.cumsum([0, *(s.num_tokens for s in sequences)]).tolist()
        begins = batch.cu_seqlens_S1.tolist()
        expected = [
            (begin + run.first + i, int(target), slot)
            for s, begin, slot in zip(sequences, begins, batch.slots, strict=False)
            for run in s.runs
            for i, target in enumerate(run.targets)
        ]
        found = zip(rows.position_N.tolist(), rows.target_N.tolist(), rows.slot_N.tolist(), strict=True)
        assert list(found) == expected
        assert rows.open_M.tolist() == [n for n, (_, target, _) in enumerate(expected) if target == NO_TARGET]
        for s, begin in zip(sequences, begins, strict=False):
            for run in s.runs:
                if run.choice == PROMPT and not run.is_open:
                    after = begin + run.first + 1
                    assert packed[after : after + len(run.targets)] == list(run.targets)

    def test_no_rows_at_all(self):
        (sequence,) = expand(0, Request(token_ids=[1, 2]))
        bare = type(sequence)(request=0, adapter="a", token_ids=[1, 2], runs=(), top_k=0)
        assert head_rows([bare], pack([bare], {"a": 0}, CPU)).count == 0

    def test_one_object_for_all_tokens_of_a_prompt(self):
        (sequence,) = expand(0, Request(token_ids=list(range(100))))
        assert sequence.runs == (ScoredRun(0, list(range(1, 100)), PROMPT), ScoredRun(99, (NO_TARGET,), PROMPT))


class TestTransfer:
    def test_one_buffer_holds_all_arrays_aligned(self):
        """What the device gets: written to bytes and read as views, which is all that differs from the CPU's way."""
        rng = np.random.default_rng(5)
        arrays = [
            rng.integers(0, 99, shape).astype(dtype)
            for shape, dtype in (((7,), np.int64), ((0,), np.int32), ((3, 5), np.int32), ((1,), np.int64))
        ]
        starts, nbytes = transfer._layout(arrays)
        flat = np.full(nbytes, 255, dtype=np.uint8)
        transfer._write(flat, arrays, starts)
        for sent, view, array in zip(
            send(arrays, CPU), transfer._read(torch.from_numpy(flat), arrays, starts), arrays, strict=True
        ):
            assert torch.equal(view, sent)
            assert view.dtype is sent.dtype
            assert tuple(view.shape) == array.shape
            assert view.storage_offset() * view.element_size() % 256 == 0

    def test_scores_on_the_cpu_are_there_at_once(self):
        tensor = torch.arange(3)
        assert Fetch([tensor]).wait() == [tensor]


class TestStop:
    """What a signal handler does in the middle of a batch, and between batches."""

    def test_what_is_queued_is_finished_and_handed_out(self, engine, monkeypatch):
        run = type(engine._runner).run
        calls = []

        def stops_in_the_second(self, batch):
            calls.append(batch)
            if len(calls) == 2:
                assert engine.stop()
            return run(self, batch)

        monkeypatch.setattr(type(engine._runner), "run", stops_in_the_second)
        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            seen.extend(index for index, _ in engine.score_stream(requests_of(9, 9, 9, 9)))
        assert seen == [0, 1]
        assert len(engine.score(requests_of(9, 9))) == 2, "the engine goes on"

    def test_while_requests_are_awaited_the_handler_may_raise(self, engine, monkeypatch):
        monkeypatch.setattr("moelora.engine.WINDOW_REQUESTS", 2)
        assert not engine.stop()

        def given():
            yield from requests_of(9, 9)
            assert not engine.stop()
            raise KeyboardInterrupt

        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            seen.extend(index for index, _ in engine.score_stream(given()))
        assert seen == [0, 1]
