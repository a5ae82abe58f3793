"""Run `hvd-bert bench` alone and under a launcher, and check the printed table and the JSON figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import printed
from documented import undocumented
from launch import launcher, run

pytestmark = pytest.mark.integration
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 32, "vocab_size": 1100}


@pytest.mark.alone  # other tests would disturb the timing of 2 ms steps
@pytest.mark.parametrize(("size", "by"), [(1, "none"), (2, "gloo")])
def test_table_and_json(tmp_path: Path, size: int, by: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **TINY}))
    words = [sys.executable, "-m", "hvd_bert.tools.bench", "--model", "config.json", "--steps", "100", "--repeats", "3"]
    words += ["--peak_tflops", "2", "--json", "bench.json"]
    outcome = run([*launcher(size, by), *words], tmp_path, env={"HOROVOD_CYCLE_TIME": None}).expect(0)
    for label in ("windows/s ", "useful GFLOP/s, all ranks ", "MFU, share of the vendor's peak "):
        assert printed(outcome).count(label) == 1, outcome
    record = json.loads((tmp_path / "bench.json").read_text())
    figures = record["figures"]
    assert len(record["sections"]) == 3 and len(record["memory_bytes"]) == len(record["ranks"]) == size
    assert figures["windows_per_s"]["median"] > 0 and 0 < figures["mfu"]["median"] < 1
    for section in record["sections"]:
        assert section["mfu"] == pytest.approx(section["useful_gflops"] / (2000 * size), rel=0.01)
    shares = [sum(section[name] for name in section if name.endswith("_share")) for section in record["sections"]]
    assert shares == pytest.approx([1.0] * 3, abs=0.02)  # the phases add up to the step time
    assert record["global_batch"] == 8 * size and record["imbalance"] >= 1
    assert undocumented(record, "Benchmark JSON", "train_results.json", without=("settings",)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "bench.json"}
