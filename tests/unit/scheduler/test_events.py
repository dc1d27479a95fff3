"""KV events: numbers, bounded history, listeners, files; eviction traces."""

import errno
import fcntl
import json
import os
import select
import stat
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.sampling_params import SamplingParams
from quire.engine import block_events
from quire.engine.block_events import EventFile
from quire.errors import ConfigError, UnknownName
from quire.scheduler.events import KINDS, EventLog, KVEvent
from quire.scheduler.eviction_trace import EvictionEntry, retained_sets
from support.command_line import read_records
from support.requests import make_request

REQUEST = make_request(request_id="a", prompt_token_ids=[1], params=SamplingParams(), tenant="red")


def filled(kinds, **options):
    log = EventLog(count(0.5, 0.5).__next__, **options)
    for kind in kinds:
        log.emit(kind, REQUEST, tokens=3)
    return log


def chunk(number):
    return KVEvent("chunk", 0.0, "a", "red", {}, number)


def test_events_have_their_data_and_the_log_only_the_newest():
    log = filled(["admitted"])
    log.emit("prefix_evicted", None, tokens=16, kv_bytes=4096)
    [event, without] = log.newest()
    found = {"number": 1, "kind": "admitted", "time_s": 0.5, "request_id": "a", "tenant": "red"}

    assert event == KVEvent("admitted", 0.5, "a", "red", {"tokens": 3}, 1)
    assert json.loads(json.dumps(event.as_dict())) == found | {"tokens": 3}
    assert (without.request_id, without.tenant) == ("", "")
    event = KVEvent("freed", 1.0, "a", "red", {"tenant": "blue", "number": 9}, 4).as_dict()
    assert (event["tenant"], event["number"]) == ("red", 4)  # data does not override them

    log = filled(["chunk"] * 10, kept=3)
    assert ([event.number for event in log.newest()], log.num_events) == ([8, 9, 10], 10)


def test_newest_filters_by_kind_number_and_count():
    log = filled(["admitted", "chunk", "chunk", "freed", "chunk"])

    def numbers(*arguments, **options):
        return [event.number for event in log.newest(*arguments, **options)]

    assert numbers(["chunk"]) == [2, 3, 5]
    assert numbers(["chunk", "freed"], since=2) == [3, 4, 5]
    assert numbers(most=2) == [4, 5]
    assert numbers(["chunk"], since=2, most=1) == [5]
    assert numbers(since=5) == numbers(most=0) == []
    with pytest.raises(UnknownName, match="did you mean preempted"):
        EventLog().newest(["preempt"])


def test_listeners_receive_events_until_they_unsubscribe_or_raise(caplog):
    log, events, events_before = EventLog(), [], []
    log.subscribe(events.append)
    log.subscribe(events_before.append)
    log.emit("chunk", REQUEST)
    log.unsubscribe(events_before.append)
    log.unsubscribe(print)
    log.emit("freed", REQUEST)

    assert [event.kind for event in events] == ["chunk", "freed"]
    assert [event.kind for event in events_before] == ["chunk"]

    log, events, broken = EventLog(), [], Mock(side_effect=RuntimeError("no more"))
    log.subscribe(broken)
    log.subscribe(events.append)
    for _ in range(3):
        log.emit("chunk", REQUEST)

    assert broken.call_count == 1
    assert len(events) == len(log.newest()) == 3
    said = [record.message for record in caplog.records]
    assert said == ["removed a listener of KV events because it raised"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def numbers_in(path):
    return [record["number"] for record in read_records(path)]


def test_event_file_appends_each_event_as_a_line_at_once(path):
    path.write_text('{"from": "before"}\n')
    log = filled([])
    with EventFile(path) as file:
        log.subscribe(file)
        for number, kind in enumerate(KINDS, start=1):
            log.emit(kind, REQUEST, reason="größer")
            assert len(read_records(path)) == number + 1

    before, *records = read_records(path)
    assert before == {"from": "before"}
    assert records == [event.as_dict() for event in log.newest()]


def test_two_writers_of_one_file_write_whole_lines(path):
    with EventFile(path) as first, EventFile(path) as second:
        for number in range(50):
            for writer in (first, second):
                writer(KVEvent("chunk", 0.0, "a", "red", {"reason": "x" * number}, number))
    assert numbers_in(path) == sorted([*range(50)] * 2)


def test_partial_write_is_completed_also_to_a_character_device(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    for each in (path, Path(os.devnull)):
        with EventFile(each) as file:
            file(chunk(1))
    assert numbers_in(path) == [1]


class FullDisk:
    """Replaces `os.write` by one that writes `free_bytes` bytes and then raises ENOSPC."""

    def __init__(self, monkeypatch):
        self.free_bytes, self._write = 0, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor, data):
        if not self.free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.free_bytes])
        self.free_bytes -= written
        return written


