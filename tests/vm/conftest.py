"""The layer is preloaded too: it must not meet the BLAS that the suite itself runs with."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
