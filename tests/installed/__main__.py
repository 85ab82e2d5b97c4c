"""Builds the wheel and the sdist, and uses them as a user does: outside of the repository, in empty environments.

    python -m tests.installed --pythons "python3.10 python3.13" --torch 2.13.0           # `make wheel-check`

For each interpreter: a new environment, torch, the wheel; then, in an empty folder, the command line and `program.py`
on two ranks, in every stage, with both executors. In the first the sdist takes the wheel's place afterwards.
Environments are made in a temporary folder, one at a time, since torch takes some gigabytes. pip decides where torch
comes from: PIP_EXTRA_INDEX_URL names an index of builds without CUDA.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"


def run(command: list[str | Path], cwd: Path, timeout: float = 300) -> str:
    """Output of the command, without what would lead it back to the repository: PYTHONPATH and the like."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of what git has or would add, built from a copy."""
    source = folder / "source"
    for name in run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():  # a file may be deleted and not yet committed
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    run([sys.executable, "-c", BUILD, folder], source)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def compare(wheel: Path, sdist: Path, folder: Path) -> None:
    """A wheel of the sdist holds the same files as the wheel of the repository, byte for byte."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)  # of our own making
    (source,) = folder.iterdir()
    run([sys.executable, "-c", BUILD, folder], source)
    (again,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(again) as theirs:
        of_repository, of_sdist = ({(file.filename, file.CRC) for file in held.infolist()} for held in (ours, theirs))
    if of_repository != of_sdist:
        sys.exit(f"wheels of the repository and of the sdist differ: {sorted(of_repository ^ of_sdist)}")


def use(python: Path, folder: Path, executors: list[str]) -> None:
    """The command line and `program.py`, in an empty folder."""
    folder.mkdir()
    print("  " + run([python, "-m", "zerofx", "--version"], folder).strip(), flush=True)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = shutil.copy(Path(__file__).with_name("program.py"), folder)
    out = run([*torchrun, program, str(ROOT), *executors], folder, timeout=900)
    print("".join(f"  {line}\n" for line in out.splitlines()), end="", flush=True)


def check(interpreter: str, torch: str, wheel: Path, sdist: Path | None, executors: list[str], folder: Path) -> None:
    began = time.perf_counter()
    version = run([interpreter, "--version"], folder).strip()
    run([interpreter, "-m", "venv", folder / "env"], folder)
    python = folder / "env/bin/python"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, f"torch=={torch}", wheel], folder, timeout=1800)
    run([python, "-m", "pip", "check"], folder)
    print(f"{version}: torch and the wheel, installed in {time.perf_counter() - began:.0f} s", flush=True)
    use(python, folder / "wheel", executors)
    if sdist is not None:
        run([*pip, "--force-reinstall", "--no-deps", sdist], folder, timeout=600)
        print(f"{version}: the sdist", flush=True)
        use(python, folder / "sdist", executors[:1])
    print(f"{version}: {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default=sys.executable, help="interpreters, by name or path, with spaces between")
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--executors", default="eager inductor")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        (folder / "again").mkdir()
        compare(wheel, sdist, folder / "again")
        print(*(f"{built.name}: {built.stat().st_size:,} bytes" for built in (wheel, sdist)), sep="\n", flush=True)
        for i, interpreter in enumerate(args.pythons.split()):
            with tempfile.TemporaryDirectory() as place:
                check(interpreter, args.torch, wheel, sdist if i == 0 else None, args.executors.split(), Path(place))


if __name__ == "__main__":
    main()
