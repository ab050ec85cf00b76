"""`benchmarks/gpu_check.py` finds wrong kernels, and `benchmarks/tune.py` writes what the kernels read.

Interpreted, on a CPU: the sections of times need a GPU and are not run here.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernel_cases import interpreted, quietly
from scipy import stats

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu_check
import gpu_sections
import kernel_ops
import tune

from hf_specdec._kernels import Config, _config, choose

pytestmark = [quietly, interpreted]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GUMBEL = next(op for op in kernel_ops.OPS if op.variant == "gumbel")
SHAPE = kernel_ops.Shape(2, 1, 97, padding=3, broken=True)


def test_an_interpreted_run_passes_and_writes_what_it_saw(tmp_path, capsys):
    out = tmp_path / "check.json"
    assert gpu_check.main(["--interpret", "--op", "row_sample", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert {"device", "driver", "torch", "triton", "hip", "cuda"} <= set(report["machine"])
    rows = [row for section in report["sections"].values() for row in section["rows"]]
    assert len(rows) == 3 * 3 + 2 * 2 and all(row["ok"] for row in rows)
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("script", [gpu_check, tune])
def test_without_a_gpu_one_sentence_says_so(script, capsys):
    assert script.main([]) == 2
    assert capsys.readouterr().out.startswith("There is no GPU here that torch can use; --")


def test_an_op_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--interpret", "--op", "beam"])
    assert "`--op` is beam; the kernel package has block_mass, compact, processed_sample" in capsys.readouterr().err


@pytest.mark.parametrize("op", kernel_ops.served(), ids=lambda op: f"{op.name} {op.variant}")
def test_every_op_agrees_with_its_reference(op):
    assert gpu_sections.numeric(op, SHAPE, CPU)["ok"]


@dataclass(frozen=True)
class Wrong(kernel_ops.RowOp):
    """A kernel that takes the next token, or tokens in rows that have none."""

    everywhere: bool = True

    def run(self, arguments):
        found = super().run(arguments)
        shifted = (found.token + 1) % arguments["logits"].shape[-1]
        return found._replace(token=shifted if self.everywhere else found.token.clamp_min(0))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_kernel_that_gives_other_tokens_fails(everywhere):
    wrong = Wrong("row_sample", "wrong", {"method": "gumbel"}, everywhere=everywhere)
    assert not gpu_sections.numeric(wrong, SHAPE, CPU)["ok"]


def test_a_kernel_that_ignores_the_noise_fails():
    # SGLang verified greedily on ROCm whatever the temperature (sgl-project/sglang#37134).
    class Greedy(kernel_ops.RowOp):
        def run(self, arguments):
            return super().run({**arguments, "method": "greedy"})

    greedy = Greedy("row_sample", "gumbel", {"method": "gumbel"})
    assert not gpu_sections.law(greedy, CPU, 160)["ok"]
    assert not gpu_sections.seeds(greedy, CPU, 80)["ok"]


def test_rows_two_gigabytes_apart_are_read_where_they_are():
    far = kernel_ops.Shape(2, 1, 64, far=True)  # pages that nobody touches take no memory
    first, second = far.logits(CPU)
    assert second.data_ptr() - first.data_ptr() > 1 << 31
    assert gpu_sections.numeric(GUMBEL, far, CPU)["ok"]


def test_times_are_taken_of_every_op_and_rule(monkeypatch):
    # The clock, the profiler and the sizes are replaced; on a GPU the cases are these.
    def once(function):
        function()
        return 0.5

    monkeypatch.setattr(gpu_sections, "seconds", once)
    monkeypatch.setattr(gpu_sections, "launches", lambda function: 2)
    monkeypatch.setattr(
        gpu_sections, "implementation", lambda kernels, rule, device: "triton" if rule == "match" else ""
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4096, 4096))
    for name, values in (("VOCAB_SIZES", (300,)), ("BATCH_SIZES", (1, 3)), ("DRAFT_LENGTHS", (2,))):
        monkeypatch.setattr(gpu_sections, name, values)
    ops = kernel_ops.served(["row_sample"])
    times = gpu_check.section("times", gpu_sections.times(CPU, ops), seconds=60.0)["rows"]
    assert len(times) == 1 + 2 * len(ops) and all(row["ok"] for row in times)
    assert times[0]["bytes_per_second"] == 2 * 1024 / 0.5
    assert times[1]["fraction"] == pytest.approx(3 * 300 * 2 / 0.5 / times[0]["bytes_per_second"])
    verified = gpu_check.section("verification", gpu_sections.verification(CPU, ops), seconds=60.0)["rows"]
    assert len(verified) == 2 * 2 and all(row["ok"] and row["times_faster"] == 1.0 for row in verified)


@pytest.mark.parametrize("counts", [[10, 20, 30], [18, 20, 22], [0, 30, 30], [60, 0, 0]])
def test_p_values_are_those_of_pearsons_test(counts):
    tokens = torch.arange(3).repeat_interleave(torch.tensor(counts))
    expected = stats.chisquare(counts, [20.0] * 3).pvalue
    assert gpu_sections.chi_square(tokens, torch.full((3,), 1 / 3)) == pytest.approx(expected, rel=1e-6)


def test_tokens_without_probability_have_no_p_value():
    assert gpu_sections.chi_square(torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.0])) == 0.0
    assert gpu_sections.chi_square(torch.tensor([0, -1]), torch.tensor([0.5, 0.5])) == 0.0


def test_what_raises_has_failed_and_the_rest_still_runs(capsys):
    def refuses():
        raise RuntimeError("out of registers")

    found = gpu_check.section("numbers", [("first", refuses), ("second", lambda: {"ok": True})], seconds=60.0)
    assert [row["ok"] for row in found["rows"]] == [False, True]
    assert found["rows"][0]["error"] == "RuntimeError: out of registers"
    assert "FAILED first" in capsys.readouterr().out


def test_when_the_time_is_over_the_rest_is_counted():
    found = gpu_check.section("numbers", [("first", lambda: {"ok": True})] * 3, seconds=-1.0)
    assert found == {"rows": [], "left_out": 3}


# Tuning


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """A folder where the kernels look for the table of the device "Some_GPU"."""
    monkeypatch.setattr(_config, "FOLDER", tmp_path)
    monkeypatch.setattr(_config, "_device_name", lambda index: "Some_GPU")
    _config._table.cache_clear()
    yield tmp_path
    _config._table.cache_clear()


def test_the_table_that_tune_writes_is_the_one_that_kernels_read(tables):
    entries = [
        tune.entry(32768, 8, Config(1024, 2, 3), measured=True),
        tune.entry(32768, 64, Config(4096, 8), measured=True),
        tune.entry(262144, 8, Config(8192, 16), measured=True),
    ]
    (tables / "device_name=Some_GPU.json").write_text(tune.as_json({"row_sample": entries}))
    rule = choose("row_sample", 65, 1000, CPU)
    for rows, vocab_size, expected in (
        (1, 32768, Config(1024, 2, 3)),
        (9, 1000, Config(4096, 8)),
        (8, 32769, Config(8192, 16)),
        (65, 1000, rule),
        (8, 262145, choose("row_sample", 8, 1000, CPU)),
    ):
        assert choose("row_sample", rows, vocab_size, CUDA) == expected
    assert choose("another", 1, 1000, CUDA) == choose("another", 1, 1000, CPU)


def test_an_untuned_table_is_the_rule_and_says_so(tables):
    assert tune.main(["--untuned", "Some_GPU", "--op", "row_sample", "--folder", str(tables)]) == 0
    table = json.loads((tables / "device_name=Some_GPU.json").read_text())
    assert [entry["tuned"] for entry in table["row_sample"]] == [False] * 12
    for rows in (1, 64, 65, 4000):
        assert choose("row_sample", rows, 151936, CUDA) == choose("row_sample", rows, 151936, CPU)


def test_ops_that_are_not_tuned_again_keep_their_entries(tables):
    kept = [tune.entry(1, 1, Config(1024, 2), measured=True)]
    path = tables / "device_name=Some_GPU.json"
    path.write_text(tune.as_json({"another": kept}))
    tune.main(["--untuned", "Some_GPU", "--op", "row_sample", "--folder", str(tables)])
    assert set(json.loads(path.read_text())) == {"another", "row_sample"}


def test_the_fastest_config_is_taken_among_those_that_are_right(monkeypatch):
    fast_but_wrong, fast, slow, refused = Config(128, 1), Config(256, 1), Config(512, 1), Config(100, 1)
    clock = iter([3.0, 3.0, 1.0, 1.0, 2.0, 2.0])  # greedy and gumbel, of each config that runs

    def once(function):
        function()
        return next(clock)

    loss = kernel_ops.RowOp.loss
    monkeypatch.setattr(
        kernel_ops.RowOp,
        "loss",
        lambda op, arguments, found: 1.0 if arguments["config"] == fast_but_wrong else loss(op, arguments, found),
    )
    monkeypatch.setattr(gpu_sections, "seconds", once)
    monkeypatch.setattr(tune, "candidates", lambda: [refused, slow, fast_but_wrong, fast])
    found = tune.tuned("row_sample", 300, 8, CPU)
    assert found == tune.entry(300, 8, fast, measured=True)
    monkeypatch.setattr(tune, "candidates", lambda: [refused])
    with pytest.raises(RuntimeError, match="no config of row_sample is right"):
        tune.tuned("row_sample", 300, 8, CPU)


def test_shipped_tables_are_in_order_and_what_nobody_measured_is_the_rules():
    paths = list(tune.CONFIGS.glob("*.json"))
    assert {"device_name=AMD_Instinct_MI300X.json", "device_name=AMD_Instinct_MI355X.json"} <= {p.name for p in paths}
    for op, entries in ((op, entries) for path in paths for op, entries in json.loads(path.read_text()).items()):
        sizes = [(entry["vocab_size"], entry["rows"]) for entry in entries]
        assert sizes == sorted(set(sizes))
        for entry in entries:
            config = Config(entry["block"], entry["num_warps"], entry["waves_per_eu"])
            assert config.block & (config.block - 1) == 0 and config.num_warps in tune.WARPS
            if not entry["tuned"]:
                assert config == choose(op, entry["rows"], entry["vocab_size"], CPU)


def test_the_hint_of_waves_goes_to_amds_compiler_alone(monkeypatch):
    for hip, hint, expected in (("7.2", 3, 3), ("7.2", 0, None), (None, 3, None)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert _config.launch_options(True, hint).get("waves_per_eu") == expected


@pytest.mark.parametrize(
    "op", [op for op in kernel_ops.OPS if op.name != "compact"], ids=lambda op: f"{op.name} {op.variant}"
)
def test_every_launch_that_reads_all_logits_takes_the_hint_of_its_config(monkeypatch, op):
    from triton.runtime import interpreter

    hints, launch = [], interpreter.GridExecutor.__call__

    def recording_launch(self, *arguments, **options):
        hints.append(options.get("waves_per_eu"))
        return launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recording_launch)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    op.run({**op.arguments(SHAPE.logits(CPU), seed=1), "config": Config(64, 4, waves_per_eu=3)})
    assert hints == ([3, 3, None] if len(hints) == 3 else [3, None])
