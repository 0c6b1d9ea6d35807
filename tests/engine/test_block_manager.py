"""The block manager, down to block ids."""

import copy
import random

import pytest

from engine.sampling.text import TextStream
from engine.scheduling.block_manager import BlockManager, Hit, IntegrityError, Moves
from engine.sequence import RequestState, Sequence
from tests.engine.stub import request, token_bytes


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(RequestState(request("r", tokens, salt=salt)), 0, TextStream(token_bytes))


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """Admit a sequence and compute all its tokens."""
    hits = blocks.match(seq)
    blocks.adopt(seq, hits, len(hits) * blocks.block_size)
    start = seq.num_computed_tokens
    assert blocks.allocate(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    blocks.register(seq, start // blocks.block_size, seq.num_computed_tokens // blocks.block_size)


def test_blocks_are_handed_out_in_order_and_come_back_last_first() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence(list(range(9))), sequence(list(range(50, 55)))
    compute(blocks, a)
    compute(blocks, b)
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3, 4])
    blocks.free(a)
    # The partial block 2 is unhashed and so first in line; then the untouched; then 1 before 0.
    assert list(blocks.device._free) == [2, 5, 6, 7, 1, 0]
    blocks.check_integrity([b])


def test_a_second_equal_prompt_shares_all_but_the_last_block() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence(list(range(8))), sequence(list(range(8)))
    compute(blocks, a)
    compute(blocks, b)
    assert a.block_table == [0, 1]
    assert b.block_table == [0, 2]
    assert blocks.device.refs[0] == 2
    blocks.check_integrity([a, b])
    blocks.free(a)
    assert blocks.device.refs[0] == 1
    blocks.free(b)
    third = sequence(list(range(8)))
    assert blocks.match(third) == [Hit(0)]
    blocks.check_integrity([])


@pytest.mark.parametrize("length", range(1, 14))
def test_a_hit_leaves_at_least_one_token_to_compute(length: int) -> None:
    blocks = BlockManager(16, 4)
    compute(blocks, sequence(list(range(length))))
    hits = blocks.match(sequence(list(range(length))))
    assert len(hits) == (length - 1) // 4


def test_nothing_is_findable_before_its_forward() -> None:
    blocks = BlockManager(8, 4)
    a = sequence(list(range(9)))
    blocks.allocate(a, 9)
    assert blocks.match(sequence(list(range(9)))) == []
    a.num_computed_tokens = 7
    blocks.register(a, 0, 7 // blocks.block_size)
    assert blocks.match(sequence(list(range(9)))) == [Hit(0)]


def test_same_tokens_after_another_prefix_or_under_another_salt_do_not_match() -> None:
    blocks = BlockManager(16, 4)
    compute(blocks, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert blocks.match(sequence([9, 9, 9, 9, 5, 6, 7, 8, 9])) == []
    assert blocks.match(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="other")) == []
    assert blocks.match(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="x" * 500)) == []
    assert blocks.match(sequence([1, 2, 3, 4, 5, 6, 7, 9, 9])) == [Hit(0)]


def test_a_reused_block_is_no_longer_found_under_its_old_tokens() -> None:
    blocks = BlockManager(4, 4)
    first = sequence(list(range(1, 9)))
    compute(blocks, first)
    blocks.free(first)
    other = sequence(list(range(11, 26)))
    compute(blocks, other)
    assert blocks.match(sequence(list(range(1, 9)))) == []
    blocks.check_integrity([other])


def test_an_allocation_without_room_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    a, b = sequence(list(range(8))), sequence(list(range(20, 30)))
    compute(blocks, a)
    before = copy.deepcopy(vars(blocks.device))
    assert not blocks.allocate(b, 10)
    assert vars(blocks.device) == before
    assert b.block_table == []
    assert blocks.allocate(b, 0)


def test_room_counts_a_hit_that_is_free_as_taken() -> None:
    blocks = BlockManager(4, 4)
    a = sequence(list(range(9)))
    compute(blocks, a)
    hits = blocks.match(sequence(list(range(9))))
    assert blocks.room_for(9, hits) == 0
    blocks.free(a)
    assert blocks.room_for(9, hits) == 1


def test_a_double_free_is_an_error() -> None:
    blocks = BlockManager(4, 4)
    a = sequence([1, 2])
    compute(blocks, a)
    table = list(a.block_table)
    blocks.free(a)
    a.block_table = table
    with pytest.raises(IntegrityError, match="freed twice"):
        blocks.free(a)