def test_events_buffered_for_a_full_disk_are_written_when_space_is_free(path, monkeypatch, caplog):
    disk = FullDisk(monkeypatch)
    with EventFile(path) as file:
        for number, disk.free_bytes in enumerate((0, 20), start=1):  # 20: a part of a line
            file(chunk(number))
            assert read_records(path) == []
        disk.free_bytes = 1000
        file(chunk(3))
        assert numbers_in(path) == [1, 2, 3]

    assert len(caplog.records) == 1
    assert "events.jsonl: No space left on device" in caplog.text


def test_close_on_a_full_disk_raises_with_the_number_of_lost_events(path, monkeypatch, caplog):
    disk, log, file = FullDisk(monkeypatch), filled([]), EventFile(path)
    disk.free_bytes = len(json.dumps(chunk(1).as_dict())) + 1
    log.subscribe(file)
    for _ in range(3):
        log.emit("chunk", None)
    with pytest.raises(ConfigError, match="No space left on device; the file lacks 2 events"):
        file.__exit__(None, None, None)
    assert len(read_records(path)) == 1
    assert len(log.newest()) == 3
    file = EventFile(path)
    file(chunk(1))
    file.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # which is not hidden
    assert "the file lacks 1 events" in caplog.text


def test_buffer_for_a_full_disk_is_bounded(path, monkeypatch):
    monkeypatch.setattr(block_events, "MAX_HELD_BYTES", 200)
    disk, file = FullDisk(monkeypatch), EventFile(path)
    for number in range(5):
        file(chunk(number))
    lost, disk.free_bytes = file.num_lost, 1000
    assert 0 < lost < 5
    with pytest.raises(ConfigError, match=f"the file lacks {lost} events"):
        file.close()
    assert len(read_records(path)) == 5 - lost


class Pipe:
    def __init__(self, path):
        os.mkfifo(path)
        self.path, self.read = path, b""
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, 4096)

    def take(self, num_bytes=1 << 20):
        with suppress(BlockingIOError):
            self.read += os.read(self.descriptor, num_bytes)

    def close(self):
        os.close(self.descriptor)

    @property
    def numbers(self):
        return [json.loads(line)["number"] for line in self.read.splitlines()]


@pytest.fixture
def pipe(path):
    return Pipe(path)


def long_chunk(number, *, id_bytes=3000):
    """An event whose line fills most of a pipe; lines over `select.PIPE_BUF` are split."""
    return KVEvent("chunk", 0.0, "a" * id_bytes, "red", {}, number)


def test_partly_written_line_of_a_pipe_continues_where_it_ended(pipe, caplog, monkeypatch):
    """A pipe cannot be truncated; no write waits for the reader."""
    file = EventFile(pipe.path)
    for number in range(1, 6):
        file(long_chunk(number, id_bytes=2 * select.PIPE_BUF))
    for _ in range(8):
        pipe.take(1000)  # from the middle of a line to the middle of another
        file(chunk(100))
    pipe.take()
    num_sent = 5 + 8
    while pipe.read.count(b"\n") < num_sent:
        assert num_sent < 100
        file(chunk(100))
        num_sent += 1
        pipe.take()
    # the buffer is empty: it accepts one line of exactly its limit, and no longer line
    line_bytes = len(json.dumps(chunk(100).as_dict())) + 1
    monkeypatch.setattr(block_events, "MAX_HELD_BYTES", line_bytes)
    file(chunk(100))
    assert file.num_lost == 0
    monkeypatch.setattr(block_events, "MAX_HELD_BYTES", line_bytes - 1)
    file(chunk(100))
    assert file.num_lost == 1
    with pytest.raises(ConfigError, match="the file lacks 1 events"):
        file.close()
    pipe.take()

    assert pipe.numbers == [1, 2, 3, 4, 5] + [100] * (num_sent + 1 - 5)
    assert len(caplog.records) == 1
    assert "its reader does not keep up" in caplog.text


def test_close_waits_for_the_reader_of_a_pipe(pipe):
    file = EventFile(pipe.path)
    for number in range(1, 6):
        file(long_chunk(number))
    reader = threading.Thread(target=lambda: [(time.sleep(0.01), pipe.take()) for _ in range(20)])
    reader.start()
    file.close()
    reader.join()
    pipe.take()
    assert pipe.numbers == [1, 2, 3, 4, 5]


def test_close_raises_if_the_reader_of_a_pipe_stalls(pipe, monkeypatch):
    monkeypatch.setattr(block_events, "CLOSE_WAIT_S", 0.05)
    file = EventFile(pipe.path)
    for number in range(1, 4):
        file(long_chunk(number))
    with pytest.raises(ConfigError, match=r"does not keep up; the file lacks 2 events"):
        file.close()


def test_close_raises_if_the_reader_has_closed_the_pipe(pipe):
    file = EventFile(pipe.path)
    file(chunk(1))
    pipe.close()
    file(chunk(2))
    with pytest.raises(ConfigError, match="its reader has closed it; the file lacks 1 events"):
        file.close()


