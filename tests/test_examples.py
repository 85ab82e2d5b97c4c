"""The examples run as a user runs them, in small."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--steps 12 --layers 2 --dim 32 --heads 2 --batch 2 --context 32".split()


def run(command: list[str], timeout: float = 280) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"".join(f.read_bytes() for f in sorted((ROOT / "passes").glob("*.py"))))
    return path


@pytest.fixture(scope="module")
def program(text: Path) -> list[str]:
    return ["examples/train_gpt.py", *SMALL, "--executor", "eager", "--data", str(text)]


@pytest.fixture(scope="module")
def out(program: list[str]) -> str:
    """What it prints: stage 3, on ranks of its own."""
    return run([sys.executable, *program, "--print-graphs"])


def losses(out: str) -> list[str]:
    return re.findall(r"(?:loss|held-out loss) +([\d.]+)", out)


def test_train_gpt_launches_its_own_ranks_and_reports_what_it_did(out: str) -> None:
    ratio = re.search(r"([\d.]+) of the [\d.]+ MB of plain data parallelism", out)
    assert ratio and float(ratio[1]) == pytest.approx(0.5, abs=0.03)
    assert re.search(r"^step +10 +loss [\d.]+ +[\d,]+ tokens/s$", out, re.M)
    assert re.search(r"^held-out loss +[\d.]+ nats per byte$", out, re.M)
    assert re.search(r"^bigram entropy +[\d.]+", out, re.M)
    assert "\ndef " in out  # the sample


@pytest.mark.slow
def test_train_gpt_gives_the_same_losses_under_torchrun_and_in_other_stages(out: str, program: list[str]) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    # Stage 1 runs stage 2's graphs: tests/parity/test_stages.py compares the two bit by bit.
    others = [[*torchrun, *program, "--stage", "2"], [sys.executable, *program, "--stage", "0"]]
    assert len(losses(out)) == 2
    for command in others:
        assert losses(run(command)) == losses(out), command


def test_train_gpt_prints_its_graphs_when_asked(out: str) -> None:
    assert "forward: " in out and "backward: " in out and "discard" in out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, text: Path) -> tuple[str, Path]:
    """What finetune_hf.py prints, and what it leaves."""
    pytest.importorskip("peft")
    short, folder = tmp_path_factory.mktemp("data") / "text", tmp_path_factory.mktemp("tuned")
    short.write_text(text.read_text()[:12_000])
    options = ["--executor", "eager", "--data", str(short), "--out", str(folder), "--batch", "4", "--epochs", "2"]
    program = ["examples/finetune_hf.py", *options]
    return run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *program]), folder


@pytest.mark.slow
def test_finetune_hf_learns(tuned: tuple[str, Path]) -> None:
    losses = re.search(r"^held-out loss ([\d.]+) before, ([\d.]+) after$", tuned[0], re.M)
    assert losses and float(losses[2]) < float(losses[1]) - 0.05
    assert re.search(r"^written: '.+'$", tuned[0], re.M)


@pytest.mark.slow
def test_finetune_hf_saves_what_transformers_and_peft_load(tuned: tuple[str, Path]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, folder = tuned
    difference = re.search(r"logits differ by ([\de.+-]+) from", out)
    assert difference and float(difference[1]) < 1e-4
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        untrained = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, folder / "adapter")(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - untrained).abs().max() > 1e-2


@pytest.mark.parametrize("file", sorted((ROOT / "examples/launch").iterdir()), ids=lambda file: file.name)
def test_a_launch_file_is_a_program_of_bash(file: Path) -> None:
    assert os.access(file, os.X_OK)
    assert subprocess.run(["bash", "-n", file], capture_output=True, text=True).stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrun.sh", "torchrun_static.sh"])
def test_a_launch_file_joins_two_nodes(name: str, tmp_path: Path) -> None:
    """Both are this machine, with one rank each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    settings = {**os.environ, "PATH": path, "HEAD": "127.0.0.1", "PORT": str(port), "NODES": "2", "RANKS": "1"}
    program = ["examples/resume.py", "--executor", "eager", "--steps", "10", "--folder", str(tmp_path)]
    nodes = [
        subprocess.Popen(
            [ROOT / "examples/launch" / name, *program],
            cwd=ROOT,
            env={**settings, "NODE": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [node.communicate(timeout=840)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("step   10" in out for out in said) == 1  # rank 0 alone prints
    (mark,) = tmp_path.glob("step-*10/zerofx.json")
    assert json.loads(mark.read_text())["world_size"] == 2


EXAMPLES = ["train_gpt.py", "finetune_hf.py", "resume.py", "force_field.py", "ema.py", "qlora.py"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_read_in_one_sitting(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 150


# ------------------------------------------------------------------------------------------------ passes of one's own


def example(name: str, *arguments: str) -> str:
    """What examples/``name`` prints, on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*torchrun, f"examples/{name}", "--executor", "eager", *arguments], timeout=840)


@pytest.mark.slow
def test_own_pass_prints_norms_and_what_its_pass_did() -> None:
    out = example("own_pass.py", "--steps", "10", "--dim", "16", "--layers", "2")
    assert re.search(r"^step +10 +loss [\d.]+ +gradient norms: blocks.0 [\d.]+, blocks.1 [\d.]+, embedding", out, re.M)
    assert "backward: gradient_norms changed" in out and "all_reduce(stack_default" in out


@pytest.mark.slow
def test_own_precision_is_nearer_to_float64() -> None:
    out = example("own_precision.py", "--dim", "512")
    plain, wide = map(float, re.findall(r"in float\d+: ([\d.e-]+) from float64", out))
    assert wide < plain / 2
    assert "forward: wide_sums changed" in out


@pytest.mark.slow
def test_own_collective_keeps_an_average_of_every_weight() -> None:
    out = example("own_collective.py", "--steps", "10", "--dim", "16")
    assert len(re.findall(r"^\d\.(?:weight|bias) +is 0\.\d+ of its norm from its average", out, re.M)) == 6


def test_torch_compile_backend_trains() -> None:
    out = example("torch_compile_backend.py", "--steps", "40", "--dim", "32")
    first, last = map(float, re.findall(r"loss ([\d.]+)", out))
    assert last < first and "the whole model has 1,283 parameters" in out


@pytest.mark.slow
def test_force_field_learns_forces() -> None:
    out = run([sys.executable, "examples/force_field.py", "--executor", "eager", "--steps", "60"])
    before = re.search(r"^mean square of held-out forces ([\d.]+)$", out, re.M)
    after = re.search(r"^held-out error of forces ([\d.]+), 2 graphs$", out, re.M)
    assert before and after and float(after[1]) < 0.3 * float(before[1]), out


@pytest.mark.slow
def test_ema_draws_samples_of_averages_and_goes_on_on_more_ranks(tmp_path: Path) -> None:
    program = ["examples/ema.py", "--executor", "eager", "--folder", str(tmp_path), "--steps", "200"]
    for ranks in (2, 3):
        out = run([*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), *program])
        found = re.search(r"^step (\d+): samples are [\d.]+ from the circle, of averages ([\d.]+)$", out, re.M)
        assert found and int(found[1]) == 200 * (ranks - 1) and float(found[2]) < 0.1, out  # noise alone is 0.4 away


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_qlora_learns_and_saves_its_adapters(kind: str, tmp_path: Path) -> None:
    for package in ("peft", "bitsandbytes", "torchao"):
        pytest.importorskip(package)
    out = example("qlora.py", "--quantize", kind, "--steps", "40", "--out", str(tmp_path))
    first, last = map(float, re.findall(r"loss ([\d.]+)", out))
    assert last < first < 5.5  # of 256 bytes, all alike: 5.55
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    held = re.search(r"a rank holds ([\d.]+) MB", out)
    assert held and float(held[1]) < 0.5  # a quarter of half of 1.6 MB, the embedding and the head, adapters


@pytest.mark.slow
def test_the_notebook_runs_and_shows_the_graphs_of_each_stage() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples" / "two_layers.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    texts = [o["text"] for cell in notebook.cells for o in cell.get("outputs", ()) if o["output_type"] == "stream"]
    out = "".join(texts)
    for words in ("2 all-reduces:", "refresh  up", "discard  up", "group changed", "reduce_scatter up"):
        assert words in out, words
    assert "gradient_norms changed" in texts[-1]


LAUNCH = ["sh", "examples/launch/eight_gpus.sh"]


@pytest.mark.slow
def test_the_launch_file_for_gpus_starts_as_many_ranks_as_it_is_told(
    out: str, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUS", "2")
    monkeypatch.setenv("PYTHON", sys.executable)
    found = run([*LAUNCH, *program[1:], "--heads", "2", "--lr", "4e-3"])
    assert losses(found) == losses(out)


def test_the_launch_file_for_gpus_says_that_there_is_none(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"  # lists none
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("GPUS", None)
    done = subprocess.run(LAUNCH, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1 and "no GPU found" in done.stderr


@pytest.mark.slow
def test_offload_trains_with_its_state_on_a_disk(tmp_path: Path) -> None:
    program = ["examples/offload.py", "--scratch", str(tmp_path), "--steps", "10", "--dim", "64", "--executor", "eager"]
    out = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *program])
    found = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", out, re.M)]
    assert len(found) == 2 and found[1] < found[0]
    assert re.search(r"^on disk +[\d.]+ \wB  optimizer state$", out, re.M)
    assert not list(tmp_path.iterdir())