def test_a_leak_is_noticed() -> None:
    blocks = BlockManager(4, 4)
    a = sequence([1, 2])
    compute(blocks, a)
    with pytest.raises(IntegrityError, match="held 0 times, 1 references"):
        blocks.check_integrity([])


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_operations_keeps_the_pool_consistent(seed: int) -> None:
    chance = random.Random(seed)
    blocks = BlockManager(chance.randint(4, 24), chance.choice([1, 2, 3, 4, 8]), host_slots=chance.choice([0, 1, 9]))
    live: list[Sequence] = []
    for _ in range(300):
        if live and chance.random() < 0.4:
            blocks.free(live.pop(chance.randrange(len(live))))
        elif live and chance.random() < 0.4:
            seq = chance.choice(live)
            seq.tokens.append(chance.randrange(3))
            start = seq.num_computed_tokens
            if blocks.allocate(seq, seq.num_tokens):
                seq.num_computed_tokens = seq.num_tokens
                blocks.register(seq, start // blocks.block_size, seq.num_computed_tokens // blocks.block_size)
            else:
                blocks.trim(seq)
                seq.tokens.pop()
        else:
            seq = sequence([chance.randrange(2) for _ in range(chance.randint(1, 12))])
            hits = blocks.match(seq)
            if blocks.room_for(seq.num_tokens, hits) >= 0:
                compute(blocks, seq)
                live.append(seq)
        blocks.check_integrity(live)
        if chance.random() < 0.5:
            blocks.moved()
            blocks.check_integrity(live)
    for seq in live:
        blocks.free(seq)
    blocks.moved()
    blocks.check_integrity([])
    assert blocks.num_free == blocks.num_blocks
    assert blocks.host.num_free == blocks.host.size


# ── forks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_forks_share_all_blocks_until_one_writes_into_the_partial_last() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 5, 6])
    compute(blocks, a)
    blocks.fork(a, b)
    assert a.block_table == b.block_table == [0, 1]
    for seq in (a, b):
        seq.tokens.append(9)
        assert blocks.allocate(seq, 7)
    assert a.block_table == [0, 2], "the first to write gets the copy"
    assert b.block_table == [0, 1], "the last holder writes in place"
    assert blocks.moves.copies == {2: 1}
    blocks.check_integrity([a, b])


def test_forks_at_a_block_edge_copy_nothing() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence([1, 2, 3, 4]), sequence([1, 2, 3, 4])
    compute(blocks, a)
    blocks.fork(a, b)
    for seq in (a, b):
        seq.tokens.append(9)
        assert blocks.allocate(seq, 5)
    assert (a.block_table, b.block_table, blocks.moves) == ([0, 1], [0, 2], Moves())


# ── the host tier ─────────────────────────────────────────────────────────────────────────────────────────────────────


def swapped(blocks: BlockManager, seq: Sequence) -> bool:
    done = blocks.swap_out(seq)
    blocks.check_integrity([seq])
    return done


def resume(blocks: BlockManager, seq: Sequence) -> None:
    hits = blocks.swapped(seq)
    assert blocks.room_for(seq.num_tokens, hits) >= 0
    blocks.adopt(seq, hits, seq.num_computed_tokens)


def test_a_swapped_sequence_comes_back_with_all_it_had_computed() -> None:
    blocks = BlockManager(4, 4, host_slots=4)
    a = sequence(list(range(10)))
    compute(blocks, a)
    assert swapped(blocks, a)
    assert blocks.moves.out == [(0, 0), (1, 1), (2, 2)]
    assert (a.block_table, a.host_table, a.num_computed_tokens) == ([], [0, 1, 2], 10)
    blocks.moved()
    other = sequence(list(range(50, 66)))
    compute(blocks, other)  # takes every device block
    blocks.free(other)
    blocks.moved()
    resume(blocks, a)
    assert [slot for slot, _ in blocks.moves.into] == [0, 1, 2]
    assert [block for _, block in blocks.moves.into] == a.block_table
    assert (a.num_computed_tokens, a.host_table) == (10, [])
    blocks.check_integrity([a])
    blocks.moved()
    blocks.free(a)
    assert blocks.host.num_free == 4
    blocks.check_integrity([])


def test_a_block_that_is_still_on_the_device_is_not_copied_back() -> None:
    blocks = BlockManager(4, 4, host_slots=4)
    a = sequence(list(range(10)))
    compute(blocks, a)
    assert swapped(blocks, a)
    blocks.moved()
    resume(blocks, a)
    assert blocks.moves.into == [(2, 2)], "only the partial block has no hash to be found by"


def test_a_full_block_that_two_swapped_sequences_share_is_in_the_host_tier_once() -> None:
    blocks = BlockManager(8, 4, host_slots=8)
    a, b = sequence([*range(8), 20]), sequence([*range(8), 30])
    compute(blocks, a)
    compute(blocks, b)
    assert blocks.swap_out(a)
    assert blocks.swap_out(b)
    assert [block for block, _ in blocks.moves.out] == [0, 1, 2, 3]
    assert a.host_table[:2] == b.host_table[:2]
    blocks.check_integrity([a, b])
    blocks.moved()
    blocks.free(a)
    assert blocks.swapped(b)[0] == Hit(0)
    blocks.free(b)
    assert blocks.host.num_free == 8


def test_a_block_that_another_still_uses_stays_on_the_device() -> None:
    blocks = BlockManager(8, 4, host_slots=8)
    a, b = sequence([*range(8), 20]), sequence([*range(8), 30])
    compute(blocks, a)
    compute(blocks, b)
    assert blocks.swap_out(a)
    assert b.block_table == [0, 1, 3]
    blocks.check_integrity([a, b])


def test_a_host_tier_without_room_takes_nothing_and_changes_nothing() -> None:
    for slots in (0, 1, 2):
        blocks = BlockManager(4, 4, host_slots=slots)
        a = sequence(list(range(10)))
        compute(blocks, a)
        before = (copy.deepcopy(vars(blocks.device)), copy.deepcopy(vars(blocks.host)), list(a.block_table))
        assert not blocks.swap_out(a)
        assert (vars(blocks.device), vars(blocks.host), a.block_table) == before
        assert blocks.moves == Moves()


def test_an_evicted_prefix_is_found_again_in_the_host_tier() -> None:
    blocks = BlockManager(3, 4, host_slots=4)
    first = sequence(list(range(1, 10)))
    compute(blocks, first)
    blocks.free(first)
    other = sequence(list(range(50, 61)))
    compute(blocks, other)
    blocks.free(other)
    assert sorted(block for block, _ in blocks.moves.out) == [0, 1]
    blocks.moved()
    again = sequence(list(range(1, 10)))
    hits = blocks.match(again)
    assert [hit.block for hit in hits] == [None, None]
    blocks.adopt(again, hits, 8)
    blocks.check_integrity([again])
    twin = sequence(list(range(1, 10)))
    assert [hit.block for hit in blocks.match(twin)] == again.block_table, "a second finder shares what was loaded"


def test_no_slot_is_overwritten_before_it_was_copied_out_of() -> None:
    blocks = BlockManager(4, 4, host_slots=1)
    a = sequence([1, 2, 3])
    compute(blocks, a)
    assert swapped(blocks, a)
    blocks.moved()
    resume(blocks, a)
    b = sequence([4, 5, 6])
    compute(blocks, b)
    assert not blocks.swap_out(b), "the slot is free only once its content is back on the device"
    blocks.moved()
    assert blocks.swap_out(b)


def test_a_partial_block_shared_with_a_fork_is_dropped_and_recomputed() -> None:
    blocks = BlockManager(8, 4, host_slots=8)
    a, b = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 5, 6])
    compute(blocks, a)
    blocks.fork(a, b)
    assert blocks.swap_out(b)
    assert b.num_computed_tokens == 4
    assert len(b.host_table) == 1
    blocks.check_integrity([a, b])


def test_a_copy_that_was_not_made_yet_is_swapped_out_from_its_source() -> None:
    blocks = BlockManager(8, 4, host_slots=8)
    a, b = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 5, 6])
    compute(blocks, a)
    blocks.fork(a, b)
    a.tokens.append(9)
    assert blocks.allocate(a, 7)
    assert blocks.moves.copies == {2: 1}
    assert blocks.swap_out(a)
    assert [block for block, _ in blocks.moves.out] == [0, 1]
    blocks.check_integrity([a, b])


def test_a_copy_into_a_block_that_changed_hands_is_not_made() -> None:
    blocks = BlockManager(3, 4)
    a, b, c = (sequence([1, 2, 3, 4, 5, 6]) for _ in range(3))
    compute(blocks, a)
    blocks.fork(a, b)
    blocks.fork(a, c)
    for seq in (a, b, c):
        seq.tokens.append(9)
    assert blocks.allocate(a, 7)
    blocks.free(a)
    assert blocks.allocate(b, 7)
    assert blocks.moves.copies == {2: 1}
    blocks.check_integrity([b, c])
