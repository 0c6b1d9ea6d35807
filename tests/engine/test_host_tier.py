"""Copies of blocks between pool and host tier: the right bytes, in few launches, without a wait."""

from __future__ import annotations

import random

import pytest
import torch

from engine.device.host_tier import HostTier, copy_blocks
from tests.pretend_gpu import pretend_gpu

BYTES = 24


def blocks(count: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (count, BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_go_out_and_come_back_whatever_the_order_and_the_pieces(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 3, 8]) for _ in range(4)] + [4]
    tier, pool = HostTier([blocks(n, seed) for n in sizes]), blocks(20, seed + 100)
    count = min(20, sum(sizes))
    slots, sources = chance.sample(range(sum(sizes)), count), sorted(chance.sample(range(20), count))
    tier.copy_out(pool, zip(sources, slots, strict=True))
    back = torch.zeros_like(pool)
    targets = chance.sample(range(20), count)
    tier.copy_in(back, zip(slots, targets, strict=True))
    assert torch.equal(back[targets], pool[sources])
    assert (tier.num_slots, tier.nbytes) == (sum(sizes), sum(sizes) * BYTES)


def test_consecutive_blocks_are_one_copy_for_each_piece_and_wait_for_nothing() -> None:
    with pretend_gpu() as gpu:
        pieces = [torch.zeros((n, BYTES), dtype=torch.uint8, pin_memory=True) for n in (4, 4)]
        pool = blocks(8, 1).to("cuda")
        with gpu.watch() as waits:
            before = gpu.queue.launched
            HostTier(pieces).copy_out(pool, [(3, 4), (1, 2), (2, 3), (7, 7)])
            assert gpu.queue.launched - before == 3  # blocks 1 and 2, block 3 in the next piece, block 7
            HostTier(pieces).copy_in(pool, [(2, 0), (3, 1)])
            copy_blocks(pool, [(0, 6)])
        assert waits == []
        want = blocks(8, 1)
        want[[0, 1]] = want[[1, 2]]
        want[6] = want[0]
        assert torch.equal(pool.cpu(), want)
        assert torch.equal(pieces[1][3], blocks(8, 1)[7])


@pytest.mark.parametrize("seed", range(10))
def test_copies_within_the_pool_read_all_blocks_before_they_write_any(seed: int) -> None:
    chance, pool = random.Random(seed), blocks(200, seed)
    targets = chance.sample(range(200), 90)
    sources = [chance.choice(targets if chance.random() < 0.1 and seed % 2 else range(200)) for _ in targets]
    want = pool.clone()
    want[targets] = pool[sources]
    copy_blocks(pool, zip(sources, targets, strict=True))
    assert torch.equal(pool, want)
