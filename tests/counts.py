"""How the product is divided, in numbers: ``python -m tests.counts``.

Lines of the product, the passes of a default run beside the files that have them, fields of the records that all share,
and for each optional feature the files outside of its folder that name it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from zerofx.compiler.options import Options
from zerofx.features import FEATURES
from zerofx.passes import PIPELINE
from zerofx.passes.context import Context
from zerofx.passes.proof.known import Known

ROOT = Path(__file__).parent.parent
WORDS = {
    "same_host": r"same_host",
    "gloo_threads": r"gloo_threads",
    "one_copy": r"one_copy",
    "lookups": r"lookups?\b",
    "meshes": r"mesh\b|replicas?\b|two_hops?\b|near_|secondary",
    "step_in_backward": r"step_in_backward|\bctx\.steps\b|steps_inside",
    "offload": r"offload|reload|on_disk|on_host",
    "partition_activations": r"partition_activations|parts_group|parts_ranks",
    "wire": r"\bwire\b|dequantize|\bquantize\b",
}
"""What names a feature, in code."""


def product() -> list[Path]:
    """Every file of the product; what is found through a symlink once."""
    found = {path.resolve() for folder in ("zerofx", "passes", "kernels") for path in (ROOT / folder).rglob("*.py")}
    return sorted(found)


def code_of(path: Path) -> str:
    """The text without docstrings and comments."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())
    return re.sub(r"#.*", "", text)


def outside(feature: str) -> list[str]:
    folder = ROOT / "zerofx" / "features" / feature
    files = [path for path in product() if folder not in path.parents and re.search(WORDS[feature], code_of(path))]
    return [str(path.relative_to(ROOT)) for path in files]


def main() -> None:
    files = product()
    lines = sum(len(path.read_text().splitlines()) for path in files)
    code = sum(bool(line.strip()) for path in files for line in code_of(path).splitlines())
    core = [pass_.__name__ for pass_ in PIPELINE if pass_.__module__.startswith("zerofx.passes")]
    known = set(re.findall(r"self[.](\w+): .+ = ", Path(inspect.getfile(Known)).read_text()))
    print(f"product: {len(files)} files, {lines:,} lines, {code:,} of them code")
    print(f"passes of a default run in stage 3: {len(core)}: {' '.join(core)}")
    fields = {kind.__name__: len(dataclasses.fields(kind)) for kind in (Context, Options)}
    print(f"fields: {fields}; attributes of Known: {len(known)}")
    for feature in FEATURES:
        own = len(list((ROOT / "zerofx" / "features" / feature).glob("*.py")))
        print(f"{feature:<22} {own:>3} files of its own, {len(outside(feature)):>3} others name it")


if __name__ == "__main__":
    main()
