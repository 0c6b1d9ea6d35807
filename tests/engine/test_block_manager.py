"""The block manager, down to block ids."""

import random

import pytest

from engine.block_manager import BlockManager, IntegrityError
from engine.sequence import Sequence
from engine.text import TextStream
from tests.engine.stub import decode, request


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(request("r", tokens, salt=salt), 0, TextStream(decode))


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """Admit a sequence and compute all its tokens."""
    blocks.adopt(seq, blocks.match(seq))
    start = seq.num_computed_tokens
    assert blocks.allocate(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    blocks.register(seq, start)


def test_blocks_are_handed_out_in_order_and_come_back_last_first() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence(list(range(9))), sequence(list(range(50, 55)))
    compute(blocks, a)
    compute(blocks, b)
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3, 4])
    blocks.free(a)
    # The partial block 2 is unhashed and so first in line; then the untouched; then 1 before 0.
    assert list(blocks._free) == [2, 5, 6, 7, 1, 0]
    blocks.check_integrity([b])


def test_a_second_equal_prompt_shares_all_but_the_last_block() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence(list(range(8))), sequence(list(range(8)))
    compute(blocks, a)
    compute(blocks, b)
    assert a.block_table == [0, 1]
    assert b.block_table == [0, 2]
    assert blocks._refs[0] == 2
    blocks.check_integrity([a, b])
    blocks.free(a)
    assert blocks._refs[0] == 1
    blocks.free(b)
    third = sequence(list(range(8)))
    assert blocks.match(third) == [0]
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
    blocks.register(a, 0)
    assert blocks.match(sequence(list(range(9)))) == [0]


def test_same_tokens_after_another_prefix_or_under_another_salt_do_not_match() -> None:
    blocks = BlockManager(16, 4)
    compute(blocks, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert blocks.match(sequence([9, 9, 9, 9, 5, 6, 7, 8, 9])) == []
    assert blocks.match(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="other")) == []
    assert blocks.match(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="x" * 500)) == []
    assert blocks.match(sequence([1, 2, 3, 4, 5, 6, 7, 9, 9])) == [0]


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
    before = (list(blocks._refs), list(blocks._free), dict(blocks._index))
    assert not blocks.allocate(b, 10)
    assert (list(blocks._refs), list(blocks._free), dict(blocks._index)) == before
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
    with pytest.raises(IntegrityError, match="0 tables, 1 references"):
        blocks.check_integrity([])


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_operations_keeps_the_books(seed: int) -> None:
    chance = random.Random(seed)
    blocks = BlockManager(chance.randint(4, 24), chance.choice([1, 2, 3, 4, 8]))
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
                blocks.register(seq, start)
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
    for seq in live:
        blocks.free(seq)
    blocks.check_integrity([])
    assert blocks.num_free == blocks.num_blocks