def test_paths_that_cannot_be_written_are_rejected(path, monkeypatch):
    with pytest.raises(ConfigError, match=r"nowhere.events\.jsonl: No such file"):
        EventFile(path.parent / "nowhere" / path.name)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no process has opened it for reading; choose another"):
        EventFile(path)
    path.unlink()
    for kind in (stat.S_IFBLK, stat.S_IFSOCK):
        found = os.stat_result((kind | 0o600, *[0] * 9))
        monkeypatch.setattr(os, "fstat", lambda _, found=found: found)
        with pytest.raises(ConfigError, match="not a regular file, pipe or terminal"):
            EventFile(path)


# ---- eviction traces -----------------------------------------------------------------------------


@given(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=6), st.randoms())
def test_retained_sets_match_the_recorded_evictions(lanes, chunks, rng):
    """Slots are in any order; an entry evicts the same tokens for any order of slots."""
    held: list[list[int]] = [[] for _ in range(lanes)]
    trace, expected, length = [], [], 0
    for chunk in chunks:
        held = [lane + list(range(length, length + chunk)) for lane in held]
        length += chunk
        for lane in held:
            rng.shuffle(lane)
        retained = [[rng.random() < 0.6 for _ in lane] for lane in held]
        positions, keep = _padded(held, -1), _padded(retained, False)
        entry = EvictionEntry.of(length, positions, keep)
        for lane in held:
            rng.shuffle(lane)
        again = entry.retained(_padded(held, -1))
        left = [
            {p for p, s in zip(*pair, strict=True) if not s}
            for pair in zip(positions.tolist(), keep.tolist(), strict=True)
        ]
        held = [[p for p in lane if p not in gone] for lane, gone in zip(held, left, strict=True)]

        assert again.sum(axis=1).tolist() == [len(lane) for lane in held]
        assert entry.num_slots == sum(len(evicted - {-1}) for evicted in left)
        trace.append(entry)
        expected.append((length, [sorted(lane) for lane in held]))
    found = [(k.num_computed, [lane.tolist() for lane in k.retained]) for k in retained_sets(trace)]

    assert found == expected


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=4))
def test_adjacent_evicted_tokens_are_stored_in_less_space(evicted):
    keep = np.array([[p not in lane for p in range(31)] for lane in evicted])
    positions = np.tile(np.arange(31, dtype=np.int32), (len(evicted), 1))
    entry = EvictionEntry.of(31, positions, keep)
    left = [p for lane in evicted for p in sorted(lane)]
    plain = EvictionEntry(31, entry.counts, np.array(left, dtype=np.int32))

    assert entry.evicted.tolist() == plain.evicted.tolist()
    assert entry.evicted.dtype == np.int32
    assert len(entry.stored) <= len(plain.stored)
    assert entry.num_slots == plain.num_slots
    assert (entry.retained(positions) == keep).all()
    assert EvictionEntry.joined(31, [entry, entry]).evicted.tolist() == plain.evicted.tolist() * 2
    one_range = np.ones((3, 512), dtype=bool)
    one_range[:, 4:68] = False
    positions = np.tile(np.arange(512, dtype=np.int32), (3, 1))
    assert len(EvictionEntry.of(512, positions, one_range).stored) == 2 * 3  # two numbers a lane


def test_retained_sets_are_serialized_as_ranges_and_equal_entries_have_equal_digests():
    keep = np.array([[1, 1, 1, 0, 1, 0, 1, 1], [0] * 7 + [1]], dtype=bool)
    one, again, other = (
        EvictionEntry.of(8, np.tile(np.arange(8), (2, 1)), mask) for mask in (keep, keep, ~keep)
    )
    [retained] = retained_sets([one])
    assert retained.as_dict() == {"num_computed": 8, "retained": ["0-2,4,6-7", "7"]}
    assert one.digest == again.digest != other.digest


def _padded(rows: list, padding: object) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [padding] * (width - len(row)) for row in rows])


def test_promoted_tokens_are_listed_until_they_are_evicted():
    """Two lanes; promoted tokens are recorded in the same form as evicted ones."""

    def entry(num_computed, positions, keep, promoted):
        kept, other = (
            EvictionEntry.of(num_computed, np.array(positions), np.array(mask, dtype=bool))
            for mask in (keep, promoted)
        )
        return replace(kept, promoted=other)

    begin, held = [[0, 1, 2, 3]] * 2, [[0, 1, 3, 4], [0, 1, 2, 4]]
    first = entry(4, begin, [[1, 1, 0, 1], [1, 1, 1, 0]], [[0, 1, 1, 1], [1, 0, 0, 1]])
    second = entry(5, held, [[0, 1, 1, 1], [1, 1, 0, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]])
    plain, sets = replace(first, promoted=None), list(retained_sets([first, second]))

    found = [[lane.tolist() for lane in one.promoted] for one in sets]
    assert found == [[[0], [1, 2]], [[4], [1]]]
    assert sets[1].as_dict()["promoted"] == ["4", "1"]
    assert "promoted" not in next(retained_sets([plain])).as_dict()
    assert first.digest != plain.digest
    assert EvictionEntry.joined(4, [first, first]).promoted.by_lane[2].tolist() == [0]
