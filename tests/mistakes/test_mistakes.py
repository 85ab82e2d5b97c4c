"""What one sees of a mistake names what was found, and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mistakes.cases import MISTAKES, seen

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_seen_of_a_mistake_names_it_and_what_to_do(make_workers: Any, name: str) -> None:
    mistake = MISTAKES[name]
    texts = make_workers(2).run(seen, name) if mistake.ranks else [seen(name)]
    assert not mistake.missing(texts), "\n".join(texts)
