"""Where the soak's own modules are, for its tests."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "isolation")]
