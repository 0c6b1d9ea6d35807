"""The default sizes of KV pool and host tier follow what the machine and its control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.start.memory import available_bytes, default_host_bytes, default_pool_blocks, resident_bytes

GIB = 1 << 30
DEMO_BLOCK = 16 * 30 * 2 * 3 * 64 * 2
"""Bytes of a KV block of the demo model."""


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class TestAvailable:
    def test_without_control_groups_the_memory_of_the_system_counts(self, tmp_path: Path) -> None:
        write(tmp_path, proc__meminfo="MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n")
        assert available_bytes(tmp_path) == 4_000_000 * 1024

    def test_the_tightest_control_group_above_counts(self, tmp_path: Path) -> None:
        write(tmp_path, proc__meminfo="MemAvailable: 8388608 kB\n", proc__self__cgroup="0::/pod/box\n")
        groups = tmp_path / "sys/fs/cgroup"
        write(groups / "pod/box", memoryDOTmax="max\n", memoryDOTcurrent="1000\n")
        write(groups / "pod", memoryDOTmax=f"{2 * GIB}\n", memoryDOTcurrent=f"{GIB}\n")
        assert available_bytes(tmp_path) == GIB
        write(groups / "pod", memoryDOTstat=f"anon 5\ninactive_file {GIB // 2}\n")
        assert available_bytes(tmp_path) == GIB * 3 // 2, "file cache can be dropped"

    def test_version_1_of_control_groups(self, tmp_path: Path) -> None:
        write(tmp_path, proc__self__cgroup="9:cpu,cpuacct:/box\n4:memory:/box\n")
        group = tmp_path / "sys/fs/cgroup/memory/box"
        write(group, memoryDOTlimit_in_bytes=f"{GIB}\n", memoryDOTusage_in_bytes="1024\n")
        assert available_bytes(tmp_path) == GIB - 1024

    def test_a_group_over_its_limit_leaves_nothing(self, tmp_path: Path) -> None:
        write(tmp_path, proc__self__cgroup="0::/\n")
        write(tmp_path / "sys/fs/cgroup", memoryDOTmax="1000\n", memoryDOTcurrent="2000\n")
        assert available_bytes(tmp_path) == 0

    def test_a_system_that_does_not_say(self, tmp_path: Path) -> None:
        assert available_bytes(tmp_path) is None
        assert resident_bytes(tmp_path) is None

    def test_this_machine(self) -> None:
        assert (resident_bytes() or 0) > 0
        assert (available_bytes() or 0) > 0


class TestDefaults:
    config = EngineConfig()

    def blocks(self, available: int | None, max_model_len: int = 8192, **changes: int) -> int:
        return default_pool_blocks(EngineConfig(**changes), max_model_len, DEMO_BLOCK, available)

    @pytest.mark.parametrize("gib", [2, 4, 8, 16, 64])
    def test_the_demo_model_takes_little_of_any_machine(self, gib: int) -> None:
        pool = self.blocks(gib * GIB) * DEMO_BLOCK
        assert pool <= min(gib * GIB // 4, 5 * GIB // 4)
        assert default_host_bytes(pool, in_file=False) <= pool // 4

    def test_the_default_pool_holds_a_usual_batch(self) -> None:
        assert self.blocks(8 * GIB) * 16 >= 128 * 384

    def test_a_sequence_of_full_length_fits_where_memory_allows(self) -> None:
        assert self.blocks(64 * GIB, max_model_len=131072) * 16 >= 131072

    def test_never_more_than_all_sequences_can_fill(self) -> None:
        assert self.blocks(64 * GIB, max_model_len=64) * 16 <= 128 * 64 * 1.02
        assert self.blocks(64 * GIB, max_model_len=64, max_num_seqs=1) * 16 <= 2 * 64 * 1.2

    def test_without_an_answer_of_the_system_two_gib_are_the_most(self) -> None:
        assert self.blocks(None, max_model_len=1 << 20) * DEMO_BLOCK <= 2 * GIB

    def test_a_host_tier_in_a_file_is_as_large_as_the_pool(self) -> None:
        assert default_host_bytes(GIB // 2, in_file=True) == GIB // 2
        assert default_host_bytes(8 * GIB, in_file=True) == GIB
