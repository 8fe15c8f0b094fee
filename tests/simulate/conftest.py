"""Makes `simulate_cases` (builders of worlds) importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
