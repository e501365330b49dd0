"""How tests ask for a session that coalesces."""
from __future__ import annotations

import pytest

BOTH = pytest.mark.parametrize("session", [False, True], indirect=True, ids=["plain", "coalescing"])
