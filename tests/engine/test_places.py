"""Places of sequences, and the host's copy of the block tables: what goes up is what changed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.device.places import BlockTables, Places, ramps
from engine.scheduling.block_manager import BlockManager
from tests.engine.stub import request


class Fake:
    """A sequence as far as places know it."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.block_table: list[int] = []


def fakes(*uids: int) -> list[Any]:
    return [Fake(uid) for uid in uids]


def test_a_sequence_keeps_its_place_until_it_is_forgotten() -> None:
    places = Places(3)
    first = places.of(fakes(10, 11, 12))
    assert sorted(first) == [0, 1, 2]
    assert places.of(fakes(12, 10)) == [first[2], first[0]]
    places.forget(11)
    places.forget(11)
    assert places.of(fakes(13)) == [first[1]]
    assert len(places) == 3


def test_a_full_table_gives_away_places_of_sequences_that_are_not_in_the_step() -> None:
    lost: list[int] = []
    places = Places(2, lost.append)
    first = places.of(fakes(1, 2))
    assert places.of(fakes(2, 3)) == [first[1], first[0]]
    assert lost == [1]
    with pytest.raises(ValueError, match="3 sequences"):
        places.of(fakes(4, 5, 6))


def test_the_same_sequence_twice_in_a_step_has_one_place() -> None:
    a, b = fakes(1, 2)
    assert len({*Places(2).of([a, b, a])}) == 2


def test_ramps_count_up_from_each_start() -> None:
    starts, counts = np.array([5, 0, 7], np.int32), np.array([2, 0, 3], np.int32)
    assert ramps(starts, counts).tolist() == [5, 6, 7, 8, 9]
    assert ramps(starts[:0], counts[:0]).tolist() == []


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    (seq,) = fakes(1)
    seq.block_table = [3, 4, 5]
    with pytest.raises(ValueError, match="3 blocks"):
        BlockTables(2, 2, 4).update([seq], np.array([0], np.int32), np.array([8], np.int32), np.array([1], np.int32))


@pytest.mark.parametrize("seed", range(30))
def test_the_device_sees_the_block_table_of_every_sequence_that_runs(seed: int) -> None:
    """Random growth, forks, copies on write, swaps, trims and ends under the real block manager."""
    chance = random.Random(seed)
    size = chance.choice([1, 4])
    blocks = BlockManager(700, size, host_slots=20, prefix_caching=chance.random() < 0.5)
    tables, places = BlockTables(5, 150, size), Places(5)
    device = np.full_like(tables.entries, 1 << 20)
    live: list[Any] = []
    for step in range(120):
        if len(live) < 4 and chance.random() < 0.4:
            live.append(_sequence(f"r{step}", chance))
        if live and chance.random() < 0.25:
            _disturb(live, blocks, chance, places)
        running = []
        for seq in chance.sample(live, len(live)):
            if not seq.block_table:
                blocks.adopt(seq, blocks.match(seq), 0)
                seq.num_computed_tokens = len(seq.block_table) * size
            count = min(seq.num_tokens - seq.num_computed_tokens, chance.choice([1, 5, 99]))
            if count > 0 and chance.random() < 0.8 and blocks.allocate(seq, seq.num_computed_tokens + count):
                running.append((seq, seq.num_computed_tokens, count))
        blocks.moved()
        if not running:
            continue
        seqs, starts, counts = ([*x] for x in zip(*running, strict=True))
        where = np.array(places.of(seqs), np.int32)
        at, values = tables.update(seqs, where, np.array(starts, np.int32), np.array(counts, np.int32))
        assert len(set(at.tolist())) == len(at)
        if chance.random() < 0.1:  # the launch raises before the upload
            tables.forget()
            continue
        device.reshape(-1)[at] = values
        for seq, start, count, place in zip(seqs, starts, counts, where.tolist(), strict=True):
            used = -(-(start + count) // size)
            assert device[place, :used].tolist() == seq.block_table[:used]
            seq.num_computed_tokens = start + count
            blocks.register(seq, start // size, (start + count) // size)
            if seq.num_computed_tokens == seq.num_tokens:
                seq.tokens.append(chance.randrange(5))


def _sequence(name: str, chance: random.Random) -> Any:
    from engine.sampling.text import TextStream
    from engine.sequence import RequestState, Sequence
    from tests.engine.stub import token_bytes

    prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
    return Sequence(RequestState(request(name, prompt)), 0, TextStream(token_bytes))


def _disturb(live: list[Any], blocks: BlockManager, chance: random.Random, places: Places) -> None:
    seq = chance.choice(live)
    kind = chance.choice(["end", "recompute", "trim", "fork", "swap"])
    if kind == "end" or seq.num_tokens > 22:
        blocks.free(seq)
        places.forget(seq.uid)
        live.remove(seq)
    elif kind == "recompute":
        blocks.free(seq)
    elif kind == "trim" and seq.block_table:
        blocks.allocate(seq, seq.num_tokens)
        blocks.trim(seq)
    elif kind == "fork" and len(live) < 4 and seq.num_computed_tokens == seq.num_tokens - 1 > 0:
        child = _sequence("fork", chance)
        child.tokens[:] = seq.tokens
        blocks.fork(seq, child)
        live.append(child)
    elif kind == "swap" and seq.block_table and blocks.swap_out(seq):
        blocks.adopt(seq, blocks.swapped(seq), seq.num_computed_tokens)
