"""`python tests/soak`; see soak.py."""

import sys

from soak import main

sys.exit(main())
