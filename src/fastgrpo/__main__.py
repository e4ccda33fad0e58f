"""`python -m fastgrpo`: the same as the `fastgrpo` command."""

from __future__ import annotations

import sys

from fastgrpo.cli import main

sys.exit(main())
