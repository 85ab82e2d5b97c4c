"""python -m zerofx plan: well-known models and Hugging Face configurations, by name or file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerofx
from zerofx.__main__ import main, parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from zerofx.inspect.predict import shapes
from zerofx.inspect.predict.decoders import LLAMAS

PUBLISHED = {  # millions of parameters, as their authors or model cards give them
    "gpt2": 124.4,
    "gpt2-xl": 1557.6,
    "llama-2-7b": 6738.4,
    "llama-2-70b": 68976.6,
    "llama-3.1-8b": 8030.3,
    "llama-3.1-70b": 70553.7,
    "llama-3.1-405b": 405853.4,
    "mistral-7b": 7241.7,
    "mixtral-8x7b": 46702.8,
    "qwen2.5-7b": 7615.6,
    "qwen2.5-72b": 72706.2,
    "bert-large": 335.2,
    "vit-l": 304.3,
    "t5-11b": 11307.3,
}


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_well_known_model_has_the_published_number_of_parameters_and_no_memory(name: str) -> None:
    pytest.importorskip("transformers")
    module = shapes.build(name)
    assert round(sum(p.numel() for p in module.parameters()) / 1e6, 1) == PUBLISHED[name]
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())


@pytest.mark.parametrize("name", [name for name, of in shapes.SHAPES.items() if of["model_type"] in (*LLAMAS, "gpt2")])
def test_a_decoder_made_here_has_the_parameters_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    found = [(name, p.shape) for name, p in shapes.build(name).named_parameters()]
    monkeypatch.setattr(shapes, "decoder", lambda config: None)
    assert found == [(name, p.shape) for name, p in shapes.build(name).named_parameters()]


def test_the_documented_plan_needs_no_library_of_models(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main("plan --model llama-3.1-8b --world-size 16 --gpu-memory 80GB".split()) == 0
    assert "recommended: stage" in capsys.readouterr().out
    assert main("plan --model t5-11b --world-size 16".split()) == 2
    assert (
        "the layers of t5-11b are made by Hugging Face transformers, which is not installed: pip install"
        in capsys.readouterr().err
    )


def test_memory_without_a_unit_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main("plan --model gpt2 --world-size 16 --gpu-memory 80".split())
    assert "'80' is 80 bytes: expected a device's memory with its unit, such as 80GB" in capsys.readouterr().err


def test_the_command_prints_the_plan_of_405_billion_parameters_in_a_process_of_its_own() -> None:
    pytest.importorskip("transformers")
    options = ["--model", "llama-3.1-405b", "--world-size", "64", "--gpu-memory", "80GB"]
    done = subprocess.run(
        [sys.executable, "-m", "zerofx", "plan", *options], capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 1, done.stderr  # nothing fits
    plan = zerofx.plan(shapes.build("llama-3.1-405b"), world_size=64, memory=80e9)
    assert done.stdout == f"llama-3.1-405b, bf16: {plan}\n"
    assert "no stage fits into 80.0 GB on 64 ranks; stage 3 does from" in done.stdout


def test_the_version_is_said_and_is_in_one_place(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"zerofx {zerofx.__version__} (torch {torch.__version__})\n"
    assert zerofx.__version__ not in (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_options_reach_the_plan(capsys) -> None:
    pytest.importorskip("transformers")
    options = "plan --model gpt2 --world-size 8 --dtype mixed --micro-batches 4 --no-sync".split()
    assert main(options) == 0
    precision = zerofx.MixedPrecision(torch.bfloat16)
    module = shapes.build("gpt2", torch.float32)
    plan = zerofx.plan(module, world_size=8, mixed_precision=precision, micro_batches=4, no_sync=True)
    assert capsys.readouterr().out == f"gpt2, mixed: {plan}\n"


def test_options_of_time_reach_the_plan(capsys) -> None:
    pytest.importorskip("transformers")
    links = "--bandwidth 400Gbit --node-bandwidth 1GB --ranks-per-node 4 --latency 20us".split()
    work = "--flops 4T --tokens 512 --sequence-length 64".split()
    command, module = "plan --model gpt2 --world-size 8 --gpu-memory 10GB".split(), shapes.build("gpt2")
    options = dict(bandwidth=5e10, node_bandwidth=1e9, ranks_per_node=4, latency=2e-5, flops=4e12, tokens=512)
    assert main([*command, *links, *work]) == 0
    plan = zerofx.plan(module, world_size=8, memory=10e9, **options, sequence_length=64)
    assert capsys.readouterr().out == f"gpt2, bf16: {plan}\n"
    assert main([*command, *links, *work[:-2], "--flops-per-token", "1G"]) == 0
    plan = zerofx.plan(module, world_size=8, memory=10e9, **options, flops_per_token=1e9)
    assert capsys.readouterr().out == f"gpt2, bf16: {plan}\n"
    assert main([*command, "--flops", "4T"]) == 2
    assert "flops=4000000000000.0 says nothing without bandwidth and tokens" in capsys.readouterr().err


def test_rates_have_units_and_bits_are_not_taken_for_bytes() -> None:
    cases = {"400Gbit": 5e10, "400 Gbit/s": 5e10, "400gbps": 5e10, "3.2Tbit": 4e11, "50GB": 5e10, "50GB/s": 5e10}
    for text, rate in {**cases, "1GiB": 2**30, "1000": 1000, "8bit": 1}.items():
        assert parse_bandwidth(text) == rate
    for text in ("400Gb", "400gb/s", "400 Gb", "fast", "0GB", "50GB/h"):
        with pytest.raises(ValueError, match="expected a bandwidth, such as 400Gbit"):
            parse_bandwidth(text)
    assert [parse_flops(text) for text in ("400T", "1.5Pflop/s")] == [4e14, 1.5e15]
    assert [parse_seconds(text) for text in ("20us", "1ms", "2 s", "3")] == pytest.approx([2e-5, 1e-3, 2, 3])
    for parse, message in ((parse_flops, "operations per second, such as 400T"), (parse_seconds, "such as 20us")):
        with pytest.raises(ValueError, match=message):
            parse("12 parsecs")


def test_a_config_json_is_as_good_as_a_name(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(shapes.SHAPES["gpt2"] | {"torch_dtype": "float32"}))
    expected = zerofx.plan(shapes.build("gpt2"), world_size=2)
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", "--model", str(path), "--world-size", "2"]) == 0
        assert capsys.readouterr().out == f"{path}, bf16: {expected}\n"


def test_a_configuration_without_architectures_is_the_bare_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {key: value for key, value in shapes.SHAPES["gpt2"].items() if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(shapes.build(tmp_path)).__name__ == "GPT2Model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file, and no model of the table (gpt2, gpt2-xl"),
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", 'no "model_type"'),
        ('{"model_type": "abacus"}', "model_type 'abacus' is not known to transformers"),
    ],
)
def test_a_model_that_is_none_is_an_error_that_says_what_is_expected(
    content: str | None, message: str, tmp_path: Path, capsys
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert main(["plan", "--model", str(path), "--world-size", "2"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_bytes_have_decimal_and_binary_units() -> None:
    cases = {"80GB": 80e9, "80 GiB": 80 * 2**30, "1.5tb": 1.5e12, "24gib": 24 * 2**30, "1000": 1000, "5 kB": 5e3}
    for text, n in cases.items():
        assert parse_bytes(text) == n
    for text in ("80 apples", "GB", "-1GB", "0GB", "", "iB", "8i"):
        with pytest.raises(ValueError, match="expected bytes, such as 80GB"):
            parse_bytes(text)
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", "--world-size", "2", "--gpu-memory", "much"])


def test_choose_says_how_to_train_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = f"choose {tmp_path} --gpus 8 --batch 2 --sequence-length 32 --bandwidth 50GB --memory"
    assert main([*command.split(), "1GB"]) == 0
    said = capsys.readouterr().out
    assert "for LlamaForCausalLM on 8 ranks within 1.0 GB" in said
    assert "rates      of an ordinary GPU, where they are not given" in said
    assert main("choose nobody --gpus 8 --memory 1GB".split()) == 2
    assert "python -m zerofx choose: 'nobody': no such file" in capsys.readouterr().err
