"""The environment row, and peaks of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import machine
from benchmarks.machine import Monitor, device_facts, free_memory, row
from benchmarks.record import Store


def test_the_row_says_where_it_was_measured_and_can_be_stored(tmp_path):
    facts = device_facts("cpu")
    written = row(facts, {"copy_bandwidth": 1.0})
    Store(tmp_path / "rows.jsonl").append(written)
    assert Store(tmp_path / "rows.jsonl").environments() == {written["id"]: written}
    assert written["torch"] == torch.__version__
    assert written["gpu"] is None
    assert {"cpu", "cpu_count", "python", "libraries", "commit", "dirty", "peaks"} <= set(written)
    assert "torch-geometric" in written["libraries"]
    assert written["id"] != row({**facts, "torch": "0.0"}, {})["id"]


def test_without_a_driver_a_monitor_knows_nothing(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("benchmarks.machine.ctypes.CDLL", missing)
    monitor = Monitor()
    assert (monitor.sm_clock(), monitor.power(), monitor.memory(), monitor.driver()) == (None,) * 4
    assert free_memory("cuda", monitor) is None and free_memory("cpu", monitor) > 1 << 20


@pytest.mark.gpu
def test_a_gpu_is_described_and_watched():
    facts = device_facts("cuda")
    monitor = Monitor(facts["gpu_uuid"])
    assert facts["driver"] and facts["gpu_memory"] > 0
    assert monitor.sm_clock() and monitor.power()
    used, free = monitor.memory() or (0, 0)
    assert used > 0 and used + free <= facts["gpu_memory"] * 1.1
    assert facts["gpu"] == torch.cuda.get_device_name()


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine._commit() == {"commit": None, "dirty": None}
    for told, expected in (("abc", ("abc", False)), ("abc-dirty", ("abc", True))):
        monkeypatch.setenv("BENCHMARKS_COMMIT", told)
        assert tuple(machine._commit().values()) == expected
